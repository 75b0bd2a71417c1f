"""The paper's FUSS experiment: targets, readout, oracles and records."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from separator.benchmarks.experiments import read_experiment
from separator.benchmarks.fuss_task import FussTask, describe, read_mixtures
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.model import Prediction
from separator.benchmarks.paper_fuss import hungarian_errors, score, train_paper_fuss
from separator.benchmarks.readout import active_slots, chunk_oracle, oracles, paper_si_sdr, read_out
from separator.benchmarks.tasks import Mixtures
from separator.errors import SeparatorError

RATE, N = 16_000, 4096
SIZES = {"n_samples": N, "n_tokens": 16, "d_model": 16, "batch_size": 4}


def tone(frequency: float, amplitude: float = 0.3, begin: int = 0, end: int = N) -> torch.Tensor:
    t = torch.arange(N) / RATE
    sound = amplitude * torch.sin(2 * math.pi * frequency * t)
    return sound * ((torch.arange(N) >= begin) & (torch.arange(N) < end))


def write_example(root: Path, split: str, index: int, sources: list[torch.Tensor]) -> None:
    folder = root / split / f"example{index:05d}_sources"
    folder.mkdir(parents=True)
    for k, source in enumerate(sources):
        soundfile.write(folder / f"foreground{k}_sound.wav", source.numpy(), RATE, subtype="FLOAT")
    mixture = torch.stack(sources).sum(0).numpy()
    soundfile.write(root / split / f"example{index:05d}.wav", mixture, RATE, subtype="FLOAT")


def write_folder(root: Path, n_train: int = 8, n_eval: int = 6) -> Path:
    """Examples of one to three tones in FUSS layout."""
    rng = np.random.default_rng(3)
    for split, n in (("train", n_train), ("eval", n_eval)):
        for index in range(n):
            sources = [tone(float(rng.uniform(200, 4000))) for _ in range(1 + index % 3)]
            write_example(root, split, index, sources)
    return root


def test_targets_of_a_tone_are_its_frequency_and_level():
    found = describe(torch.stack([tone(2000.0), 3 * tone(2000.0)]))
    assert found[:, 0].tolist() == pytest.approx([0.25, 0.25], abs=1e-3)
    assert found[:, 1].tolist() == pytest.approx([0.25, 0.25], abs=0.02)
    level = 0.3 / math.sqrt(2) / 0.5
    assert found[:, 2].tolist() == pytest.approx([level, 1.0], abs=1e-3)  # 0.64 / 0.5 is cut at one


def test_a_constant_does_not_count_as_the_dominant_frequency():
    assert describe(tone(1000.0) + 2.0)[0].item() == pytest.approx(0.125, abs=1e-3)


def test_sources_that_are_silent_in_the_stretch_do_not_count(tmp_path):
    late, early = torch.cat([torch.zeros(N), tone(500.0)]), torch.cat([tone(900.0), torch.zeros(N)])
    write_example(tmp_path, "train", 0, [early, late])
    mixtures = read_mixtures(tmp_path, "train", 1, N, 4)
    assert mixtures.counts.tolist() == [1]
    assert torch.allclose(mixtures.signals[0], early[:N], atol=1e-6)
    with pytest.raises(SeparatorError, match="has 1 mixtures of 1 to 4 sources"):
        read_mixtures(tmp_path, "train", 2, N, 4)


def test_perfect_attention_in_time_separates_sounds_that_take_turns():
    sources = torch.stack([tone(700.0, end=N // 2), tone(1900.0, begin=N // 2)])
    mixture = sources.sum(0)
    attn = torch.zeros(2, 16)
    attn[0, :8] = attn[1, 8:] = 1 / 8
    for readout in ("time", "rank1"):
        reached, gain = paper_si_sdr(read_out(mixture, attn, readout), sources, mixture)
        assert reached > 12
        assert gain == pytest.approx(reached, abs=0.5)  # equally loud: the mixture has 0 dB
    assert paper_si_sdr(mixture[None], sources[:1], mixture) is None


def test_estimates_of_a_readout_add_up_to_the_mixture():
    torch.manual_seed(0)
    mixture = torch.randn(N)
    for readout in ("time", "rank1"):
        estimates = read_out(mixture, torch.rand(3, 16), readout)
        assert torch.allclose(estimates.sum(0), mixture, atol=1e-4)


def test_oracles_rank_as_their_knowledge():
    sources = torch.stack([tone(700.0, end=3 * N // 4), tone(1900.0, begin=N // 4)])
    mixture = sources.sum(0)
    gains = {
        name: paper_si_sdr(estimates, sources, mixture)[1]
        for name, estimates in oracles(mixture, sources, 16).items()
    }
    assert gains["oracle_time"] < gains["oracle_rank1"] < gains["oracle_irm"] + 1
    assert gains["oracle_ibm"] > 15
    assert chunk_oracle(mixture, sources, 16, "time").shape == (2, N)


def test_the_most_certain_slot_is_always_active():
    assert active_slots(torch.tensor([-3.0, -1.0, -2.0])).tolist() == [False, True, False]
    assert active_slots(torch.tensor([1.0, -1.0, 2.0])).tolist() == [True, False, True]


def test_errors_are_those_of_the_best_pairs_of_the_most_certain_slots():
    true = torch.tensor([[[0.1, 0.1], [0.8, 0.8]]])
    test = Mixtures(torch.zeros(1, N), true, torch.tensor([2]), torch.zeros(1, 2, N))
    params = torch.tensor([[[0.9, 0.8], [0.1, 0.1], [0.1, 0.3]]])
    logits = torch.tensor([[2.0, -5.0, 1.0]])
    assert hungarian_errors(params, logits, test).tolist() == pytest.approx([0.05, 0.1], abs=1e-6)


def test_a_score_has_every_column_of_the_papers_tables(tmp_path):
    test = read_mixtures(write_folder(tmp_path), "eval", 6, N, 4)
    torch.manual_seed(0)
    prediction = Prediction(
        torch.randn(6, 5, 8), torch.rand(6, 5, 16), torch.randn(6, 5), torch.rand(6, 5, 3), None
    )
    found = score(FussTask(tmp_path), prediction, test)
    assert set(found) == {
        *("peak_overlap", "cosine_overlap", "count_accuracy"),
        *("mae_dominant_frequency", "mae_spectral_centroid", "mae_level"),
        *("rank1_si_sdr", "rank1_si_sdri", "time_si_sdr", "time_si_sdri"),
    }
    assert all(value is not None for value in found.values())


def test_training_leaves_a_record_with_floors_and_oracles(tmp_path):
    folder = write_folder(tmp_path)
    call = {"folder": str(folder), "epochs": 2, "n_train": 8, "n_test": 6, **SIZES}
    records = train_paper_fuss("fuss", "evidence_linear", seeds=[0, 1], **call)
    assert [record["seed"] for record in records] == [0, 1]
    for record in json.loads(json.dumps(records)):
        assert {"floor_mae_level", "oracle_rank1_si_sdri", "oracle_irm_si_sdr", "final_loss"} <= set(record)
        assert record["oracle_irm_si_sdri"] > 5
    alone = train_paper_fuss("fuss", "evidence_linear", seeds=[1], **call)[0]
    assert alone["peak_overlap"] == records[1]["peak_overlap"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("folder = 3", "folder=3 is not a text"),
        ('folder = "FOLDER"\nn_tokens = 15', "n_tokens=15 does not divide"),
        ('folder = "missing"', "missing"),
        ('folder = "FOLDER"\ngama = 1.0', "unknown setting 'gama'"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_work(tmp_path, settings, words):
    folder = write_folder(tmp_path / "data", 1, 1)
    path = tmp_path / "paper.toml"
    text = (
        'kind = "paper_fuss"\ntasks = ["fuss"]\nmethods = ["vanilla"]\nseeds = [0]\n'
        f"budget = {{ epochs = 1, n_train = 256, n_test = 1 }}\n[settings]\nn_samples = 4096\n{settings}\n"
    )
    path.write_text(text.replace("FOLDER", str(folder)))
    with pytest.raises(SeparatorError, match=words):
        read_experiment(path, KINDS)
