"""The compiled loops give what torch's operations give in double precision, outputs and gradients."""

import math
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from threadpoolctl import ThreadpoolController
from torch import Tensor
from torch.nn import functional as F

from separator.attention.parallel import VanillaSlotAttention
from separator.benchmarks import blas, build_model, refinement
from separator.benchmarks.refinement import Competition, Look, Refinement, Shared
from separator.benchmarks.stacked import (
    StackedCompetition,
    StackedLoop,
    StackedMechanism,
    is_stackable,
    stacked_mechanism,
)

SIZES = [(1, 4, 1, 16, 64), (3, 70, 5, 7, 33), (2, 300, 1, 34, 64), (1, 3, 2, 1, 1)]
"""Seeds, samples, slots, tokens, width: of one block of rows and of several, odd and even."""


def draw(*shapes, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(shape, generator=generator)).requires_grad_() for shape in shapes]


def assert_same(found, expected, inputs, doubles):
    """Outputs and the gradients of inputs that random gradients of the outputs give."""
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-5, atol=1e-5)
    given = [g.detach() for g in draw(*(x.shape for x in found), seed=1)]
    torch.autograd.backward(found, given)
    torch.autograd.backward(expected, [g.double() for g in given])
    for x, y in zip(inputs, doubles, strict=True):
        assert x.grad is not None
        tolerance = 1e-5 * (1 + float(y.grad.abs().max()))
        torch.testing.assert_close(x.grad.double(), y.grad, rtol=0, atol=tolerance)


def in_double(inputs):
    return [x.detach().double().requires_grad_() for x in inputs]


