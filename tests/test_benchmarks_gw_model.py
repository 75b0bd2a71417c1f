"""The model of overlapping binaries, its loss and its scores: on planted truths and slow references."""

import itertools
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from separator.benchmarks import gw_data, gw_scores
from separator.benchmarks.gw_data import Bank, GalacticMixtures, draw_mixtures, in_order
from separator.benchmarks.gw_model import INFERRED, BinaryModel, BinaryPrediction, build_binary_model
from separator.benchmarks.gw_training import (
    BinarySetting,
    binary_loss,
    fit,
    inferred,
    load_trained,
    match_binaries,
    save_weights,
    weights_path,
)
from separator.benchmarks.losses import LossWeights
from separator.benchmarks.methods import METHODS
from separator.errors import SeparatorError

pytest.importorskip("zuko")
SAMPLE = Path(__file__).parents[1] / "data/gravitational_waves/sample.npz"
SMALL = {"n_bins": 128, "n_tokens": 16, "d_model": 16, "n_train": 64, "batch_size": 16, "n_test": 40}
PLAIN = LossWeights(diversity=0)


@pytest.fixture(scope="module")
def sample() -> Bank:
    return in_order(gw_data.read_part(SAMPLE))


@pytest.fixture
def model() -> BinaryModel:
    torch.manual_seed(0)
    return build_binary_model("evidence_quadratic", n_bins=128, n_tokens=16, d_model=16)


def mixtures_of(sample: Bank, n: int, **setting: int) -> GalacticMixtures:
    population = BinarySetting(**{**SMALL, **setting}).population
    return draw_mixtures(sample, population, n, torch.Generator().manual_seed(0))


def test_the_model_s_outputs_have_their_shapes(model: BinaryModel, sample: Bank) -> None:
    found = model(mixtures_of(sample, 4).data)
    assert (found.slots.shape, found.attn.shape) == ((4, 6, 16), (4, 6, 16))
    assert found.exist_logits.shape == (4, 6)
    assert len(found.evidence) == 7
    assert model.sample(found.slots, 9).shape == (9, 4, 6, len(INFERRED))


def test_features_keep_phase_and_compress_size(model: BinaryModel) -> None:
    data = torch.polar(torch.tensor([0.0, 1e-3, 100.0, 1.0]), torch.tensor([0.0, 1.0, 2.0, 3.0]))
    features = model.tokenizer.features(data.repeat(1, 2, 32))[0, 0, : 2 * 8 * 3].view(2, 8, 3)[0, :4]
    read = torch.complex(features[:, 0], features[:, 1])
    assert torch.allclose(read.abs(), data.abs().asinh(), atol=1e-6)
    assert torch.allclose(read.abs(), features[:, 2], atol=1e-6)
    assert torch.allclose(read.angle()[1:], data.angle()[1:], atol=1e-5)


def test_features_follow_a_binary_through_the_year(model: BinaryModel) -> None:
    """A line in the spectrum sounds all year, a pulse in the year at its time only."""
    time = torch.arange(16)
    line = torch.zeros(1, 2, 128, dtype=torch.complex64)
    line[..., 8 * 5 + 4] = 100
    pulse = torch.exp(-2j * math.pi * 3 / 16 * torch.arange(128)).expand(1, 2, 128)
    for data, times in ((line, time), (pulse, time[3:4])):
        year = model.tokenizer.features(data)[0, 5, 2 * 8 * 3 :].view(2, 16)
        assert (year[:, times] > 0.9 * year.max()).all()
    quiet = year[:, (time < 1) | (time > 5)]
    assert (quiet < 0.1 * year.max()).all()


def test_density_is_in_the_units_of_the_parameters(model: BinaryModel) -> None:
    slots, params = torch.randn(7, 16), torch.randn(7, len(INFERRED))
    model.standardise(torch.randn(100, len(INFERRED)))
    before = model.log_prob(slots, params)
    model.centre *= 2
    model.scale *= 2
    after = model.log_prob(slots, 2 * params)
    assert torch.allclose(after, before - len(INFERRED) * math.log(2), atol=1e-4)


def test_samples_follow_the_density(model: BinaryModel) -> None:
    """The mean over samples of p of q / p, another slot's density, is 1."""
    slots = torch.randn(1, 16)
    other = slots + 0.1 * torch.randn(1, 16)
    with torch.no_grad():
        drawn = model.sample(slots, 4000)[:, 0]  # [n, P]
        ratio = (model.log_prob(other, drawn) - model.log_prob(slots, drawn)).exp()
    assert float(ratio.mean()) == pytest.approx(1, abs=6 * float(ratio.std()) / math.sqrt(4000))


