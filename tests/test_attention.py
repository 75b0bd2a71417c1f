import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from separator.attention import (
    DEPLETION_FORMS,
    DEPLETION_SCALES,
    MECHANISMS,
    CoverageSlotAttention,
    DataSpaceSlotAttention,
    EvidenceDepletionSlotAttention,
    MeshSlotAttention,
    QuerySetPredictor,
    SequentialSlotAttention,
    SinkhornSlotAttention,
    SlotAttention,
    SlotAttentionOutput,
    SparseSlotAttention,
    StickBreakingSlotAttention,
    VanillaSlotAttention,
    build_mechanism,
    deplete,
    explained_share,
)
from separator.errors import SeparatorError

N_BATCH, N_TOKENS, D_MODEL, N_SLOTS = 3, 12, 8, 4
SHARE = 0.25
PARALLEL = ("vanilla", "sparsemax", "entmax15", "sa_sh", "mesh", "coverage_loss")
SLOT_ATTENTION = [name for name in MECHANISMS if name != "dspn"]


def example_tokens(seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(N_BATCH, N_TOKENS, D_MODEL, generator=generator, dtype=dtype)


def build(name: str, **options: object) -> SlotAttention:
    """A mechanism in float64 and eval(), with norms and biases that are not at their neutral start.

    What draws noise for each token and slot draws none.
    """
    torch.manual_seed(1)
    mechanism = build_mechanism(name, **{"n_slots": N_SLOTS, "d_model": D_MODEL, **options}).double().eval()
    with torch.no_grad():
        for parameter in mechanism.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    for noise in {"noise_std", "init_noise"} & vars(mechanism).keys():
        setattr(mechanism, noise, 0.0)
    return mechanism


def call(mechanism: SlotAttention, tokens: Tensor, seed: int = 2, **options: object) -> SlotAttentionOutput:
    torch.manual_seed(seed)
    if mechanism.needs_claim:
        options.setdefault("claim", lambda slot: torch.full(tokens.shape[:2], SHARE, dtype=slot.dtype))
    return mechanism(tokens, **options)


def slow_evidence_depletion(
    m: EvidenceDepletionSlotAttention, tokens: Tensor, *, seed: int = 2, greedy: bool = False
) -> SlotAttentionOutput:
    """Algorithm 1 to the letter, one sample at a time, with keys and values of every slot."""
    torch.manual_seed(seed)
    starts = m.slot_mu + m.slot_sigma * torch.randn(len(tokens), m.n_slots, m.d_model, dtype=tokens.dtype)
    slots, attns = torch.zeros_like(starts), torch.zeros(*starts.shape[:2], tokens.shape[1]).to(starts)
    evidences = [torch.ones(tokens.shape[:2], dtype=tokens.dtype)]
    evidences += [torch.zeros_like(evidences[0]) for _ in range(m.n_slots)]

    def attend(h: Tensor, slot: Tensor, e: Tensor) -> Tensor:
        keys = m.proj_k(e[:, None] * h)
        logits = keys @ m.proj_q(m.norm_s(slot)) / (m.tau * math.sqrt(m.d_model)) + m.gamma * e.log()
        return torch.softmax(logits, dim=0)

    for b, h in enumerate(m.norm_in(tokens)):
        e, pending = evidences[0][b], list(range(m.n_slots))
        for step in range(m.n_slots):
            captured = [round((attend(h, starts[b, s], e) * e).sum().item(), 9) for s in pending]
            s = pending.pop(captured.index(max(captured)) if greedy else 0)
            slot = starts[b, s]
            for _ in range(m.n_iter):
                alpha = attend(h, slot, e)
                slot = m.gru(alpha @ m.proj_v(e[:, None] * h), slot)
                slot = slot + m.mlp(m.norm_mlp(slot))
            peak = alpha.max() if m.depletion_scale == "peak" else 1
            e = torch.clamp(e * (1 - DEPLETION_FORMS[m.depletion](alpha / peak)), min=m.epsilon)
            slots[b, s], attns[b, s], evidences[step + 1][b] = slot, alpha, e
    return SlotAttentionOutput(slots, attns, evidences)


def assert_same(ours: SlotAttentionOutput, other: SlotAttentionOutput, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(ours.slots, other.slots, atol=tolerance, rtol=0)
    torch.testing.assert_close(ours.attn, other.attn, atol=tolerance, rtol=0)
    torch.testing.assert_close(ours.evidence, other.evidence, atol=tolerance, rtol=0)


# what is computed


@pytest.mark.parametrize("scale", DEPLETION_SCALES)
@pytest.mark.parametrize("form", DEPLETION_FORMS)
def test_evidence_depletion_is_algorithm_1(form: str, scale: str) -> None:
    attention = build(f"evidence_{form}", depletion_scale=scale)
    tokens = 3 * example_tokens()
    assert_same(call(attention, tokens), slow_evidence_depletion(attention, tokens))


def test_greedy_order_is_that_of_a_slow_loop_for_each_sample() -> None:
    attention = build("evidence_linear", depletion_scale="peak")
    tokens = torch.cat([3 * example_tokens(seed) for seed in range(4)])
    slow = slow_evidence_depletion(attention, tokens, greedy=True)
    assert_same(call(attention, tokens, order_policy="evidence_greedy"), slow)
    assert not torch.allclose(slow.slots, call(attention, tokens).slots)


def test_sequential_attention_is_evidence_depletion_that_claims_nothing() -> None:
    sequential, evidence = build("sequential"), build("evidence_claim")
    tokens = example_tokens()
    nothing = call(evidence, tokens, claim=lambda slot: torch.zeros(tokens.shape[:2]))
    torch.testing.assert_close(call(sequential, tokens).slots, nothing.slots)
    torch.testing.assert_close(call(sequential, tokens).attn, nothing.attn)
    assert call(sequential, tokens).evidence is None


def test_vanilla_is_the_textbook_with_keys_and_values() -> None:
    m = build("vanilla")
    tokens = example_tokens()
    torch.manual_seed(2)
    slots = m.slot_mu + m.slot_sigma * torch.randn(N_BATCH, N_SLOTS, D_MODEL, dtype=tokens.dtype)
    h = m.norm_in(tokens)
    for _ in range(m.n_iter):
        logits = m.proj_q(m.norm_s(slots)) @ m.proj_k(h).mT / math.sqrt(D_MODEL)
        attn = torch.softmax(logits, dim=1)
        update = (attn / attn.sum(2, keepdim=True)) @ m.proj_v(h)
        slots = m.gru(update.flatten(0, 1), slots.flatten(0, 1)).view_as(slots)
        slots = slots + m.mlp(m.norm_mlp(slots))
    assert_same(call(m, tokens), SlotAttentionOutput(slots, attn, None))


def test_a_vanilla_slot_that_lost_every_token_pools_no_value() -> None:
    m = build("vanilla", n_slots=2, n_iter=1)
    tokens = example_tokens()
    forced = torch.zeros(N_BATCH, N_TOKENS)
    lost = call(m, tokens, forced_attn_first=forced).slots[:, 0]
    torch.manual_seed(2)
    start = m.slot_mu + m.slot_sigma * torch.randn(N_BATCH, 2, D_MODEL, dtype=tokens.dtype)
    kept = m.gru(torch.zeros_like(lost), start[:, 0])
    torch.testing.assert_close(lost, kept + m.mlp(m.norm_mlp(kept)))


def test_depletion_forms_have_their_closed_form_values() -> None:
    attn = torch.tensor([0.5, 0.3, 0.2])
    expected = {"linear": [0.5, 0.3, 0.2], "quadratic": [0.25, 0.09, 0.04], "cubic": [0.125, 0.027, 0.008]}
    for form, share in expected.items():
        torch.testing.assert_close(explained_share(attn, form), torch.tensor(share))
    assert explained_share(attn, "binary").tolist() == [1, 0, 0]
    torch.testing.assert_close(explained_share(attn, "linear", "peak"), torch.tensor([1, 0.6, 0.4]))
    assert deplete(torch.tensor([0.5, 0.5]), torch.tensor([0.5, 1.0]), 0.125).tolist() == [0.25, 0.125]


# invariants


@given(
    seed=st.integers(0, 2**31),
    form=st.sampled_from([*DEPLETION_FORMS, "claim"]),
    scale=st.sampled_from(DEPLETION_SCALES),
    size=st.tuples(st.integers(1, 3), st.integers(1, 9), st.integers(1, 6)),
    level=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    epsilon=st.sampled_from([1e-8, 1e-4, 0.3]),
    training=st.booleans(),
)
def test_evidence_never_rises_nor_falls_below_epsilon(
    seed: int,
    form: str,
    scale: str,
    size: tuple[int, int, int],
    level: float,
    epsilon: float,
    training: bool,
) -> None:
    """Proposition 2."""
    torch.manual_seed(seed)
    n_batch, n_tokens, n_slots = size
    options = {} if form == "claim" else {"depletion_scale": scale}
    attention = build_mechanism(f"evidence_{form}", n_slots=n_slots, d_model=4, epsilon=epsilon, **options)
    attention.train(training)
    claim = (lambda slot: torch.rand(n_batch, n_tokens)) if form == "claim" else None
    out = attention(level * torch.randn(n_batch, n_tokens, 4), claim=claim)
    assert len(out.evidence) == n_slots + 1
    assert (out.evidence[0] == 1).all()
    for before, after in zip(out.evidence, out.evidence[1:], strict=False):
        assert (after <= before).all()
        assert (after >= torch.tensor(epsilon)).all()


@pytest.mark.parametrize("name", MECHANISMS)
def test_permuted_tokens_give_permuted_attention_and_the_same_slots(name: str) -> None:
    mechanism, tokens = build(name), example_tokens()
    permutation = torch.randperm(N_TOKENS, generator=torch.Generator().manual_seed(3))
    plain, permuted = call(mechanism, tokens), call(mechanism, tokens[:, permutation])
    torch.testing.assert_close(permuted.slots, plain.slots)
    torch.testing.assert_close(permuted.attn, plain.attn[:, :, permutation])
    if plain.evidence is not None:
        torch.testing.assert_close(permuted.evidence, [e[:, permutation] for e in plain.evidence])


@pytest.mark.parametrize("name", MECHANISMS)
def test_a_sample_does_not_depend_on_the_others_in_its_batch(name: str) -> None:
    mechanism, tokens = build(name), example_tokens()
    others = tokens.clone()
    others[0], others[2] = 9 * tokens[2].flip(0), 0.0
    torch.testing.assert_close(call(mechanism, others).slots[1], call(mechanism, tokens).slots[1])


@pytest.mark.parametrize("name", [name for name in MECHANISMS if name != "stickbreaking"])
def test_attention_is_a_distribution(name: str) -> None:
    """Over slots in the parallel mechanisms, over tokens in the others."""
    attn = call(build(name), 5 * example_tokens()).attn
    assert (attn >= 0).all()
    total = attn.sum(1 if name in PARALLEL else 2)
    torch.testing.assert_close(total, torch.ones_like(total))


def test_peak_depletion_does_not_depend_on_how_many_tokens_share_a_source_but_sum_depletion_does() -> None:
    tokens, n_copies = 3 * example_tokens(), 50
    copies = tokens.repeat_interleave(n_copies, dim=1)
    left = {}
    for scale in DEPLETION_SCALES:
        attention = build("evidence_linear", depletion_scale=scale)
        few, many = call(attention, tokens), call(attention, copies)
        left[scale] = (few.evidence[-1], many.evidence[-1][:, ::n_copies])
        if scale == "peak":
            torch.testing.assert_close(many.slots, few.slots)
    torch.testing.assert_close(*left["peak"])
    assert left["peak"][1].min().item() == pytest.approx(1e-4)
    assert left["sum"][0].min() < 0.7
    assert left["sum"][1].min() > 0.9


# randomness and order


def test_noise_makes_a_seed_reproducible_and_two_seeds_differ_even_in_eval() -> None:
    attention, tokens = build("evidence_quadratic"), example_tokens()
    assert torch.equal(call(attention, tokens, seed=0).slots, call(attention, tokens, seed=0).slots)
    assert not torch.allclose(call(attention, tokens, seed=0).slots, call(attention, tokens, seed=1).slots)


def test_without_noise_the_seed_does_not_matter_and_parallel_slots_are_all_equal() -> None:
    tokens = example_tokens()
    evidence, vanilla = build("evidence_linear"), build("vanilla")
    evidence.start_noise = vanilla.start_noise = 0.0
    out = call(evidence, tokens, seed=0)
    assert torch.equal(out.slots, call(evidence, tokens, seed=1).slots)
    assert not torch.allclose(out.slots[:, 0], out.slots[:, 1])
    slots = call(vanilla, tokens).slots
    torch.testing.assert_close(slots, slots[:, :1].expand_as(slots))


def order_of(out: SlotAttentionOutput) -> list[int]:
    """The slot whose attention explains each step's loss of evidence, with linear depletion."""
    steps = zip(out.evidence, out.evidence[1:], strict=False)
    gaps = [(before[:, None] * (1 - out.attn) - after[:, None]).abs().sum((0, 2)) for before, after in steps]
    return [int(gap.argmin()) for gap in gaps]


def test_order_is_random_in_training_fixed_in_evaluation_and_otherwise_as_given() -> None:
    attention, tokens = build("evidence_linear"), example_tokens()
    assert order_of(call(attention, tokens)) == [0, 1, 2, 3]
    assert order_of(call(attention, tokens, slot_order=[2, 0, 3, 1])) == [2, 0, 3, 1]
    assert order_of(call(attention, tokens, slot_order=torch.tensor([3, 2, 1, 0]))) == [3, 2, 1, 0]
    attention.train()
    orders = {tuple(order_of(call(attention, tokens, seed=seed))) for seed in range(12)}
    assert len(orders) > 6
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


@pytest.mark.parametrize("order", [[0, 1, 2], [0, 1, 1, 2], [1, 2, 3, 4], [], torch.arange(5)])
def test_an_order_that_is_no_permutation_is_refused(order: list[int] | Tensor) -> None:
    for name in ("sequential", "evidence_linear"):
        with pytest.raises(SeparatorError, match=r"is not a permutation; pass each of 0\.\.3 once"):
            call(build(name), example_tokens(), slot_order=order)


def test_the_first_processed_slot_takes_the_forced_attention_and_sees_no_other_token() -> None:
    tokens = example_tokens()
    changed = tokens.clone()
    changed[:, 1:] = changed[:, 1:].flip(2)
    forced = F.one_hot(torch.zeros(N_BATCH, dtype=torch.long), N_TOKENS)
    options: dict[str, dict[str, object]] = {
        "sequential": {"slot_order": [2, 0, 1, 3]},
        "evidence_quadratic": {"slot_order": [2, 0, 1, 3]},
        "evidence_linear": {"order_policy": "evidence_greedy"},
        "vanilla": {},
    }
    for name, option in options.items():
        mechanism, first = build(name), 2 if "slot_order" in option else 0
        out = call(mechanism, tokens, forced_attn_first=forced, **option)
        other = call(mechanism, changed, forced_attn_first=forced, **option)
        assert torch.equal(out.attn[:, first], forced.double())
        torch.testing.assert_close(out.slots[:, first], other.slots[:, first])
        assert not torch.allclose(out.slots[:, 1], other.slots[:, 1])


def test_contradicting_or_unknown_orders_are_refused() -> None:
    attention, tokens = build("evidence_linear"), example_tokens()
    with pytest.raises(SeparatorError, match="unknown order_policy='loudest'"):
        call(attention, tokens, order_policy="loudest")
    with pytest.raises(SeparatorError, match=r"slot_order=.* contradicts order_policy"):
        call(attention, tokens, order_policy="evidence_greedy", slot_order=[0, 1, 2, 3])
    with pytest.raises(SeparatorError, match=r"stop_below=0.5 contradicts order_policy"):
        call(attention, tokens, order_policy="evidence_greedy", stop_below=0.5)


# claims


def test_a_claim_leaves_exactly_what_it_does_not_take() -> None:
    attention, tokens = build("evidence_claim", epsilon=0.01), example_tokens()
    generator = torch.Generator().manual_seed(4)
    shares = torch.rand(N_SLOTS, N_BATCH, N_TOKENS, generator=generator, dtype=torch.float64)
    shares[:, :, 0] = 1
    seen: list[Tensor] = []

    def claim(slot: Tensor) -> Tensor:
        seen.append(slot)
        return shares[len(seen) - 1]

    out = call(attention, tokens, claim=claim, slot_order=[1, 3, 0, 2])
    for share, before, after in zip(shares, out.evidence, out.evidence[1:], strict=False):
        assert torch.equal(after, torch.clamp(before * (1 - share), min=0.01))
    assert torch.equal(torch.stack(seen, 1), out.slots[:, [1, 3, 0, 2]])


def test_a_claim_learns_from_what_the_next_slot_finds() -> None:
    attention, tokens = build("evidence_claim"), example_tokens()
    readout = nn.Linear(D_MODEL, N_TOKENS).double()
    out = call(attention, tokens, claim=lambda slot: torch.sigmoid(readout(slot)))
    out.slots[:, -1].square().sum().backward()
    assert readout.weight.grad.abs().max() > 0


def test_a_claim_must_come_with_claim_depletion_and_fit_the_tokens() -> None:
    tokens = example_tokens()
    assert build("evidence_claim").needs_claim
    with pytest.raises(SeparatorError, match=r"claim=None with depletion='claim'"):
        build("evidence_claim")(tokens)
    for name in ("evidence_linear", "evidence_binary"):
        assert not build(name).needs_claim
        with pytest.raises(SeparatorError, match="takes no claim; build with depletion='claim'"):
            build(name)(tokens, claim=lambda slot: slot)
    with pytest.raises(SeparatorError, match=r"claim returned shape \(3, 8\); return .* \(3, 12\)"):
        call(build("evidence_claim"), tokens, claim=lambda slot: slot)


def test_under_autocast_the_attention_stays_float32_and_the_claim_follows_the_caller() -> None:
    torch.manual_seed(0)
    attention, readout = build_mechanism("evidence_claim", d_model=D_MODEL), nn.Linear(D_MODEL, N_TOKENS)
    attention.start_noise = 0.0
    attention.eval()
    tokens = example_tokens(dtype=torch.float32)
    dtypes: list[torch.dtype] = []

    def claim(slot: Tensor) -> Tensor:
        logits = readout(slot)
        dtypes.append(logits.dtype)
        return torch.sigmoid(logits)

    with torch.autocast("cpu", torch.bfloat16):
        out = attention(tokens, claim=claim)
    assert set(dtypes) == {torch.bfloat16}
    assert {out.slots.dtype, out.attn.dtype, out.evidence[-1].dtype} == {torch.float32}
    constant = {"claim": lambda slot: torch.full(tokens.shape[:2], SHARE)}
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(tokens, **constant)
    assert torch.equal(out.slots, attention(tokens, **constant).slots)


# number of slots


@pytest.mark.parametrize("name", SLOT_ATTENTION)
def test_a_four_slot_model_finds_eight_slots(name: str) -> None:
    mechanism, tokens = build(name), example_tokens()
    mechanism.start_noise = 0.0
    four, eight = call(mechanism, tokens), call(mechanism, tokens, n_slots=8)
    assert eight.slots.shape == (N_BATCH, 8, D_MODEL)
    assert eight.attn.shape == (N_BATCH, 8, N_TOKENS)
    if name not in PARALLEL:  # later slots do not change earlier ones
        torch.testing.assert_close(eight.slots[:, :4], four.slots)


def test_evaluation_stops_once_the_evidence_of_every_sample_is_spent() -> None:
    attention, tokens = build("evidence_claim"), example_tokens()
    full = call(attention, tokens, n_slots=6)
    left = [0.75**step for step in range(7)]
    for n_slots in (1, 2, 5):
        threshold = (left[n_slots] + left[n_slots - 1]) / 2
        out = call(attention, tokens, n_slots=6, stop_below=threshold)
        assert torch.equal(out.slots, full.slots[:, :n_slots])
        assert torch.equal(out.attn, full.attn[:, :n_slots])
        assert len(out.evidence) == n_slots + 1
    assert call(attention, tokens, n_slots=6, stop_below=2.0).slots.shape[1] == 1
    assert call(attention, tokens, n_slots=6, stop_below=0.0).slots.shape[1] == 6
    ordered = call(attention, tokens, slot_order=[3, 1, 0, 2], stop_below=0.6)
    assert torch.equal(ordered.slots, call(attention, tokens, slot_order=[3, 1, 0, 2]).slots[:, [1, 3]])


def test_training_does_not_stop_early() -> None:
    attention = build("evidence_claim").train()
    assert call(attention, example_tokens(), stop_below=2.0).slots.shape[1] == N_SLOTS


def test_early_stopping_waits_for_the_last_sample_and_weighs_tokens() -> None:
    attention, tokens = build("evidence_claim"), example_tokens()
    share = torch.full((N_BATCH, N_TOKENS), 0.9)
    share[:, 0] = 0.0
    options: dict[str, object] = {"claim": lambda slot: share, "stop_below": 0.3}
    assert call(attention, tokens, **options).slots.shape[1] == 1
    first_counts = F.one_hot(torch.zeros(N_BATCH, dtype=torch.long), N_TOKENS)
    assert call(attention, tokens, **options, token_weights=first_counts).slots.shape[1] == N_SLOTS
    only_one_sample = first_counts * torch.tensor([[1], [0], [0]])
    assert call(attention, tokens, **options, token_weights=only_one_sample).slots.shape[1] == N_SLOTS
    assert call(attention, tokens, **options, token_weights=0 * first_counts).slots.shape[1] == 1
    with pytest.raises(SeparatorError, match=r"token_weights of shape \(3,\) do not fit"):
        call(attention, tokens, **options, token_weights=torch.ones(3))


# gradients and cost


def loss_of(out: SlotAttentionOutput) -> Tensor:
    loss = out.slots.square().sum() + out.attn.square().sum()
    return loss if out.evidence is None else loss + torch.stack(out.evidence).square().sum()


@pytest.mark.parametrize("name", [name for name in MECHANISMS if "binary" not in name and name != "mesh"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    torch.manual_seed(1)
    options = {"n_heads": 1} if name == "dspn" else {"n_iter": 2}
    mechanism = build_mechanism(name, n_slots=2, d_model=3, **options).double().eval()
    readout = torch.randn(3, 4, dtype=torch.float64)
    names, values = zip(*mechanism.named_parameters(), strict=True)

    def run(tokens: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        torch.manual_seed(2)
        options = {"claim": lambda slot: torch.sigmoid(slot @ readout)} if mechanism.needs_claim else {}
        state = dict(zip(names, parameters, strict=True))
        out = torch.func.functional_call(mechanism, state, (tokens,), options)
        return out.slots, out.attn, *(out.evidence or ())

    tokens = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(run, (tokens, *values))


def test_gradients_in_greedy_order_are_those_of_the_slow_loop() -> None:
    attention = build("evidence_linear", depletion_scale="peak")
    ours, slow = example_tokens().requires_grad_(), example_tokens().requires_grad_()
    loss_of(call(attention, ours, order_policy="evidence_greedy")).backward()
    loss_of(slow_evidence_depletion(attention, slow, greedy=True)).backward()
    torch.testing.assert_close(ours.grad, slow.grad)


def test_a_graph_can_be_walked_twice_in_parts_and_to_the_parameters_alone() -> None:
    attention = build("evidence_quadratic")
    tokens = example_tokens().requires_grad_()
    out = call(attention, tokens)
    weight = attention.proj_q.weight
    whole_tokens, whole_weight = torch.autograd.grad(loss_of(out), [tokens, weight], retain_graph=True)
    parts = [out.slots.square().sum(), out.attn.square().sum(), torch.stack(out.evidence).square().sum()]
    grads = [torch.autograd.grad(part, tokens, retain_graph=True)[0] for part in parts]
    torch.testing.assert_close(sum(grads), whole_tokens)
    (again,) = torch.autograd.grad(loss_of(out), weight)
    torch.testing.assert_close(again, whole_weight)
    loss_of(call(attention, example_tokens())).backward()
    torch.testing.assert_close(weight.grad, whole_weight)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    tokens = example_tokens().requires_grad_()
    out = call(build("evidence_quadratic"), tokens)
    (grad,) = torch.autograd.grad(out.slots.square().sum(), tokens, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    mechanism = build(name)
    loss_of(call(mechanism, example_tokens())).backward()
    assert [n for n, p in mechanism.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize("name", SLOT_ATTENTION)
def test_the_cost_in_tokens_is_two_passes_an_attention_and_no_keys_or_values(name: str) -> None:
    mechanism = build_mechanism(name, n_slots=5, d_model=64).eval()

    def flops(n_tokens: int) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            call(mechanism, torch.randn(1, n_tokens, 64))
        return counter.get_total_flops()

    assert flops(2048) - flops(1024) == 1024 * 2 * (2 * 64) * mechanism.n_slots * mechanism.n_iter


# parameters, registry, refusals


def test_one_seed_gives_every_slot_attention_the_same_parameters() -> None:
    states = []
    for name in SLOT_ATTENTION:
        torch.manual_seed(7)
        states.append(build_mechanism(name).state_dict())
    for state in states[1:]:
        assert list(state) == list(states[0])
        assert all(torch.equal(state[key], states[0][key]) for key in state)


def test_the_registry_has_the_names_of_the_benchmarks_and_refuses_others() -> None:
    expected: dict[str, Callable[..., SlotAttention]] = {
        "vanilla": VanillaSlotAttention,
        "sequential": SequentialSlotAttention,
        **{f"evidence_{form}": EvidenceDepletionSlotAttention for form in (*DEPLETION_FORMS, "claim")},
        **{f"dataspace_{form}": DataSpaceSlotAttention for form in DEPLETION_FORMS},
        **{f"dataspace_{form}_bias": DataSpaceSlotAttention for form in DEPLETION_FORMS},
        "sparsemax": SparseSlotAttention,
        "entmax15": SparseSlotAttention,
        "sa_sh": SinkhornSlotAttention,
        "mesh": MeshSlotAttention,
        "coverage": CoverageSlotAttention,
        "coverage_loss": VanillaSlotAttention,
        "stickbreaking": StickBreakingSlotAttention,
        "dspn": QuerySetPredictor,
    }
    assert list(MECHANISMS) == list(expected)
    for name, kind in expected.items():
        mechanism = build_mechanism(name, n_slots=2, d_model=4)
        assert type(mechanism) is kind
        if name.startswith(("evidence_", "dataspace_")):
            assert mechanism.depletion == name.split("_")[1]
        assert getattr(mechanism, "use_bias", False) == name.endswith("_bias")
        assert getattr(mechanism, "norm_fn", name) == name
    with pytest.raises(SeparatorError, match="unknown mechanism 'quantum'; choose one of vanilla"):
        build_mechanism("quantum")
    with pytest.raises(SeparatorError, match=r"'vanilla' does not take \['gamma'\]; it takes \['d_model', "):
        build_mechanism("vanilla", gamma=3.0)
    with pytest.raises(SeparatorError, match=r"'evidence_linear' does not take \['depletion'\]"):
        build_mechanism("evidence_linear", depletion="cubic")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_slots": 0}, "n_slots=0 is not positive"),
        ({"d_model": -1}, "d_model=-1 is not positive"),
        ({"n_iter": 0}, "n_iter=0 is not positive"),
        ({"tau": 0.0}, "tau=0.0 is not positive"),
        ({"epsilon": 0.0}, "epsilon=0.0 is not between 0 and 1"),
        ({"depletion": "quartic"}, "unknown depletion 'quartic'; choose one of linear, .*, claim"),
        ({"depletion_scale": "max"}, "unknown depletion_scale 'max'; choose sum or peak"),
        ({"depletion": "claim", "depletion_scale": "peak"}, "has no meaning with depletion='claim'"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(SeparatorError, match=message):
        EvidenceDepletionSlotAttention(**options)
    with pytest.raises(ValueError, match="unknown depletion 'claim'"):
        explained_share(torch.ones(1), "claim")


@pytest.mark.parametrize("name", MECHANISMS)
def test_tokens_and_forced_attention_that_do_not_fit_are_refused(name: str) -> None:
    mechanism, tokens = build(name), example_tokens()
    for wrong in (tokens[0], tokens[..., :5], tokens[:, :0]):
        with pytest.raises(SeparatorError, match=r"tokens of shape .* do not fit; pass \[batch, tokens"):
            call(mechanism, wrong)
    if name == "dspn":
        with pytest.raises(SeparatorError, match="n_slots=3 with 4 learned queries"):
            call(mechanism, tokens, n_slots=3)
        return
    with pytest.raises(SeparatorError, match=r"forced_attn_first of shape \(3, 11\) does not fit"):
        call(mechanism, tokens, forced_attn_first=torch.ones(3, 11))
    with pytest.raises(SeparatorError, match="n_slots=0 is not positive"):
        call(mechanism, tokens, n_slots=0)
