"""What is particular to each mechanism that evidence depletion is compared with."""

import copy
import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from separator.attention import (
    DEPLETION_FORMS,
    MECHANISMS,
    Mechanism,
    SlotAttentionOutput,
    SparseSlotAttention,
    build_mechanism,
    explained_share,
)
from separator.attention.transport import entropy_gradient, sharpen, sinkhorn
from separator.errors import SeparatorError

N_BATCH, N_TOKENS, D_MODEL, N_SLOTS = 3, 12, 8, 4
DATASPACE = [f"dataspace_{form}{bias}" for form in DEPLETION_FORMS for bias in ("", "_bias")]
COMPARED = [name for name in MECHANISMS if not name.startswith("evidence")]


def example_tokens() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(N_BATCH, N_TOKENS, D_MODEL, generator=generator, dtype=torch.float64)


def build(name: str, **options: object) -> Mechanism:
    """A mechanism in float64 and eval(), with norms and biases that are not at their neutral start."""
    torch.manual_seed(1)
    mechanism = build_mechanism(name, **{"n_slots": N_SLOTS, "d_model": D_MODEL, **options}).double().eval()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return mechanism


def call(mechanism: Mechanism, tokens: Tensor, seed: int = 2, **options: object) -> SlotAttentionOutput:
    torch.manual_seed(seed)
    return mechanism(tokens, **options)


def entropy(plan: Tensor) -> Tensor:
    return -torch.special.xlogy(plan, plan).sum((-2, -1))


# the sequential family


def slow_sequential(name: str, m: Mechanism, tokens: Tensor, seed: int = 2) -> SlotAttentionOutput:
    """The rules to the letter: tokens that are really scaled, keys and values for every slot."""
    torch.manual_seed(seed)
    starts = m.slot_mu + m.slot_sigma * torch.randn(len(tokens), m.n_slots, m.d_model, dtype=tokens.dtype)
    h = m.norm_in(tokens)
    coverage, stick = torch.zeros(tokens.shape[:2]), torch.ones(tokens.shape[:2])
    slots, attns = [], []
    for slot in starts.unbind(1):
        left = h * stick[..., None] if name == "stickbreaking" else h
        keys, values = m.proj_k(left), m.proj_v(left)
        for _ in range(m.n_iter):
            logits = torch.einsum("bd,bld->bl", m.proj_q(m.norm_s(slot)), keys) / (m.tau * D_MODEL**0.5)
            if name.endswith("bias"):
                norm = left.norm(dim=2)
                logits = logits + m.gamma * torch.log(norm / norm.amax(1, keepdim=True))
            if name == "coverage":
                logits = logits - m.beta * coverage
            attn = stick / (1 + torch.exp(-logits)) if name == "stickbreaking" else torch.softmax(logits, 1)
            weights = attn / attn.sum(1, keepdim=True).clamp(min=1e-8)
            slot = m.gru(torch.einsum("bl,bld->bd", weights, values), slot)
            slot = slot + m.mlp(m.norm_mlp(slot))
        slots.append(slot)
        attns.append(attn)
        if name.startswith("dataspace"):
            share = explained_share(attn, m.depletion)
            h = h * (1 - share).clamp(min=m.epsilon)[..., None]
        coverage = coverage + attn
        if name == "stickbreaking":
            stick = (stick * (1 - attn)).clamp(min=m.epsilon)
    return SlotAttentionOutput(torch.stack(slots, 1), torch.stack(attns, 1), None)


@pytest.mark.parametrize("name", ["sequential", *DATASPACE, "coverage", "stickbreaking"])
def test_the_sequential_mechanisms_are_those_of_a_slow_loop(name: str) -> None:
    mechanism, tokens = build(name), 3 * example_tokens()
    ours, slow = call(mechanism, tokens), slow_sequential(name, mechanism, tokens)
    torch.testing.assert_close(ours.slots, slow.slots, atol=1e-10, rtol=0)
    torch.testing.assert_close(ours.attn, slow.attn, atol=1e-10, rtol=0)
    assert ours.evidence is None


