import itertools
import math

import numpy as np
import pytest
import torch
from torch import Tensor

from separator.fuss_protocol import FussScore, fuss_score, summarise_fuss


def orthogonal(count: int, length: int = 64) -> Tensor:
    time = torch.arange(length, dtype=torch.float64) + 0.5
    return torch.stack([torch.cos(math.pi * (k + 1) * time / length) for k in range(count)])


def score(estimates: Tensor, sources: Tensor) -> FussScore:
    result = fuss_score(estimates, sources)
    assert result is not None
    return result


def test_permuted_outputs_are_aligned_and_improvement_is_over_the_sum_of_sources() -> None:
    sources = orthogonal(2)
    estimates = torch.stack([torch.zeros(64), sources[1] + 0.1 * sources[0], sources[0], torch.zeros(64)])
    result = score(estimates, sources)
    assert sorted(result.si_snr.tolist()) == pytest.approx([20, 80], abs=1e-3)
    assert sorted(result.improvement.tolist()) == pytest.approx([20, 80], abs=1e-3)  # the mixture is at 0 dB
    assert (result.n_sources, result.n_estimates) == (2, 2)


def test_silent_sources_count_as_absent() -> None:
    sources = torch.cat([orthogonal(1), torch.zeros(3, 64)])
    result = score(torch.cat([torch.zeros(3, 64), orthogonal(1)]), sources)
    assert result.si_snr.tolist() == pytest.approx([80], abs=1e-3)
    assert result.n_sources == 1


@pytest.mark.parametrize(("level_db", "n_estimates"), [(-19.9, 3), (-20.1, 2)])
def test_an_output_is_active_above_20_db_below_the_quietest_source(level_db: float, n_estimates: int) -> None:
    sources = orthogonal(2) * torch.tensor([[1.0], [0.1]])
    extra = orthogonal(3)[2:] * 0.1 * 10 ** (level_db / 20)
    assert score(torch.cat([sources, extra]), sources).n_estimates == n_estimates


def test_a_source_without_an_active_output_leaves_the_means_and_shows_as_under_separation() -> None:
    sources = orthogonal(3)
    estimates = torch.stack([sources[0] + 0.1 * sources[1], sources[1] + 0.1 * sources[2], 1e-3 * sources[2]])
    result = score(estimates, sources)
    assert result.si_snr.tolist() == pytest.approx([20, 20], abs=1e-3)
    report = summarise_fuss([result])
    assert (report["under"], report["equal"], report["over"]) == (1, 0, 0)
    assert report["3"] == {"mean": pytest.approx(20 + 10 * math.log10(2), abs=1e-3), "std": 0.0, "count": 2}


def test_means_are_not_removed() -> None:
    source = orthogonal(1)
    offset = 0.1 * source.norm() / 8  # 20 dB below the source
    assert score(source + offset, source).si_snr.item() == pytest.approx(20, abs=1e-3)


def test_an_input_without_sound_is_skipped() -> None:
    assert fuss_score(torch.ones(4, 8), torch.zeros(4, 8)) is None
    assert summarise_fuss([None])["equal"] is None


def pairs(n_sources: int, n_estimates: int, *values: float) -> FussScore:
    """A score whose improvement is its SI-SNR less 1 dB."""
    return FussScore(torch.tensor(values), torch.tensor(values) - 1, n_sources, n_estimates)


def test_single_sources_report_absolute_values_and_msi_is_the_mean_over_pairs() -> None:
    scores = [pairs(1, 2, 30.0), pairs(2, 2, 11.0, 11.0), pairs(3, 1, 5.0), pairs(4, 4, 1.0, 1.0, 1.0, 1.0)]
    report = summarise_fuss(scores)
    assert report["1S"]["mean"] == 30
    assert [report[k]["mean"] for k in ("2", "3", "4")] == [10, 4, 0]
    assert report["MSi"]["mean"] == pytest.approx((2 * 10 + 4 + 4 * 0) / 7, abs=1e-4)  # not over inputs
    assert report["MSi"]["count"] == 7
    assert (report["under"], report["equal"], report["over"]) == (0.25, 0.5, 0.25)


def test_a_zero_output_never_scores_above_the_protocols_lower_limit() -> None:
    sources = orthogonal(2)
    result = score(torch.zeros(4, 64), sources)
    assert result.n_estimates == 0
    assert result.si_snr.numel() == 0


