"""The scores of recipes/fuss, from folders made here: known stems give known numbers."""

import csv
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile

SCRIPT = Path(__file__).resolve().parents[1] / "recipes/fuss/evaluate.py"
RATE, LENGTH = 16_000, 16_000
COUNTS = (1, 2, 4)


def tone(k: int) -> np.ndarray:
    return np.round(3000 * np.cos(2 * np.pi * (300 + 400 * k) * np.arange(LENGTH) / RATE)).astype(np.int16)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A split of three examples, and estimates 20 dB over their noise; the first of the last is missing."""
    lines = []
    for number, count in enumerate(COUNTS):
        name = f"eval/example{number:04d}"
        (tmp_path / "data" / f"{name}_sources").mkdir(parents=True)
        (tmp_path / f"theirs/example{number:04d}").mkdir(parents=True)
        paths = [f"{name}.wav"]
        for k in range(count):
            paths.append(f"{name}_sources/{'background0' if k == 0 else f'foreground{k - 1}'}_sound.wav")
            soundfile.write(tmp_path / "data" / paths[-1], tone(k), RATE)
            if (count, k) != (4, 0):
                estimate = (tone(k) + 0.1 * tone(k + 5)) / 32768
                soundfile.write(tmp_path / f"theirs/example{number:04d}/{k}.wav", estimate, RATE, "FLOAT")
        total = np.sum([tone(k) for k in range(count)], axis=0).astype(np.int16)
        soundfile.write(tmp_path / "data" / paths[0], total, RATE)
        lines.append("\t".join(paths))
    (tmp_path / "data/eval_example_list.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def run(place: Path, *arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--results", str(place / "results"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    return done


def test_planted_stems_score_as_planted(place: Path) -> None:
    done = run(place, "--data", place / "data", "--estimates", place / "theirs", "--bsseval", 1)
    record = json.loads((place / "results/theirs.json").read_text())
    assert (record["data"], record["split"]) == ("data", "eval")
    assert record["min_level_db"] < -100
    report = record["reports"]["theirs"]["all"]
    assert report["by_count"]["1"]["strict"]["mean"] == pytest.approx(20, abs=0.05)
    assert report["by_count"]["2"]["strict"]["mean"] == pytest.approx(20, abs=0.05)  # the mixture is at 0 dB
    improvement = 20 + 10 * np.log10(3)
    assert report["by_count"]["4"]["strict"]["mean"] == pytest.approx((3 * improvement - 30) / 4, abs=0.05)
    assert report["by_count"]["4"]["known_count"]["mean"] == pytest.approx(3 * improvement / 4, abs=0.05)
    fuss = report["fuss"]
    assert fuss["4"]["mean"] == pytest.approx(improvement, abs=0.05)  # a missed source costs nothing there
    assert (fuss["under"], fuss["equal"], fuss["over"]) == pytest.approx((1 / 3, 2 / 3, 0))
    assert report["count"]["confusion"][4][3] == 1
    assert report["bsseval"]["n_examples"] == 1
    with (place / "results/theirs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["name"], row["n_sources"], row["n_called"]) for row in rows] == [
        ("example0000", "1", "1"),
        ("example0001", "2", "2"),
        ("example0002", "4", "3"),
    ]
    assert float(rows[1]["strict_db"]) == pytest.approx(20, abs=0.05)
    assert (place / "results/theirs.png").stat().st_size > 10_000
    assert "| theirs | 20.0 / 20.0 |" in done.stdout and "FUSS protocol" in done.stdout
    assert "theirs: 3/3" in done.stderr


def test_any_two_folders_of_folders_score_as_the_split_they_came_from(place: Path) -> None:
    run(place, "--data", place / "data", "--estimates", place / "theirs", "--name", "split")
    for folder in (place / "data/eval").glob("*_sources"):
        shutil.copytree(folder, place / "references" / folder.name.removesuffix("_sources"))
    for folder in (place / "references").iterdir():
        shutil.copy(next(folder.glob("*.wav")), folder / "residual.wav")  # no source
    pair = ("--references", place / "references", "--estimates", place / "theirs")
    run(place, *pair, "--name", "pair", "--jobs", 2)
    assert (place / "results/pair.csv").read_text() == (place / "results/split.csv").read_text()
    assert json.loads((place / "results/pair.json").read_text())["references"] == "references"


def test_a_model_and_a_baseline_are_scored(place: Path, random_model: Path) -> None:
    run(place, "--data", place / "data", "--model", random_model)
    report = json.loads((place / "results/random.json").read_text())["reports"]["random"]["all"]
    assert report["n_examples"] == 3 and report["sum_error_db"]["mean"] < -80
    run(place, "--data", place / "data", "--baseline", "irm", "--limit", 1, "--zero-mean")
    record = json.loads((place / "results/irm.json").read_text())["reports"]["irm"]
    assert record["settings"]["zero_mean"] is True
    assert record["all"]["n_examples"] == 1


def test_what_is_wrong_is_one_line(place: Path) -> None:
    shutil.rmtree(place / "theirs/example0001")
    done = run(place, "--data", place / "data", "--estimates", place / "theirs", code=1)
    (line,) = done.stderr.splitlines()
    assert line.startswith("evaluate.py: error: example0001 has no folder in")
    for wrong in (("--name", "../up"), ("--min-level", "nan"), ("--limit", "-1"), ("--jobs", "0")):
        said = run(place, "--data", place / "data", "--estimates", place / "theirs", *wrong, code=2).stderr
        assert f"argument {wrong[0]}" in said.splitlines()[-1]
    assert not (place / "up.json").exists()
    assert "pass --model, --estimates or --baseline" in run(place, "--data", place / "data", code=2).stderr
