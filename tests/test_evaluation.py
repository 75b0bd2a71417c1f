import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from separator.errors import SeparatorError
from separator.evaluation import SlotOutputs, evaluate, evaluate_baselines, score_example
from separator.fuss import Example, read_fuss_examples

LENGTH = 1024


def sources(count: int) -> Tensor:
    """Orthogonal waveforms of equal energy: the mixture is at 10 log10(1 / (count - 1)) dB for each."""
    time = torch.arange(LENGTH) + 0.5
    return torch.stack([torch.cos(math.pi * (60 * k + 50) * time / LENGTH) for k in range(count)]) * 0.1


def example(count: int, package_heldout: bool | None = None) -> Example:
    truth = sources(count) if count else torch.zeros(0, LENGTH)
    return Example(f"example{count}", truth.sum(0), truth, 16_000, package_heldout)


def leaky_oracle(count: int, *, called: int | None = None) -> SlotOutputs:
    """Four slots; the first ``count`` hold the sources with the next one 20 dB below, the others silence."""
    truth = sources(count)
    slots = torch.zeros(4, LENGTH)
    slots[:count] = truth + 0.1 * truth.roll(-1, 0) if count > 1 else truth
    existence = (torch.arange(4) < (count if called is None else called)).float()
    return SlotOutputs(slots, existence, 0.5, truth.sum(0) - slots.sum(0))


def by_example(outputs: list[SlotOutputs]):
    """A separator that answers its calls in turn."""
    answers = iter(outputs)
    return lambda example: next(answers)


def before(count: int) -> float:
    return -10 * math.log10(count - 1)


def test_per_count_means_are_those_planted() -> None:
    counts = [1, 2, 2, 3]
    report = evaluate(by_example([leaky_oracle(k) for k in counts]), [example(k) for k in counts])["all"]
    assert report["by_count"]["1"]["known_count"] == {"mean": 100, "std": 0, "count": 1}
    assert report["by_count"]["2"]["known_count"]["count"] == 2
    for count in (2, 3):
        entry = report["by_count"][str(count)]
        assert entry["known_count"]["mean"] == pytest.approx(20 - before(count), abs=1e-3)
        assert entry["strict"]["mean"] == pytest.approx(20 - before(count), abs=1e-3)
        assert entry["exact_count"] == 1


def test_a_source_that_is_not_called_lowers_strict_and_not_known_count() -> None:
    report = evaluate(by_example([leaky_oracle(3, called=2)]), [example(3)])["all"]
    entry = report["by_count"]["3"]
    good = 20 - before(3)
    assert entry["known_count"]["mean"] == pytest.approx(good, abs=1e-3)
    assert entry["strict"]["mean"] == pytest.approx((2 * good - 30) / 3, abs=1e-3)
    assert entry["exact_count"] == 0
    assert report["count"]["accuracy"] == 0
    assert report["count"]["confusion"][3][2] == 1
    # all three outputs have power, two of them are called
    assert report["fuss"]["equal"] == 1
    assert report["fuss_called"]["under"] == 1
    assert report["fuss_called"]["3"]["count"] == 2


def test_a_single_source_scores_absolute_si_sdr_of_its_best_output() -> None:
    truth, other = sources(2)
    slots = torch.stack([other, truth + 0.1 * other, truth + 0.01 * other, 0 * truth])
    single = Example("one", truth, truth[None], 16_000)
    outputs = SlotOutputs(slots, torch.tensor([0.9, 0.9, 0.1, 0.1]), 0.5)
    score = score_example(outputs, single)
    assert score.known_count == pytest.approx(40, abs=1e-2)  # the best of all
    assert score.strict == pytest.approx(20, abs=1e-2)  # the best of those called
    nothing_called = score_example(outputs._replace(min_existence=0.95), single)
    assert nothing_called.strict == -30