def slow_si_snr(estimate: np.ndarray, source: np.ndarray) -> float:
    norms = np.sqrt(max(estimate @ estimate, 1e-16) * max(source @ source, 1e-16))
    cosine = (estimate @ source / norms) ** 2
    return 10 * math.log10((cosine + 1e-8) / (1 - cosine + 1e-8))


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_all_permutations_tried_one_by_one(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 1 + seed % 4
    sources = np.zeros((4, 50))
    sources[:count] = rng.standard_normal((count, 50)) * 10 ** rng.uniform(-1, 0, (count, 1))
    estimates = rng.standard_normal((4, 4)) @ sources + 0.1 * rng.standard_normal((4, 50))
    estimates *= 10 ** rng.uniform(-2.5, 0, (4, 1))
    totals = {
        order: sum(slow_si_snr(estimates[o], sources[k]) for k, o in enumerate(order))
        for order in itertools.permutations(range(4))
    }
    order = max(totals, key=lambda o: totals[o])
    power = (estimates**2).mean(1)
    active = power > 0.01 * (sources[:count] ** 2).mean(1).min()
    kept = [(order[k], k) for k in range(count) if active[order[k]]]
    mixture = sources.sum(0)

    result = score(torch.tensor(estimates), torch.tensor(sources))
    expected = [slow_si_snr(estimates[o], sources[k]) for o, k in kept]
    gains = [value - slow_si_snr(mixture, sources[k]) for value, (_, k) in zip(expected, kept, strict=True)]
    assert sorted(result.si_snr.tolist()) == pytest.approx(sorted(expected), abs=1e-4)
    assert sorted(result.improvement.tolist()) == pytest.approx(sorted(gains), abs=1e-4)
    assert (result.n_sources, result.n_estimates) == (count, int(active.sum()))


def slow_report(inputs: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """The whole protocol in loops over numbers: four outputs against four references, some silent."""
    by_count: dict[int, list[float]] = {1: [], 2: [], 3: [], 4: []}
    excess = []
    for estimates, sources in inputs:
        present = [k for k in range(4) if math.sqrt(sum(sources[k] ** 2) / len(sources[k])) > 1e-8]
        if not present:
            continue
        powers = [sum(row**2) / len(row) for row in estimates]
        quietest = min(sum(sources[k] ** 2) / len(sources[k]) for k in present)
        heard = [power > quietest / 100 for power in powers]
        best, best_total = (), -math.inf
        for order in itertools.permutations(range(4), len(present)):
            total = sum(slow_si_snr(estimates[o], sources[k]) for o, k in zip(order, present, strict=True))
            if total > best_total:
                best, best_total = order, total
        mixture = sum(sources)
        for o, k in zip(best, present, strict=True):
            if heard[o]:
                value = slow_si_snr(estimates[o], sources[k])
                gain = 0 if len(present) == 1 else slow_si_snr(mixture, sources[k])
                by_count[len(present)].append(value - gain)
        excess.append(sum(heard) - len(present))
    several = by_count[2] + by_count[3] + by_count[4]
    return {
        "1S": float(np.mean(by_count[1])),
        **{str(k): float(np.mean(by_count[k])) for k in (2, 3, 4)},
        "MSi": float(np.mean(several)),
        "under": float(np.mean([e < 0 for e in excess])),
        "equal": float(np.mean([e == 0 for e in excess])),
        "over": float(np.mean([e > 0 for e in excess])),
    }


@pytest.mark.parametrize("seed", range(3))
def test_the_whole_report_agrees_with_loops_over_inputs_with_missed_and_extra_sources(seed: int) -> None:
    rng = np.random.default_rng(seed)
    inputs = []
    for index in range(30):
        sources = rng.standard_normal((4, 40)) * 10 ** rng.uniform(-1, 0, (4, 1))
        sources[rng.permutation(4)[: 4 - index % 5]] = 0  # 0 to 4 references sound, at any place
        estimates = sources[rng.permutation(4)] + 0.1 * rng.standard_normal((4, 40)) * (index % 2)
        estimates *= 10 ** rng.uniform(-1.3, 0.2, (4, 1))
        inputs.append((estimates, sources))
    scores = [fuss_score(torch.tensor(estimates), torch.tensor(sources)) for estimates, sources in inputs]
    assert sum(score is None for score in scores) == 6
    report = summarise_fuss(scores)
    for name, expected in slow_report(inputs).items():
        found = report[name] if name in ("under", "equal", "over") else report[name]["mean"]
        assert found == pytest.approx(expected, abs=1e-3), name
    assert min(report["under"], report["equal"], report["over"]) > 0


@pytest.mark.parametrize("snr_db", [-10.0, 5.0, 30.0])
def test_planted_estimates_score_what_was_planted(snr_db: float) -> None:
    """Orthogonal sources of equal level: the mixture is at -10 log10(K - 1) dB for each of K."""
    waves = orthogonal(8)
    for count in (1, 2, 3, 4):
        sources = torch.cat([waves[:count], torch.zeros(4 - count, 64)])
        estimates = sources + 10 ** (-snr_db / 20) * torch.cat(
            [waves[4 : 4 + count], torch.zeros(4 - count, 64)]
        )
        result = score(estimates.roll(1, 0), sources)
        before = 80 if count == 1 else -10 * math.log10(count - 1)
        assert result.si_snr.tolist() == pytest.approx([snr_db] * count, abs=1e-3)
        assert result.improvement.tolist() == pytest.approx([snr_db - before] * count, abs=1e-3)
        assert (result.n_sources, result.n_estimates) == (count, count)


def test_an_extra_output_shows_as_over_separation_and_costs_nothing_in_the_means() -> None:
    waves = orthogonal(4)
    sources = torch.cat([waves[:2], torch.zeros(2, 64)])
    estimates = torch.cat([waves[:2], waves[3:] * 0.5, torch.zeros(1, 64)])
    report = summarise_fuss([score(estimates, sources)])
    assert (report["under"], report["equal"], report["over"]) == (0, 0, 1)
    assert report["2"]["mean"] == pytest.approx(80, abs=1e-3)