def mapped(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x @ weight.mT + bias.unsqueeze(1)


@pytest.mark.parametrize(("n_seeds", "n", "_", "n_in", "d"), SIZES)
def test_affine_maps(n_seeds, n, _, n_in, d):
    inputs = draw((n_seeds, n, n_in), (n_seeds, d, n_in), (n_seeds, d))
    doubles = in_double(inputs)
    assert_same([refinement.affine(*inputs)], [mapped(*doubles)], inputs, doubles)
    inputs, doubles = draw(*(x.shape for x in inputs)), in_double(inputs)
    assert_same([refinement.gelu_affine(*inputs)], [F.gelu(mapped(*doubles))], inputs, doubles)


def test_nobody_asks_for_the_gradient_of_features():
    x, weight, bias = draw((1, 5, 3), (1, 4, 3), (1, 4))
    x = x.detach()
    refinement.gelu_affine(x, weight, bias).sum().backward()
    expected = in_double([weight, bias])
    F.gelu(mapped(x.double(), *expected)).sum().backward()
    torch.testing.assert_close(weight.grad.double(), expected[0].grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("n_seeds", "n", "_", "__", "d"), SIZES)
def test_norms(n_seeds, n, _, __, d):
    inputs = draw((n_seeds, n, d), (n_seeds, d), (n_seeds, d), scale=3.0)
    doubles = in_double(inputs)
    x, gain, shift = doubles
    assert_same(
        [refinement.scaled_norm(*inputs)],
        [F.layer_norm(x, [d]) * gain.unsqueeze(1) + shift.unsqueeze(1)],
        inputs,
        doubles,
    )
    inputs, doubles = inputs[:1], in_double(inputs[:1])
    inputs[0].grad = None
    assert_same([refinement.normalise(inputs[0])], [F.layer_norm(doubles[0], [d])], inputs, doubles)


def refined(update, slot, p: Refinement):
    d = slot.shape[-1]
    x, h = mapped(update, p.input_weight, p.input_bias), mapped(slot, p.hidden_weight, p.hidden_bias)
    reset, keep = torch.sigmoid(x[..., : 2 * d] + h[..., : 2 * d]).split(d, 2)
    new = torch.tanh(x[..., 2 * d :] + reset * h[..., 2 * d :])
    state = new + keep * (slot - new)
    inner = mapped(F.layer_norm(state, [d]), p.first_weight, p.first_bias)
    return state + mapped(F.gelu(inner), p.second_weight, p.second_bias)


def shapes_of_refinement(n_seeds, n_in, d):
    shapes = [(3 * d, n_in), (3 * d,), (3 * d, d), (3 * d,), (d, d), (d,), (d, d), (d,)]
    return [(n_seeds, *shape) for shape in shapes]


@pytest.mark.parametrize(("n_seeds", "n", "_", "n_in", "d"), SIZES)
def test_refinement_twice_sums_the_gradients_of_its_parameters(n_seeds, n, _, n_in, d):
    shapes = shapes_of_refinement(n_seeds, n_in, d)
    inputs = draw((n_seeds, n, n_in), (n_seeds, n, d), *shapes, scale=0.2)
    doubles = in_double(inputs)
    shared = Shared(*inputs[2:])
    found = refinement.refine(inputs[0], refinement.refine(*inputs[:2], shared), shared)
    parameters = Refinement(*doubles[2:])
    expected = refined(doubles[0], refined(*doubles[:2], parameters), parameters)
    assert_same([found], [expected], inputs, doubles)


@pytest.mark.parametrize("neutral", [False, True])
@pytest.mark.parametrize(("n_seeds", "n_samples", "n_slots", "n_tokens", "d"), SIZES)
def test_looks_over_tokens(n_seeds, n_samples, n_slots, n_tokens, d, neutral):
    read = n_seeds, n_samples, n_tokens
    shapes = [(n_seeds, n_samples * n_slots, d), (*read, d), (n_seeds, d, d), (n_seeds, d)]
    state = [] if neutral else [read, read]
    inputs = draw(*shapes, *shapes_of_refinement(n_seeds, d, d), *state, scale=0.2)
    doubles = in_double(inputs)
    look = Look(Shared(inputs[1]), Shared(*inputs[2:4]), *inputs[12:])
    found = refinement.iterate(inputs[0], look, Shared(*inputs[4:12]), 2)
    slots, h, weight, map_bias, *rest = doubles
    scale, bias = (torch.ones(1), torch.zeros(1)) if neutral else (x.unsqueeze(2) for x in rest[8:])
    for _ in range(2):
        query = mapped(F.layer_norm(slots, [d]), weight, map_bias).view(n_seeds, n_samples, n_slots, d)
        attn = torch.softmax(scale * (query @ h.mT) + bias, 3)
        slots = refined(((scale * attn) @ h).flatten(1, 2), slots, Refinement(*rest[:8]))
    assert_same(found, [slots, attn.flatten(1, 2)], inputs, doubles)


@pytest.mark.parametrize(("n_seeds", "n_samples", "n_slots", "n_tokens", "d"), SIZES)
def test_competitions_of_slots(n_seeds, n_samples, n_slots, n_tokens, d):
    shapes = [(n_samples * n_slots, d), (n_samples, n_tokens, d), (d + 1, d), (d + 1,)]
    of_seeds = [(n_seeds, *shape) for shape in shapes]
    inputs = draw(*of_seeds, *shapes_of_refinement(n_seeds, d + 1, d), scale=0.2)
    doubles = in_double(inputs)
    competition = Competition(Shared(inputs[1]), Shared(*inputs[2:4]))
    found = refinement.iterate(inputs[0], competition, Shared(*inputs[4:]), 2)
    slots, h, weight, bias, *rest = doubles
    for _ in range(2):
        asked = mapped(F.layer_norm(slots, [d]), weight, bias).view(n_seeds, n_samples, n_slots, d + 1)
        attn = torch.softmax(asked[..., :d] @ h.mT + asked[..., d:], 2)
        total = attn.sum(3, keepdim=True)
        pooled = torch.cat([attn @ h, total], 3) / total.clamp(min=1e-8)
        slots = refined(pooled.flatten(1, 2), slots, Refinement(*rest))
    assert_same(found, [slots, attn.flatten(1, 2)], inputs, doubles)


def test_values_beyond_exp_saturate_and_nan_stays():
    x = torch.tensor([-1e4, -100.0, 0.0, 100.0, 1e4, math.nan]).view(1, -1, 1)
    active = refinement.gelu_affine(x, torch.ones(1, 1, 1), torch.zeros(1, 1)).flatten()
    torch.testing.assert_close(active, F.gelu(x.flatten()), equal_nan=True)


def test_a_slot_that_lost_all_tokens_pools_next_to_nothing():
    slots, h = np.zeros((1, 2, 4), np.float32), torch.ones(1, 1, 3, 4)
    bias = torch.tensor([[0.0, 0.0, 0.0, 0.0, 0.0]])
    weight = torch.zeros(1, 5, 4)
    slots[0, 1] = [1, -1, 1, -1]  # normalised: the same
    weight[0, 4] = torch.tensor([-25.0, 25.0, -25.0, 25.0])  # its offset: -100, e^-100 is no float32
    attn, pooled, _ = Competition(Shared(h), Shared(weight, bias)).look(slots)
    assert attn[0, 1].max() < 1e-30
    np.testing.assert_allclose(pooled[0, 0], 1, rtol=1e-6)
    assert abs(pooled[0, 1]).max() < 1e-20


def test_nan_reaches_attention():
    slots = np.full((1, 2, 4), np.nan, np.float32)
    tokens, query_map = Shared(torch.ones(1, 2, 3, 4)), Shared(torch.ones(1, 4, 4), torch.zeros(1, 4))
    attn, pooled, _ = Look(tokens, query_map).look(slots)
    assert np.isnan(attn).all()
    assert np.isnan(pooled).all()


def test_a_second_backward_pass_is_refused():
    inputs = draw((1, 3, 4), (1, 3, 4))
    shared = Shared(*draw((1, 12, 4), (1, 12), (1, 12, 4), (1, 12), (1, 4, 4), (1, 4), (1, 4, 4), (1, 4)))
    out = refinement.refine(*inputs, shared).sum()
    out.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="second backward pass"):
        out.backward()