def test_a_slot_is_called_from_the_threshold_on_so_that_0_calls_all() -> None:
    outputs = SlotOutputs(sources(2), torch.tensor([0.5, 0.0]), 0.5)
    assert score_example(outputs, example(2)).n_called == 1
    assert score_example(outputs._replace(min_existence=0.0), example(2)).n_called == 2


def test_levels_of_inactive_outputs_residual_and_sum_error_are_relative_to_the_mixture() -> None:
    truth = example(2)
    slots = torch.stack([*truth.sources, 0.1 * truth.mixture, 0.0 * truth.mixture])
    outputs = SlotOutputs(slots, torch.tensor([1.0, 1.0, 0.0, 0.0]), 0.5, -0.2 * truth.mixture)
    score = score_example(outputs, truth)
    assert score.inactive_db == pytest.approx(-20, abs=1e-4)
    assert score.residual_db == pytest.approx(20 * math.log10(0.2), abs=1e-4)
    assert score.sum_error_db == pytest.approx(-20, abs=1e-4)  # 1 + 0.1 - 0.2 - 1
    assert math.isnan(score_example(outputs._replace(min_existence=0.0), truth).inactive_db)


def test_estimates_and_residual_that_sum_to_the_mixture_have_no_sum_error() -> None:
    assert score_example(leaky_oracle(3), example(3)).sum_error_db < -100


