"""Agreement with the paper's own package, which the `dev` extra installs."""

import itertools
import json
import runpy
import shutil
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from separator.attention import (
    MECHANISMS,
    SlotAttention,
    build_mechanism,
    explained_share,
    mechanism_options,
)
from separator.report import stale_tables

reference = pytest.importorskip("evidence_depletion")
models = pytest.importorskip("evidence_depletion.models")

RECIPE = Path(__file__).parents[1] / "recipes" / "attention_speed"
TOLERANCE = 1e-5
SIZES = [(3, 20, 16, 4), (2, 300, 64, 5)]  # B, L, D, S


def reference_mechanism(name: str, **options: int) -> nn.Module:
    """Theirs, as their own model of that method builds it."""
    mechanism: nn.Module = models.build_model(name, **options).slot_attn
    return mechanism


def build_pair(name: str, n_slots: int, d_model: int) -> tuple[SlotAttention, nn.Module]:
    """Ours and theirs, theirs loaded from ours."""
    torch.manual_seed(0)
    ours = build_mechanism(name, n_slots=n_slots, d_model=d_model)
    theirs = reference_mechanism(name, n_slots=n_slots, d_model=d_model)
    with torch.no_grad():  # away from the zeros and ones of a fresh LayerNorm
        for parameter in ours.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs


def outputs_and_gradients(
    mechanism: nn.Module, tokens: Tensor, **options: object
) -> tuple[list[Tensor], dict[str, Tensor]]:
    tokens = tokens.clone().requires_grad_()
    torch.manual_seed(1)
    out = mechanism(tokens, **options)
    outputs = [out.slots, out.attn, *(out.evidence or [])]
    generator = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in outputs)
    loss.backward()
    return outputs, {"tokens": tokens.grad, **{name: p.grad for name, p in mechanism.named_parameters()}}


def assert_agreement(ours: SlotAttention, theirs: nn.Module, tokens: Tensor, **options: object) -> None:
    our_outputs, our_gradients = outputs_and_gradients(ours, tokens, **options)
    their_outputs, their_gradients = outputs_and_gradients(theirs, tokens, **options)
    torch.testing.assert_close(our_outputs, their_outputs, atol=TOLERANCE, rtol=0)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():  # relative to the largest entry, at least one
        scale = max(1.0, float(gradient.abs().max()))
        torch.testing.assert_close(
            our_gradients[name] / scale, gradient / scale, atol=TOLERANCE, rtol=0, msg=f"gradient of {name}"
        )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", reference.METHODS)
def test_outputs_and_gradients_agree(name: str, size: tuple[int, int, int, int], training: bool) -> None:
    n_batch, n_tokens, d_model, n_slots = size
    ours, theirs = build_pair(name, n_slots, d_model)
    tokens = 2 * torch.randn(n_batch, n_tokens, d_model)
    assert_agreement(ours.train(training), theirs.train(training), tokens)


@pytest.mark.parametrize("name", ["vanilla", "sparsemax", "sa_sh", "mesh", "evidence_quadratic"])
def test_forced_attention_agrees(name: str) -> None:
    ours, theirs = build_pair(name, 4, 16)
    tokens = torch.randn(3, 20, 16)
    assert_agreement(ours, theirs, tokens, forced_attn_first=torch.rand(3, 20).softmax(1))


def test_a_given_order_agrees() -> None:
    ours, theirs = build_pair("evidence_linear", 4, 16)
    assert_agreement(ours, theirs, torch.randn(3, 20, 16), slot_order=[2, 0, 3, 1])


def test_the_registry_has_every_method_of_the_paper() -> None:
    assert set(reference.METHODS) == {name for name in MECHANISMS if not build_mechanism(name).needs_claim}