def test_matching_makes_the_loss_least(model: BinaryModel, sample: Bank) -> None:
    mixtures = mixtures_of(sample, 12)
    params, counts = inferred(mixtures.params), mixtures.counts
    model.standardise(params.flatten(0, 1))
    with torch.no_grad():
        found = model.eval()(mixtures.data)
        loss = binary_loss(model, found, params, counts, PLAIN)
    expected = 0.0
    for b, k in enumerate(counts.tolist()):
        with torch.no_grad():
            density = model.log_prob(found.slots[b].unsqueeze(1), params[b, :k].unsqueeze(0))  # [S, K]
        losses = []
        for chosen in itertools.permutations(range(6), k):
            target = torch.zeros(6)
            target[list(chosen)] = 1
            entropy = F.binary_cross_entropy_with_logits(found.exist_logits[b], target, reduction="sum")
            losses.append(float(entropy - density[list(chosen), range(k)].sum()))
        expected += min(losses)
    assert float(loss) == pytest.approx(expected / int(counts.sum()), rel=1e-4)


def test_each_source_has_a_slot_of_its_own(model: BinaryModel, sample: Bank) -> None:
    mixtures = mixtures_of(sample, 30)
    pairs = match_binaries(model, model(mixtures.data), inferred(mixtures.params), mixtures.counts)
    assert len(pairs.slot) == int(mixtures.counts.sum())
    assert len(set(zip(pairs.mixture.tolist(), pairs.slot.tolist(), strict=True))) == len(pairs.slot)
    assert (pairs.source < mixtures.counts[pairs.mixture]).all()


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].mechanism is not None])
def test_every_method_has_a_loss_with_gradients(method: str, sample: Bank) -> None:
    setting = BinarySetting(**SMALL)
    model = setting.model(method, 0).train()
    mixtures = mixtures_of(sample, 4)
    model.standardise(sample.params[:, [0, 1, 2, 3, 4]])
    found = model(mixtures.data)
    binary_loss(model, found, inferred(mixtures.params), mixtures.counts, METHODS[method].weights).backward()
    gradients = [p.grad for p in model.tokenizer.parameters()]
    assert all(g is not None and g.isfinite().all() for g in gradients)
    assert any((g != 0).any() for g in gradients)


@pytest.mark.parametrize("method", ["vanilla", "evidence_linear"])
def test_training_learns_and_repeats_itself(method: str, sample: Bank) -> None:
    state = torch.get_rng_state()
    losses = [
        fit(method, BinarySetting(**SMALL, epochs=epochs, learning_rate=3e-3), sample, seed=0).final_loss
        for epochs in (1, 12, 12)
    ]
    assert losses[1] < losses[0] - 0.5
    assert losses[1] == losses[2]
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_of_a_run_come_back(
    model: BinaryModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SEPARATOR_CACHE", str(tmp_path))
    setting = BinarySetting(**SMALL)
    with pytest.raises(SeparatorError, match="no weights of evidence_quadratic with seed=3"):
        load_trained("evidence_quadratic", setting, 3)
    model.standardise(torch.randn(10, len(INFERRED)))
    save_weights(model, weights_path("evidence_quadratic", setting, 3))
    again = load_trained("evidence_quadratic", setting, 3)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())


def planted(n: int, width: float) -> tuple[Tensor, Tensor]:
    """Posteriors of deviation `width` times the true one."""
    generator = torch.Generator().manual_seed(0)
    middle = torch.randn(n, len(INFERRED), generator=generator)
    truth = middle + torch.randn(n, len(INFERRED), generator=generator)
    noise = torch.randn(gw_scores.N_SAMPLES, n, len(INFERRED), generator=generator)
    return middle + width * noise, truth


def test_a_right_posterior_is_calibrated_and_a_narrow_one_is_not() -> None:
    right = gw_scores.calibration_scores(*planted(2000, 1.0))
    assert right["coverage_50"] == pytest.approx(0.5, abs=0.02)
    assert right["coverage_90"] == pytest.approx(0.9, abs=0.02)
    assert all(right[f"pp_deviation_{name}"] < right["pp_band"] for name in INFERRED)
    narrow = gw_scores.calibration_scores(*planted(2000, 0.7))
    assert narrow["coverage_90"] < 0.8
    assert all(narrow[f"pp_deviation_{name}"] > narrow["pp_band"] for name in INFERRED)
    assert narrow["pp"]["drift"][0] > right["pp"]["drift"][0] + 0.03