def test_coverage_of_no_weight_is_sequential_and_a_heavy_one_sends_every_slot_elsewhere() -> None:
    tokens = 3 * example_tokens()
    plain = call(build("sequential"), tokens)
    torch.testing.assert_close(call(build("coverage", beta=0.0), tokens).slots, plain.slots)
    peaks = call(build("coverage", beta=1e4, tau=1e-3), tokens).attn.argmax(2)
    assert all(len(set(row)) == N_SLOTS for row in peaks.tolist())
    assert any(
        len(set(row)) < N_SLOTS for row in call(build("sequential", tau=1e-3), tokens).attn.argmax(2).tolist()
    )


def test_the_bias_of_data_space_is_what_silences_a_token_that_was_explained() -> None:
    """A scaled token has logits near zero, which a softmax does not exclude; its norm in the logits does."""
    tokens = example_tokens()
    forced = torch.zeros(N_BATCH, N_TOKENS)
    forced[:, 5] = 1
    later = {
        name: call(build(name), tokens, forced_attn_first=forced).attn[:, 1:, 5].max().item()
        for name in ("dataspace_linear", "dataspace_linear_bias")
    }
    assert later["dataspace_linear"] > 1e-3
    assert later["dataspace_linear_bias"] < 1e-9


@pytest.mark.parametrize("name", ["coverage", "stickbreaking", "dataspace_linear"])
def test_only_the_first_slot_in_order_meets_untouched_tokens(name: str) -> None:
    mechanism, tokens = build(name), example_tokens()
    orders = ([2, 0, 3, 1], torch.tensor([2, 3, 1, 0]), [0, 1, 2, 3])
    first, other, by_index = (call(mechanism, tokens, slot_order=order).slots for order in orders)
    assert torch.equal(first[:, 2], other[:, 2])
    assert not torch.allclose(first[:, 0], other[:, 0])
    assert not torch.allclose(first[:, 2], by_index[:, 2])
    assert torch.equal(call(mechanism, tokens).slots, by_index)


@given(
    seed=st.integers(0, 2**31),
    size=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 6)),
    level=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    epsilon=st.sampled_from([1e-8, 1e-4, 0.3]),
)
def test_a_slot_breaks_off_no_more_than_the_stick_which_is_never_negative(
    seed: int, size: tuple[int, int, int], level: float, epsilon: float
) -> None:
    torch.manual_seed(seed)
    n_batch, n_tokens, n_slots = size
    mechanism = build_mechanism("stickbreaking", n_slots=n_slots, d_model=4, epsilon=epsilon, tau=0.01).eval()
    attn = mechanism(level * torch.randn(n_batch, n_tokens, 4)).attn
    stick = torch.ones(n_batch, n_tokens)
    for part in attn.unbind(1):
        assert (part >= 0).all()
        assert (part <= stick).all()
        left = (stick * (1 - part)).clamp(min=epsilon)
        assert (left <= stick).all()
        stick = left


def test_a_stick_that_no_slot_wants_pools_no_value() -> None:
    mechanism, tokens = build("stickbreaking", n_slots=1, n_iter=1), example_tokens()
    slot = call(mechanism, tokens, forced_attn_first=torch.zeros(N_BATCH, N_TOKENS)).slots[:, 0]
    torch.manual_seed(2)
    start = mechanism.slot_mu + mechanism.slot_sigma * torch.randn(N_BATCH, 1, D_MODEL, dtype=tokens.dtype)
    kept = mechanism.gru(torch.zeros_like(slot), start[:, 0])
    torch.testing.assert_close(slot, kept + mechanism.mlp(mechanism.norm_mlp(kept)))


# sparse competition


@pytest.mark.parametrize(("norm_fn", "power"), [("sparsemax", 1), ("entmax15", 2)])
def test_sparse_normalisers_are_those_of_a_bisection(norm_fn: str, power: int) -> None:
    """p = max(z / power - t, 0)^power with the t that makes p sum to one (Peters et al., 2019)."""
    logits = 2 * torch.randn(2, 3, N_SLOTS, 7, dtype=torch.float64)
    low, high = logits.amax(-2, keepdim=True) / power - 1, logits.amax(-2, keepdim=True) / power
    for _ in range(80):
        middle = (low + high) / 2
        above = ((logits / power - middle).clamp(min=0) ** power).sum(-2, keepdim=True) > 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    attn = build(norm_fn).normalise(logits)
    torch.testing.assert_close(attn, (logits / power - low).clamp(min=0) ** power)
    assert (attn == 0).any()


