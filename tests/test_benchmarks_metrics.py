"""Losses and metrics: agreement with the paper's package, which loops over samples, and planted cases."""

import math

import pytest
import torch

from separator.benchmarks import METHODS, losses, metrics
from separator.benchmarks.matching import match_sources

training = pytest.importorskip("evidence_depletion.training")
reference = pytest.importorskip("evidence_depletion.metrics")

CPU = torch.device("cpu")
TOLERANCE = 1e-5
SHAPES = [(40, 5, 4, 3, 16), (40, 3, 4, 5, 8), (7, 1, 2, 3, 4), (30, 8, 4, 3, 16)]  # B, S, K, P, L


@pytest.fixture(params=SHAPES, ids=str)
def outcome(request):
    """What a model might say of a batch, and the truth: slots, attn, logits, params, true params, counts."""
    n, n_slots, n_sources, n_params, n_tokens = request.param
    g = torch.Generator().manual_seed(0)
    counts = torch.randint(1, n_sources + 1, (n,), generator=g)
    true_params = torch.rand(n, n_sources, n_params, generator=g) * 10
    true_params = true_params * (torch.arange(n_sources) < counts.unsqueeze(1)).unsqueeze(2)
    slots = torch.randn(n, n_slots, 12, generator=g)
    attn = torch.softmax(4 * torch.randn(n, n_slots, n_tokens, generator=g), 2)
    logits = torch.randn(n, n_slots, generator=g)
    params = torch.rand(n, n_slots, n_params, generator=g) * 10
    return slots, attn, logits, params, true_params, counts


@pytest.mark.parametrize("method", METHODS)
def test_losses_and_their_gradients_are_the_references(method, outcome):
    *outputs, true_params, counts = outcome
    weights = METHODS[method].weights
    ours = [x.clone().requires_grad_() for x in outputs]
    loss = losses.training_loss(*ours, true_params, counts, weights)
    theirs = [x.clone().requires_grad_() for x in outputs]
    expected = training.training_loss(
        (*theirs, None),
        true_params,
        counts,
        outputs[0].shape[1],
        CPU,
        w_div=weights.diversity,
        w_ortho=weights.orthogonality,
        w_coverage=weights.coverage or None,
    )
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    loss.backward()
    expected.backward()
    for mine, other in zip(ours, theirs, strict=True):
        if other.grad is None:
            assert mine.grad is None or not mine.grad.any()
        else:
            torch.testing.assert_close(mine.grad, other.grad, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("size", [1e-10, 1e-14, 0.0])
def test_slots_that_attend_to_nothing_leave_the_loss_a_number(outcome, size):
    *outputs, true_params, counts = outcome
    outputs[1] = outputs[1].clone()
    outputs[1][:, 1:3] *= size
    ours, theirs = ([x.clone().requires_grad_() for x in outputs] for _ in range(2))
    loss = losses.training_loss(*ours, true_params, counts, losses.LossWeights(0.5, 3.0))
    n_slots = outputs[0].shape[1]
    expected = training.training_loss(
        (*theirs, None), true_params, counts, n_slots, CPU, w_div=0.5, w_ortho=3.0, w_coverage=None
    )
    assert loss.item() == pytest.approx(expected.item(), rel=TOLERANCE)
    loss.backward()
    expected.backward()
    if n_slots > 1:
        largest = float(theirs[1].grad.abs().max())  # up to one over the size
        torch.testing.assert_close(ours[1].grad, theirs[1].grad, atol=TOLERANCE * largest, rtol=TOLERANCE)


def test_a_leading_dimension_gives_each_seed_its_own_loss(outcome):
    halves = [x[: len(x) // 2 * 2].unflatten(0, (2, -1)) for x in outcome]
    weights = losses.LossWeights(0.5, 3.0, 1.0)
    together = losses.training_loss(*halves, weights)
    alone = [losses.training_loss(*(x[i] for x in halves), weights) for i in range(2)]
    torch.testing.assert_close(together, torch.stack(alone))


def test_metrics_are_the_references(outcome):
    slots, attn, logits, params, true_params, counts = outcome
    assert metrics.peak_overlap(attn, counts) == pytest.approx(reference.peak_overlap_rate(attn, counts))
    for mine, other in (
        (metrics.cosine_overlap(attn, counts), reference.cosine_overlap(attn, counts)),
        (metrics.slot_cosine(slots, counts), reference.mean_slot_embedding_cosine(slots, counts)),
        (metrics.count_accuracy(logits, counts), reference.k_detection_accuracy(logits, counts)),
    ):
        assert mine == pytest.approx(other, abs=TOLERANCE)
    expected, _ = reference.param_recovery_error(params, true_params, logits, counts, params.shape[2])
    ours = metrics.parameter_errors(params, true_params, logits, counts)
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("barred", [None, 0])
def test_source_recovery_is_the_references(outcome, barred):
    _, _, logits, params, true_params, counts = outcome
    if params.shape[1] == 1 and barred == 0:
        pytest.skip("no slot is left")
    rate, error = reference.source_recovery(params, true_params, logits, counts, exclude_slot=barred)
    ours = metrics.source_recovery(params, true_params, logits, counts, barred=barred)
    assert ours == pytest.approx(rate, abs=TOLERANCE)
    errors = metrics.parameter_errors(params, true_params, logits, counts, barred=barred)
    assert errors.mean().item() == pytest.approx(error, rel=TOLERANCE)


def test_depleted_mass_is_the_references(outcome):
    _, attn, logits, _, _, counts = outcome
    evidence = [torch.ones_like(attn[:, 0])]
    for step in attn.unbind(1):
        evidence.append(evidence[-1] * (1 - step))
    ours = metrics.depleted_mass(evidence, logits, counts)
    for mine, values in zip(ours, reference.evidence_depletion_split(evidence, logits, counts), strict=True):
        if values:
            assert mine == pytest.approx(sum(values) / len(values), abs=TOLERANCE)
        else:
            assert math.isnan(mine)


def test_the_most_certain_slot_chooses_first():
    params = torch.tensor([[[0.0], [0.4]]])  # both are nearest to the source at 0.1
    truth, counts = torch.tensor([[[0.1], [5.0]]]), torch.tensor([2])
    first = match_sources(params, truth, torch.tensor([[1.0, 2.0]]), counts)
    assert first.slots.tolist() == [[1, 0]] and first.matched.all()
    other = match_sources(params, truth, torch.tensor([[2.0, 1.0]]), counts)
    assert other.slots.tolist() == [[0, 1]]


def test_slots_beyond_the_count_are_not_compared():
    attn = torch.eye(3)[None, [0, 1, 1]]
    assert metrics.peak_overlap(attn, torch.tensor([2])) == 0
    assert metrics.peak_overlap(attn, torch.tensor([3])) == 1
    assert metrics.cosine_overlap(attn, torch.tensor([2])) == 0
    assert metrics.cosine_overlap(attn, torch.tensor([3])) == pytest.approx(1)


def test_single_sources_alone_overlap_nowhere():
    attn = torch.full((4, 3, 5), 0.2)
    assert metrics.peak_overlap(attn, torch.ones(4)) == metrics.cosine_overlap(attn, torch.ones(4)) == 0
