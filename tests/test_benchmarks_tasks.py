import math
import time

import pytest
import torch

from separator.benchmarks import TASKS, draw_mixtures
from separator.errors import SeparatorError

synthetic = pytest.importorskip("evidence_depletion.data.synthetic")

N = 4000


@pytest.fixture(scope="module", params=TASKS)
def pair(request):
    """The task, our mixtures and the reference's, as many of each."""
    name = request.param
    theirs = synthetic.TASKS[name]["generate"](1500, seed=1)
    return TASKS[name], draw_mixtures(name, N, seed=1), theirs


def test_shapes_names_and_counts_are_the_references(pair):
    task, ours, theirs = pair
    assert [x.shape[1:] for x in ours] == [x.shape[1:] for x in theirs]
    assert list(task.parameter_names) == synthetic.TASKS[task.name]["param_names"]
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]
    shares = torch.bincount(ours.counts, minlength=5) / N
    torch.testing.assert_close(shares, torch.tensor([0, 0.25, 0.25, 0.25, 0.25]), atol=0.03, rtol=0)


def test_parameters_have_the_references_moments_and_ranges(pair):
    """Means and spreads agree within five standard errors; ranges within one per cent of their width."""
    task, ours, theirs = pair
    for k in range(4):
        mine, other = ours.params[ours.counts > k, k], theirs[1][theirs[2] > k, k]
        width = other.amax(0) - other.amin(0)
        error = width / math.sqrt(12) * math.sqrt(1 / len(mine) + 1 / len(other))
        assert ((mine.mean(0) - other.mean(0)).abs() < 5 * error).all(), task.parameter_names
        assert ((mine.std(0) - other.std(0)).abs() < 5 * error).all()
        slack = 8 * width / min(len(mine), len(other))
        assert ((mine.amin(0) - other.amin(0)).abs() < slack).all()
        assert ((mine.amax(0) - other.amax(0)).abs() < slack).all()


def test_components_of_the_references_parameters_are_the_references(pair):
    task, _, (_, params, counts, components) = pair
    exists = torch.arange(4) < counts.unsqueeze(1)
    ours = task.waveforms(params[exists], 256)  # the reference's parameters were not rounded yet
    torch.testing.assert_close(ours, components[exists], atol=2e-4, rtol=0)


def test_a_mixture_is_its_components_and_white_noise(pair):
    _, ours, _ = pair
    noise = ours.signals - ours.components.sum(1)
    assert noise.std().item() == pytest.approx(0.1, rel=0.01)
    assert abs(noise.mean().item()) < 1e-3
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean() / noise.var()
    assert abs(neighbours.item()) < 0.01


def test_rows_beyond_the_count_are_zero(pair):
    _, ours, _ = pair
    absent = torch.arange(4) >= ours.counts.unsqueeze(1)
    assert absent.any() and not ours.params[absent].any() and not ours.components[absent].any()


def test_the_amplitude_ratio_changes_the_dominant_amplitude_alone():
    amplitude = TASKS["sinusoids"].parameter_names.index("amplitude")
    plain, one, three = (draw_mixtures("sinusoids", 500, seed=3, amp_ratio=r) for r in (None, 1.0, 3.0))
    for other in (one, three):
        assert torch.equal(other.counts, plain.counts)
        assert torch.equal(other.params[:, 1:], plain.params[:, 1:])
        assert torch.equal(other.params[:, 0, [0, 2]], plain.params[:, 0, [0, 2]])
        noise = other.signals - other.components.sum(1)
        torch.testing.assert_close(noise, plain.signals - plain.components.sum(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(three.params[:, 0, amplitude], 3 * one.params[:, 0, amplitude])
    assert one.params[:, 0, amplitude].min() >= 0.2 and one.params[:, 0, amplitude].max() <= 1
    assert plain.params[:, 0, amplitude].min() >= 5 and plain.params[:, 0, amplitude].max() <= 10


def test_a_seed_gives_the_same_mixtures_whatever_was_drawn_before():
    first = draw_mixtures("multiscale", 10, seed=5)
    state = torch.get_rng_state()
    draw_mixtures("multiscale", 10, seed=6)
    again = draw_mixtures("multiscale", 10, seed=5)
    assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


def test_thousands_of_mixtures_take_well_under_a_second():
    start = time.process_time()
    draw_mixtures("multiscale", 2000, seed=0)
    assert time.process_time() - start < 0.8


@pytest.mark.parametrize(
    ("task", "changes", "words"),
    [
        ("sines", {}, "unknown task 'sines'; choose one of sinusoids, gaussian_bumps, multiscale"),
        ("sinusoids", {"max_sources": 0}, "max_sources=0 is not positive"),
        ("sinusoids", {"amp_ratio": 0.0}, "amp_ratio=0.0 is not positive"),
    ],
)
def test_what_does_not_fit_is_refused(task, changes, words):
    with pytest.raises(SeparatorError, match=words):
        draw_mixtures(task, 10, seed=0, **changes)