# transport


def test_sinkhorn_sums_to_one_over_slots_and_in_the_limit_gives_every_slot_its_part() -> None:
    logits = 3 * torch.randn(2, 3, N_SLOTS, N_TOKENS, dtype=torch.float64)
    for n_rounds in (1, 5, 300):
        plan = sinkhorn(logits, n_rounds)
        torch.testing.assert_close(plan.sum(-2), torch.ones_like(plan.sum(-2)))
    torch.testing.assert_close(plan.sum(-1), torch.full_like(plan.sum(-1), N_TOKENS / N_SLOTS))
    shifted = logits + torch.randn(2, 3, N_SLOTS, 1) + torch.randn(2, 3, 1, N_TOKENS)
    torch.testing.assert_close(sinkhorn(shifted, 300), plan)


def test_logits_that_underflow_give_a_plan_and_gradients() -> None:
    logits = (1e4 * torch.randn(2, N_SLOTS, N_TOKENS)).requires_grad_()
    plan = sinkhorn(logits + sharpen(logits, 5, 5, 0.1), 5)
    plan.square().sum().backward()
    assert plan.isfinite().all()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_the_gradient_of_the_entropy_is_that_of_autograd() -> None:
    cost = torch.randn(2, 3, N_SLOTS, N_TOKENS, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(entropy(sinkhorn(cost, 5)).sum(), cost)
    torch.testing.assert_close(entropy_gradient(cost, 5), expected)


def test_each_step_of_mesh_has_its_length_and_lowers_the_entropy() -> None:
    cost = torch.randn(6, N_SLOTS, N_TOKENS, dtype=torch.float64)
    offsets = [sharpen(cost, 5, n_steps, 0.1) for n_steps in range(9)]
    for before, after in itertools.pairwise(offsets):
        length = (after - before).flatten(1).norm(dim=1)
        torch.testing.assert_close(length, torch.full_like(length, 0.1))
        assert (entropy(sinkhorn(cost + after, 5)) < entropy(sinkhorn(cost + before, 5))).all()


def test_mesh_is_the_same_where_gradients_are_off() -> None:
    mechanism, tokens = build("mesh"), example_tokens()
    plain = call(mechanism, tokens).slots
    with torch.no_grad():
        assert torch.equal(call(mechanism, tokens).slots, plain)
    with torch.inference_mode():
        inside = call(mechanism, tokens).slots
    assert torch.equal(inside, plain)


def test_the_steps_of_mesh_are_constants_to_autograd() -> None:
    mechanism = build("mesh")
    logits = torch.randn(2, N_SLOTS, N_TOKENS, dtype=torch.float64, requires_grad=True)
    mechanism.init_noise = 0.0
    offset = sharpen(logits, mechanism.sinkhorn_iters, mechanism.mesh_steps, mechanism.mesh_lr)
    readout = torch.randn_like(logits)
    (ours,) = torch.autograd.grad((mechanism.normalise(logits) * readout).sum(), logits)
    (frozen,) = torch.autograd.grad((sinkhorn(logits + offset, 5) * readout).sum(), logits)
    torch.testing.assert_close(ours, frozen)


@pytest.mark.parametrize(("name", "noise"), [("sa_sh", "noise_std"), ("mesh", "init_noise")])
@pytest.mark.parametrize("training", [True, False])
def test_the_noise_of_a_plan_has_its_scale_and_can_be_switched_off(
    name: str, noise: str, training: bool
) -> None:
    mechanism = build(name, mesh_lr=0.0) if name == "mesh" else build(name)
    mechanism.train(training)
    logits = torch.zeros(200, N_SLOTS, N_TOKENS, dtype=torch.float64)
    scale = getattr(mechanism, noise)
    torch.manual_seed(0)
    noisy = torch.log(mechanism.normalise(logits))
    centred = noisy - noisy.mean((1, 2), keepdim=True)  # the rounds take out row and column means
    expected = scale * math.sqrt((1 - 1 / N_SLOTS) * (1 - 1 / N_TOKENS))
    assert centred.std().item() == pytest.approx(expected, rel=0.05)
    setattr(mechanism, noise, 0.0)
    assert torch.equal(mechanism.normalise(logits), mechanism.normalise(logits))


# the query set predictor


def test_queries_know_no_noise_and_no_order() -> None:
    mechanism, tokens = build("dspn"), example_tokens()
    out = call(mechanism, tokens, seed=0)
    assert torch.equal(call(mechanism, tokens, seed=1, n_slots=N_SLOTS).slots, out.slots)
    turned = copy.deepcopy(mechanism)
    with torch.no_grad():
        turned.queries.copy_(mechanism.queries.flip(1))
    torch.testing.assert_close(call(turned, tokens).slots, out.slots.flip(1))
    torch.testing.assert_close(call(turned, tokens).attn, out.attn.flip(1))


# all


@pytest.mark.parametrize("name", COMPARED)
def test_under_autocast_the_attention_stays_float32(name: str) -> None:
    torch.manual_seed(0)
    mechanism = build_mechanism(name, d_model=D_MODEL).eval()
    tokens = example_tokens().float()
    plain = call(mechanism, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(mechanism, tokens)
    assert torch.equal(out.slots, plain.slots)
    assert torch.equal(out.attn, plain.attn)


@pytest.mark.parametrize("level", [0.0, 1e-20, 1e4])
@pytest.mark.parametrize("name", COMPARED)
def test_silent_and_loud_tokens_give_finite_slots_and_gradients(name: str, level: float) -> None:
    torch.manual_seed(0)
    mechanism = build_mechanism(name, d_model=D_MODEL)
    tokens = (level * torch.randn(2, 1 if level == 0 else 9, D_MODEL)).requires_grad_()
    out = mechanism(tokens)
    (out.slots.square().sum() + out.attn.square().sum()).backward()
    for value in (out.slots, out.attn, tokens.grad, *(p.grad for p in mechanism.parameters())):
        assert value is not None
        assert value.isfinite().all()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("dataspace_linear", {"epsilon": 0.0}, "epsilon=0.0 is not between 0 and 1"),
        ("stickbreaking", {"epsilon": 1.0}, "epsilon=1.0 is not between 0 and 1"),
        ("coverage", {"tau": 0.0}, "tau=0.0 is not positive"),
        ("sa_sh", {"sinkhorn_iters": 0}, "sinkhorn_iters=0 is not positive"),
        ("mesh", {"mesh_steps": 0}, "mesh_steps=0 is not positive"),
        (
            "coverage",
            {"beta": "heavy"},
            "beta='heavy' of mechanism 'coverage' is not a finite number, as 3.0 is",
        ),
        ("evidence_linear", {"gamma": math.inf}, "gamma=inf of mechanism 'evidence_linear' is not a finite"),
        ("evidence_linear", {"depletion_scale": 1}, "depletion_scale=1 of .* is not a text, as 'sum' is"),
        (
            "sequential",
            {"n_iter": 2.5},
            "n_iter=2.5 of mechanism 'sequential' is not a whole number, as 3 is",
        ),
        ("sequential", {"n_slots": True}, "n_slots=True of mechanism 'sequential' is not a whole number"),
        ("dspn", {"n_heads": 5}, "n_heads=5 does not divide d_model=64"),
        ("dspn", {"n_iter": 3}, r"'dspn' does not take \['n_iter'\]; it takes \['d_model', 'n_heads', "),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(SeparatorError, match=message):
        build_mechanism(name, **options)


def test_an_unknown_sparse_normaliser_is_refused() -> None:
    with pytest.raises(SeparatorError, match="unknown norm_fn='softmax'; choose sparsemax or entmax15"):
        SparseSlotAttention(norm_fn="softmax")