def test_the_band_holds_95_of_100_uniform_curves() -> None:
    curves = torch.rand(1000, 400, generator=torch.Generator().manual_seed(0))
    outside = [gw_scores.distance_from_uniform(c) > gw_scores.BAND_95 / math.sqrt(400) for c in curves]
    assert np.mean(outside) == pytest.approx(0.05, abs=0.02)


def test_medians_know_that_longitude_closes_and_latitude_has_two_modes() -> None:
    posterior = torch.zeros(101, 1, len(INFERRED))
    posterior[:, 0, 0] = torch.arange(101)
    posterior[:, 0, 3] = (torch.linspace(-0.2, 0.2, 101) + math.pi + 0.05 + math.pi) % (2 * math.pi) - math.pi
    posterior[:, 0, 4] = 0.8
    posterior[:40, 0, 4] = -0.8
    middle = gw_scores.medians(posterior)[0]
    assert float(middle[0]) == 50
    assert float(middle[3]) == pytest.approx(0.05 - math.pi, abs=1e-3)
    assert float(middle[4]) == pytest.approx(0.8)


def test_true_parameters_recover_all_and_leave_the_noise(sample: Bank) -> None:
    pytest.importorskip("binary_galactica")
    mixtures = mixtures_of(sample, 30)
    exists = torch.arange(5) < mixtures.counts.unsqueeze(1)
    truth = inferred(mixtures.params)
    oracle = SimpleNamespace(sample=lambda slots, n: slots.expand(n, *slots.shape))
    found = BinaryPrediction(truth, truth, torch.where(exists, 1.0, -1.0), None)
    band = BinarySetting(**SMALL).population.band
    scores = gw_scores.recovery_scores(oracle, band, found, mixtures, 0)
    assert scores["recovered_share"] > 0.9  # noise moves the quietest: their ratio is 7
    assert scores["recovered_share_dominant"] == 1
    assert scores["residual_power"] == pytest.approx(1, abs=0.1)
    assert scores["data_power"] > 5
    moved = truth + torch.tensor([1.5, 0, 0, 0, 0])
    off = gw_scores.recovery_scores(oracle, band, found._replace(slots=moved), mixtures, 0)
    assert off["recovered_share_dominant"] < 0.2
    assert off["residual_power"] > 2
    none = gw_scores.recovery_scores(
        oracle, band, found._replace(exist_logits=-torch.ones(30, 5)), mixtures, 0
    )
    assert none["recovered_share"] == 0
    assert none["residual_power"] == pytest.approx(none["data_power"], rel=1e-5)


def test_counts_are_called_where_logits_are_positive() -> None:
    logits = torch.tensor([[1.0, 1, -1], [1, -1, -1], [1, 1, 1]])
    found = BinaryPrediction(torch.zeros(3, 3, 2), torch.zeros(3, 3, 2), logits, None)
    scores = gw_scores.count_scores(found, torch.tensor([2, 2, 1]))
    assert scores["count_accuracy"] == pytest.approx(1 / 3)
    assert scores["count_confusion"] == [[0, 0, 0, 1], [0, 1, 1, 0]]


def test_overlaps_are_those_of_the_slots_that_exist_most() -> None:
    attn = torch.eye(3)[None, [0, 0, 1]]
    found = BinaryPrediction(torch.zeros(1, 3, 2), attn, torch.tensor([[2.0, -1, 1]]), None)
    scores = gw_scores.attention_scores(found, torch.tensor([2]))
    assert (scores["peak_overlap"], scores["peak_overlap_by_index"]) == (0, 1)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"epochs": 0}, "epochs=0 is not positive"),
        ({"n_train": 8}, "n_train=8 is less than batch_size=16"),
        ({"n_slots": 4}, "n_slots=4 is less than max_sources=5"),
        ({"n_bins": 64}, "n_bins=64 is too narrow for 5 sources"),
        ({"frequency": -1.0}, "frequency=-1.0 Hz is not between"),
    ],
)
def test_bad_settings_are_refused(changes: dict[str, float], words: str) -> None:
    with pytest.raises(SeparatorError, match=words):
        BinarySetting(**{**SMALL, **changes})


@pytest.mark.parametrize(
    ("n_tokens", "words"),
    [(7, "n_tokens=7 does not divide the 256 bins"), (256, "n_tokens=256 makes chunks of 1 bin; ")],
)
def test_tokens_that_do_not_divide_the_band_are_refused(n_tokens: int, words: str) -> None:
    with pytest.raises(SeparatorError, match=words):
        build_binary_model("vanilla", n_tokens=n_tokens)