def test_overlap_looks_at_called_slots_and_at_the_most_likely_ones() -> None:
    masks = torch.zeros(4, 2, 3)
    for slot, token in enumerate([0, 1, 1, 5]):
        masks[slot, token // 3, token % 3] = 1.0
    outputs = SlotOutputs(torch.randn(4, LENGTH), torch.tensor([0.9, 0.8, 0.7, 0.1]), 0.75, masks=masks)
    overlap = score_example(outputs, example(3)).overlap
    assert overlap["mask_peak_called"] == 0  # slots 0 and 1
    assert overlap["mask_peak_known_count"] == 1  # slots 0, 1 and 2
    assert overlap["mask_cosine_called"] == pytest.approx(0)
    assert overlap["mask_cosine_known_count"] == pytest.approx(1)
    assert score_example(outputs, example(1)).overlap == {}


def test_overlap_is_averaged_over_inputs_of_two_sources_and_more() -> None:
    same = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    outputs = [
        leaky_oracle(k)._replace(attn=attn) for k, attn in ((1, same), (2, same), (2, same.roll(1, 0)))
    ]
    report = evaluate(by_example(outputs), [example(1), example(2), example(2)])["all"]
    assert report["overlap"]["attn_peak_called"] == {"mean": 0.5, "std": 0.5, "count": 2}


def test_an_input_without_sources_enters_the_count_alone() -> None:
    silent = SlotOutputs(torch.zeros(4, LENGTH), torch.tensor([0.9, 0.0, 0.0, 0.0]), 0.5)
    report = evaluate(by_example([silent, leaky_oracle(1)]), [example(0), example(1)])["all"]
    assert report["count"] == {"accuracy": 0.5, "confusion": [[0, 1], [0, 1]]}
    assert list(report["by_count"]) == ["1"]
    assert report["n_examples"] == 2


def test_held_out_packages_are_also_reported_apart() -> None:
    examples = [example(2, True), example(2, False), example(3, None)]
    report = evaluate(by_example([leaky_oracle(k) for k in (2, 2, 3)]), examples)
    assert [report[part]["n_examples"] for part in ("all", "package_heldout", "package_seen")] == [3, 1, 1]
    assert set(evaluate(by_example([leaky_oracle(3)]), examples[2:])) == {"settings", "all"}


def test_the_report_names_its_conventions_and_is_strict_json() -> None:
    outputs = [leaky_oracle(2), leaky_oracle(4)]
    report = evaluate(by_example(outputs), [example(2), example(4)], zero_mean=True)
    assert report["settings"]["zero_mean"] is True
    assert report["settings"]["floor_db"] == -30
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_arrays_and_tensors_score_alike() -> None:
    tensors = leaky_oracle(3)
    arrays = SlotOutputs(
        np.asarray(tensors.estimates), np.asarray(tensors.existence), 0.5, np.asarray(tensors.residual)
    )
    left, right = (evaluate(by_example([outputs]), [example(3)]) for outputs in (tensors, arrays))
    assert left == right


def test_outputs_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(SeparatorError, match=r"example2: estimates \(4, 1023\)"):
        score_example(SlotOutputs(torch.zeros(4, LENGTH - 1), torch.ones(4), 0.5), example(2))
    with pytest.raises(SeparatorError, match=r"existence \(3,\)"):
        score_example(SlotOutputs(torch.zeros(4, LENGTH), torch.ones(3), 0.5), example(2))


def test_bsseval_is_scored_on_some_examples_with_known_count_alignment() -> None:
    outputs = [leaky_oracle(2)._replace(estimates=leaky_oracle(2).estimates[[2, 1, 3, 0]])] * 3
    report = evaluate(by_example(outputs), [example(2)] * 3, bsseval_examples=2)["all"]["bsseval"]
    assert report["n_examples"] == 2
    assert report["sdr"]["count"] == 4
    assert report["n_silent_estimates"] == 0


def test_progress_is_told_after_every_example() -> None:
    told: list[tuple[int, int]] = []
    examples = [example(1), example(2)]
    evaluate(
        by_example([leaky_oracle(1), leaky_oracle(2)]),
        examples,
        progress=lambda done, total: told.append((done, total)),
    )
    assert told == [(1, 2), (2, 2)]


def test_the_mixture_baseline_improves_by_0_db_and_strictly_finds_one_source() -> None:
    report = evaluate_baselines([example(1), example(2), example(4)], methods=["mixture"])["mixture"]["all"]
    assert [report["by_count"][k]["known_count"]["mean"] for k in "124"] == pytest.approx([100, 0, 0])
    assert report["by_count"]["2"]["strict"]["mean"] == pytest.approx(-15)
    assert report["by_count"]["4"]["strict"]["mean"] == pytest.approx(-22.5)


def test_oracle_masks_are_near_perfect_on_tones_and_call_the_right_count() -> None:
    reports = evaluate_baselines([example(2), example(3)], methods=["irm", "ibm"])
    for report in reports.values():
        assert report["all"]["count"]["accuracy"] == 1
        assert report["all"]["sum_error_db"]["mean"] < -100
        assert report["all"]["by_count"]["2"]["strict"]["mean"] > 15


def test_a_limit_takes_a_fixed_subset_of_the_examples() -> None:
    examples = [example(1 + k % 4) for k in range(12)]
    reports = evaluate_baselines(examples, methods=["mixture", "hpss"], limits={"hpss": 3})
    assert reports["mixture"]["all"]["n_examples"] == 12
    assert reports["hpss"]["all"]["n_examples"] == 3


def test_unknown_baselines_are_refused() -> None:
    with pytest.raises(
        SeparatorError, match="unknown baselines magic; there are mixture, hpss, nmf, irm, ibm"
    ):
        evaluate_baselines([example(1)], methods=["magic"])
    with pytest.raises(SeparatorError, match="unknown baselines nfm"):
        evaluate_baselines([example(1)], limits={"nfm": 3})


def test_a_folder_in_fuss_layout_is_evaluated_from_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "test/example0000_sources"
    folder.mkdir(parents=True)
    for name, source in zip(["background0", "foreground0"], sources(2), strict=True):
        soundfile.write(folder / f"{name}_sound.wav", source.numpy(), 16_000, subtype="PCM_16")
    soundfile.write(tmp_path / "test/example0000.wav", sources(2).sum(0).numpy(), 16_000)
    report = evaluate(by_example([leaky_oracle(2)]), read_fuss_examples(tmp_path, "test"))
    # 16 bits put the written sources 60 dB above their rounding, far from the 20 dB planted
    assert report["all"]["by_count"]["2"]["known_count"]["mean"] == pytest.approx(20, abs=0.1)