@pytest.mark.parametrize(
    ("method", "base"),
    [
        ("evidence_linear", StackedLoop),
        ("dataspace_linear_bias", StackedLoop),
        ("coverage", StackedLoop),
        ("stickbreaking", StackedMechanism),
        ("vanilla", StackedCompetition),
        ("sparsemax", StackedMechanism),
        ("mesh", StackedMechanism),
    ],
)
def test_only_mechanisms_that_look_alike_get_the_loop_for_it(method, base):
    stacked = stacked_mechanism(build_model(method).slot_attn, [torch.Generator()])
    fast = [kind for kind in (StackedLoop, StackedCompetition) if isinstance(stacked, kind)]
    assert fast == ([] if base is StackedMechanism else [base])


def test_a_change_of_attend_keeps_its_own():
    class Other(VanillaSlotAttention):
        def attend(self, tokens, slots, maps):
            return super().attend(tokens, slots, maps).square()

    assert not isinstance(stacked_mechanism(Other(), [torch.Generator()]), StackedCompetition)


def test_double_precision_is_trained_by_torch():
    assert is_stackable(build_model("vanilla"))
    assert not is_stackable(build_model("vanilla").double())


def test_loops_compile_without_a_folder_for_their_cache():
    """Numba refuses to be asked for a cache it has no place for."""
    code = """
        from numba.core.caching import _CacheLocator

        def ensure_cache_path(self):
            raise OSError("read-only")

        _CacheLocator.ensure_cache_path = ensure_cache_path
        import torch
        from separator.benchmarks.refinement import normalise

        print(normalise(torch.tensor([[1.0, -1.0]])))
    """
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("tensor([[ 1.0000, -1.0000]])")


def test_blas_keeps_to_one_thread_while_anybody_asks_it_to():
    def threads():
        found = ThreadpoolController().select(internal_api="openblas").info()
        return {library["num_threads"] for library in found}

    with ThreadpoolController().select(internal_api="openblas").limit(limits=2):
        assert threads() == {2}
        with blas.one_blas_thread:
            with blas.one_blas_thread:
                assert threads() == {1}
            assert threads() == {1}
        assert threads() == {2}
