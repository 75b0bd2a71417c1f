"""Time our attention against the paper's package `evidence-depletion` in one run, and check that they agree.

    python recipes/attention_speed/run.py [RECIPE.toml] [--results FILE.json] [--readme FILE] [--table-only]

Ours and the reference alternate, with the same weights, tokens and seed; times are medians over the repeats.
"""

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import evidence_depletion
import torch
from evidence_depletion import baselines
from torch import Tensor, nn

from separator.attention import build_mechanism
from separator.report import format_table, measure_recipe
from separator.script import exit_status
from separator.training import environment

HERE = Path(__file__).parent
PASSES = {"forward": "forward", "training": "forward + backward"}
WARM_UP = 3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure (or read) the results, write them, and write the README's table from them."""
    measure_recipe(HERE, __doc__, measure, tables, arguments)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The README's tables: times and agreement, and what they were measured on."""
    columns = ["mechanism", "B, L, D, S", "pass", "reference, ms", "ours, ms", "times faster"]
    columns += ["largest difference"]
    rows = []
    for row in results["rows"]:
        for key, label in PASSES.items():
            ours, reference = row[key]["ours_ms"], row[key]["reference_ms"]
            difference = row["gradient_difference" if key == "training" else "output_difference"]
            shape = ", ".join(map(str, row["shape"]))
            times = [f"{reference:.1f}", f"{ours:.1f}", f"**{reference / ours:.1f}**"]
            rows.append([row["mechanism"], shape, label, *times, f"{difference:.0e}"])
    where = results["environment"]
    setting = (
        f"{where['processor']} ({where['cores']} cores), {where['threads']} threads, torch {where['torch']}, "
        f"evidence-depletion {where['evidence_depletion']}, {results['date']}; "
        f"medians of {results['repeats']} repeats, {results['seconds']:.0f} s in all."
    )
    return {"speed": format_table(columns, rows), "setting": setting}


def measure(recipe: dict[str, Any]) -> dict[str, Any]:
    """Time every mechanism of the recipe at every shape."""
    torch.set_num_threads(recipe["threads"])
    start, rows = time.perf_counter(), []
    for mechanism in recipe["mechanisms"]:
        for shape in recipe["shapes"]:
            rows.append(compare(mechanism, tuple(shape), recipe["repeats"]))
            print(json.dumps(rows[-1]), file=sys.stderr)
    where = {
        **environment(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "evidence_depletion": evidence_depletion.__version__,
    }
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - start, 1),
        "repeats": recipe["repeats"],
        "environment": where,
        "rows": rows,
    }


def compare(mechanism: str, shape: tuple[int, int, int, int], repeats: int) -> dict[str, Any]:
    """One mechanism at one shape: largest differences, and milliseconds of both implementations."""
    n_batch, n_tokens, d_model, n_slots = shape
    torch.manual_seed(0)
    ours, reference = build_pair(mechanism, n_slots, d_model)
    tokens = torch.randn(n_batch, n_tokens, d_model)
    outputs, gradients = zip(outcome(ours, tokens), outcome(reference, tokens), strict=True)
    row: dict[str, Any] = {
        "mechanism": mechanism,
        "shape": list(shape),
        "output_difference": max(largest_difference(x, y) for x, y in zip(*outputs, strict=True)),
        "gradient_difference": max(relative_difference(x, y) for x, y in zip(*gradients, strict=True)),
    }
    for key, once in (("forward", time_forward), ("training", time_training)):
        times = alternate(once, ours, reference, tokens, repeats)
        row[key] = {f"{name}_ms": round(statistics.median(t), 3) for name, t in times.items()}
        row[key] |= {f"{name}_fastest_ms": round(min(t), 3) for name, t in times.items()}
    return row


def build_pair(mechanism: str, n_slots: int, d_model: int) -> tuple[nn.Module, nn.Module]:
    """Ours and the reference's, with the same weights."""
    options = {"n_slots": n_slots, "d_model": d_model}
    ours = build_mechanism(mechanism, **options)
    if mechanism.startswith("evidence_"):
        form = mechanism.removeprefix("evidence_")
        reference = evidence_depletion.EvidenceDepletionSlotAttention(depletion=form, **options)
    else:
        kind = {"sequential": baselines.SequentialSA, "vanilla": baselines.VanillaSA}[mechanism]
        reference = kind(**options)
    reference.load_state_dict(ours.state_dict())
    return ours, reference


def outcome(mechanism: nn.Module, tokens: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs, and the gradients of the tokens and parameters, from one seed."""
    tokens = tokens.clone().requires_grad_()
    torch.manual_seed(1)
    out = mechanism(tokens)
    loss_of(out).backward()
    gradients = [p.grad for p in (tokens, *mechanism.parameters()) if p.grad is not None]
    return [x.detach() for x in (out.slots, out.attn, *(out.evidence or []))], gradients


def largest_difference(ours: Tensor, reference: Tensor) -> float:
    """Largest absolute difference."""
    return float((ours - reference).abs().max())


def relative_difference(ours: Tensor, reference: Tensor) -> float:
    """Largest difference relative to the largest entry, or to one if that is less."""
    return largest_difference(ours, reference) / max(1.0, float(reference.abs().max()))


def loss_of(out: Any) -> Tensor:
    """A loss in which slots and attention both count."""
    loss: Tensor = out.slots.square().sum() + out.attn.square().sum()
    return loss


def alternate(
    once: Callable[[nn.Module, Tensor], float],
    ours: nn.Module,
    reference: nn.Module,
    tokens: Tensor,
    repeats: int,
) -> dict[str, list[float]]:
    """Milliseconds of each repeat, the two implementations by turns."""
    times: dict[str, list[float]] = {"ours": [], "reference": []}
    for repeat in range(WARM_UP + repeats):
        for name, mechanism in (("ours", ours), ("reference", reference)):
            elapsed = once(mechanism, tokens)
            if repeat >= WARM_UP:
                times[name].append(1000 * elapsed)
    return times


def time_forward(mechanism: nn.Module, tokens: Tensor) -> float:
    """Seconds of one forward pass without gradients."""
    with torch.no_grad():
        start = time.perf_counter()
        mechanism(tokens)
        return time.perf_counter() - start


def time_training(mechanism: nn.Module, tokens: Tensor) -> float:
    """Seconds of forward and backward, to the tokens as to the parameters."""
    tokens = tokens.clone().requires_grad_()
    mechanism.zero_grad()
    start = time.perf_counter()
    loss_of(mechanism(tokens)).backward()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
