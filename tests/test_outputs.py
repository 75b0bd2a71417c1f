import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from separator.errors import SeparatorError
from separator.evaluation import evaluate, score_example, score_examples
from separator.fuss import Example, read_source_folders
from separator.outputs import BASELINES, BaselineOutputs, FolderOutputs, ModelOutputs
from separator.separate import Separator

RATE = 16_000


def sources(count: int, length: int = RATE) -> Tensor:
    """Orthogonal tones that 16 bits hold to -90 dB or so."""
    time = (torch.arange(length) + 0.5) / RATE
    return torch.stack([0.1 * torch.cos(2 * math.pi * (300 + 400 * k) * time) for k in range(count)])


def example(count: int, name: str = "example0000") -> Example:
    truth = sources(count) if count else torch.zeros(0, RATE)
    return Example(name, truth.sum(0), truth, RATE)


def write(folder: Path, **waveforms: Tensor) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, waveform in waveforms.items():
        soundfile.write(folder / f"{name}.wav", waveform.numpy(), RATE, subtype="FLOAT")


# ---- files


def test_files_are_read_as_outputs_whatever_their_names(tmp_path: Path) -> None:
    truth = sources(2)
    write(tmp_path / "example0000", anything=truth[1] + 0.1 * truth[0], at_all=truth[0] + 0.01 * truth[1])
    (tmp_path / "example0000/notes.txt").write_text("no sound")
    score = score_example(FolderOutputs(tmp_path)(example(2)), example(2))
    assert (score.n_sources, score.n_called) == (2, 2)
    assert sorted(score.improvements) == pytest.approx([20, 40], abs=1e-2)
    assert score.known_count == score.strict


def test_a_residual_is_no_source_and_counts_in_the_sum(tmp_path: Path) -> None:
    truth = sources(2)
    write(tmp_path / "example0000", source1=truth[0], residual=truth[1])
    score = score_example(FolderOutputs(tmp_path)(example(2)), example(2))
    assert score.n_called == 1
    assert score.residual_db == pytest.approx(-3.01, abs=0.01)
    assert score.sum_error_db < -100


def test_silent_files_are_not_called_sources(tmp_path: Path) -> None:
    truth = sources(2)
    write(tmp_path / "example0000", a=truth[0], b=truth[1], c=torch.zeros(RATE), d=0.001 * truth[0])
    assert FolderOutputs(tmp_path)(example(2)).existence.tolist() == [1, 1, 0, 1]
    assert FolderOutputs(tmp_path, min_level_db=-40)(example(2)).existence.tolist() == [1, 1, 0, 0]


def test_an_example_without_a_single_output_is_scored_as_missed(tmp_path: Path) -> None:
    (tmp_path / "example0000").mkdir()
    score = score_example(FolderOutputs(tmp_path)(example(2)), example(2), with_bsseval=True)
    assert (score.n_called, score.strict, score.known_count) == (0, -30, 0)
    assert score.fuss is not None and score.fuss.n_estimates == 0
    assert score.bsseval is not None and score.bsseval.n_silent_estimates == 2


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match=r"example0000 has no folder in .*; expected .*0000/\*\.wav"):
        FolderOutputs(tmp_path)(example(1))


@pytest.mark.parametrize(
    ("shape", "rate", "message"),
    [
        ((RATE - 1,), RATE, r"a.wav has 1 channel, 15999 samples at 16000 Hz; the example has 1, 16000"),
        ((RATE,), 8000, "at 8000 Hz"),
        ((RATE, 2), RATE, "2 channels"),
    ],
)
def test_an_output_of_another_shape_is_named(
    tmp_path: Path, shape: tuple[int, ...], rate: int, message: str
) -> None:
    (tmp_path / "example0000").mkdir()
    soundfile.write(tmp_path / "example0000/a.wav", np.zeros(shape), rate)
    with pytest.raises(SeparatorError, match=message):
        FolderOutputs(tmp_path)(example(1))


# ---- references in folders


def test_folders_of_sources_are_examples_whose_mixture_is_their_sum(tmp_path: Path) -> None:
    truth = sources(2)
    write(tmp_path / "b_sources", one=truth[0], two=truth[1], three=torch.zeros(RATE))
    write(tmp_path / "a", one=truth[0])
    one, two = read_source_folders(tmp_path)
    assert (one.name, two.name) == ("a", "b")
    assert torch.equal(two.mixture, truth.sum(0)) and torch.equal(one.mixture, truth[0])
    assert (len(two.sources), two.n_silent) == (2, 1)


def test_unusable_folders_of_sources_are_named(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(SeparatorError, match="has no folders of sources"):
            read_source_folders(place)
    write(tmp_path / "a", one=sources(1)[0], two=sources(1, 100)[0])
    with pytest.raises(SeparatorError, match=r"two\.wav of a has 100 samples at 16000 Hz, one\.wav 16000"):
        read_source_folders(tmp_path)[0]
    (tmp_path / "b").mkdir()
    with pytest.raises(SeparatorError, match="b holds no sound file"):
        read_source_folders(tmp_path)


# ---- models and baselines


def test_a_model_receives_the_sum_of_the_sources_and_gives_all_its_slots(band_separator: Separator) -> None:
    truth = example(2)
    other = Example("x", torch.zeros(RATE), truth.sources, RATE)  # the mixture file is not looked at
    outputs = ModelOutputs(band_separator)(other)
    assert outputs.estimates.shape == (band_separator.network.config.n_slots, RATE)
    assert outputs.min_existence == band_separator.network.config.min_existence
    assert score_example(outputs, truth).sum_error_db < -100


def test_an_unknown_baseline_is_refused() -> None:
    with pytest.raises(SeparatorError, match="unknown baselines magic; there are mixture, hpss"):
        BaselineOutputs("magic")


@pytest.mark.parametrize("name", list(BASELINES))
def test_outputs_can_be_sent_to_another_process(name: str) -> None:
    again = pickle.loads(pickle.dumps(BaselineOutputs(name)))
    assert again == BaselineOutputs(name)


# ---- several processes


def test_processes_score_as_one_does_and_in_the_same_order() -> None:
    examples = [example(1 + k % 3, f"example{k}") for k in range(6)]
    told: list[tuple[int, int]] = []
    outputs = BaselineOutputs("ibm")
    scores = score_examples(outputs, examples, n_jobs=2, progress=lambda *state: told.append(state))
    assert [score.name for score in scores] == [example.name for example in examples]
    assert told == [(4, 6), (6, 6)]
    alone = evaluate(outputs, examples)
    assert evaluate(outputs, examples, n_jobs=2) == alone


def test_a_model_goes_to_other_processes(random_model: Path) -> None:
    outputs = ModelOutputs(Separator.load(random_model, device="cpu"))
    examples = [example(2, f"example{k}") for k in range(2)]
    assert evaluate(outputs, examples, n_jobs=2) == evaluate(outputs, examples)