@pytest.mark.parametrize("name", reference.METHODS)
def test_one_seed_gives_the_same_parameters_and_state_dicts_load_both_ways(name: str) -> None:
    example = reference_mechanism(name)
    chosen = ("depletion", "use_bias", "norm_fn")
    options = {key: getattr(example, key) for key in chosen if hasattr(example, key)}
    torch.manual_seed(3)
    ours = build_mechanism(name)
    torch.manual_seed(3)
    theirs = type(example)(**options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for key, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[key], value)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)


@pytest.mark.parametrize("name", reference.METHODS)
def test_the_defaults_are_those_of_the_reference(name: str) -> None:
    theirs = vars(reference_mechanism(name))
    ours = vars(build_mechanism(name))
    shared = {"n_slots", "n_iter", *mechanism_options(name)} & theirs.keys() & ours.keys()
    assert len(shared) >= (1 if name == "dspn" else 2)
    assert {key: ours[key] for key in shared} == {key: theirs[key] for key in shared}


def order_taken(out: NamedTuple) -> list[int]:
    """The slot whose attention explains each step's loss of evidence, with linear depletion."""
    order = []
    for before, after in itertools.pairwise(out.evidence):
        left = before[:, None] * (1 - explained_share(out.attn, "linear"))
        order.append(int((left - after[:, None]).abs().sum((0, 2)).argmin()))
    return order


def test_the_greedy_order_agrees_wherever_the_reference_starts_with_slot_0() -> None:
    """On untouched tokens all slots capture the same: there rounding decides, here the index."""
    ours, theirs = build_pair("evidence_linear", 4, 16)
    ours.eval()
    theirs.eval()
    orders = set()
    for seed in range(20):
        tokens = 3 * torch.randn(1, 20, 16, generator=torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        expected = theirs(tokens, order_policy="evidence_greedy")
        order = order_taken(expected)
        if order[0] == 0:
            orders.add(tuple(order))
            torch.manual_seed(seed)
            out = ours(tokens, order_policy="evidence_greedy")
            torch.testing.assert_close(out.slots, expected.slots, atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(out.evidence, expected.evidence, atol=TOLERANCE, rtol=0)
    assert len(orders) >= 2


def test_the_speed_recipe_measures_both_and_writes_its_table(tmp_path: Path) -> None:
    recipe, results, readme = tmp_path / "recipe.toml", tmp_path / "speed.json", tmp_path / "README.md"
    shutil.copy(RECIPE / "README.md", readme)
    recipe.write_text(
        'threads = 1\nrepeats = 1\nmechanisms = ["evidence_binary", "vanilla"]\nshapes = [[2, 9, 8, 3]]\n'
    )
    run = runpy.run_path(str(RECIPE / "run.py"))
    run["main"]([str(recipe), "--results", str(results), "--readme", str(readme)])
    rows = json.loads(results.read_text())["rows"]
    assert [row["mechanism"] for row in rows] == ["evidence_binary", "vanilla"]
    for row in rows:
        assert row["output_difference"] < TOLERANCE
        assert row["gradient_difference"] < TOLERANCE
        assert (
            min(row[key][f"{who}_ms"] for key in ("forward", "training") for who in ("ours", "reference")) > 0
        )
    assert "| evidence_binary | 2, 9, 8, 3 | forward |" in readme.read_text()


def test_the_speed_readme_is_what_its_results_give_and_meets_its_floors() -> None:
    """Never slower; with dense tokens at least 4 times faster forward, and 2 times with backward."""
    results = json.loads((RECIPE / "results" / "speed.json").read_text())
    tables = runpy.run_path(str(RECIPE / "run.py"))["tables"](results)
    assert stale_tables(RECIPE / "README.md", tables) == []
    rows = [row for row in results["rows"] if row["mechanism"] == "evidence_quadratic"]
    assert [row["shape"] for row in rows] == tomllib.loads((RECIPE / "recipe.toml").read_text())["shapes"]
    for row in rows:
        for key, floor in (("forward", 4), ("training", 2)):
            times_faster = row[key]["reference_ms"] / row[key]["ours_ms"]
            assert times_faster >= (floor if row["shape"][1] >= 2048 else 1), (row["shape"], key)
