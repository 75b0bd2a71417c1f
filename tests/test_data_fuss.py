"""The FUSS data: its preparation from a server on this machine, the set like it from a bank made here."""

import csv
import hashlib
import http.server
import importlib
import json
import shutil
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from separator.errors import SeparatorError
from separator.fuss import check_fuss_split, read_fuss_examples

DATA = Path(__file__).resolve().parents[1] / "data"
LENGTH = 160_000
SPLITS = {"train": 2, "validation": 1, "eval": 1}
VERSIONS = ("ssdata", "ssdata_reverb")


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The modules of data/fuss, imported as the scripts import them: from their own folder."""
    names = ("prepare", "make_like")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DATA / "fuss")
        yield {name: importlib.import_module(name) for name in names}
    for name in names:
        sys.modules.pop(name, None)


# ---- prepare.py


def write_version(root: Path, version: str) -> None:
    """A FUSS of few examples, each a background and a silent foreground."""
    for split, count in SPLITS.items():
        lines = []
        for number in range(count):
            name = f"{split}/example{number:05d}"
            (root / version / f"{name}_sources").mkdir(parents=True)
            paths = [f"{name}.wav", f"{name}_sources/background0_sound.wav"]
            for path in paths:
                soundfile.write(root / version / path, np.full(LENGTH, number + 1, np.int16), 16_000)
            lines.append("\t".join(paths))
        (root / version / f"{split}_example_list.txt").write_text("\n".join(lines) + "\n")


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archives")
    for version in VERSIONS:
        write_version(folder, version)
        with tarfile.open(folder / f"FUSS_{version}.tar.gz", "w:gz") as tar:
            tar.add(folder / version, arcname=version)
    return folder


@pytest.fixture
def record(archives: Path, scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Address of a record that lists the archives; the script expects a FUSS of their size."""
    monkeypatch.setattr(scripts["prepare"], "FUSS_SPLITS", SPLITS)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(archives))

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        files = []
        for version in VERSIONS:
            path = archives / f"FUSS_{version}.tar.gz"
            content = path.read_bytes()
            entry = {"key": path.name, "size": len(content), "links": {"self": f"{url}/{path.name}"}}
            files.append(entry | {"checksum": f"md5:{hashlib.md5(content).hexdigest()}"})
        (archives / "record").write_text(json.dumps({"files": files}))
        yield f"{url}/record"
        server.shutdown()


def prepare(scripts: dict[str, Any], folder: Path, record: str, *options: str) -> int:
    places = ["--output", str(folder / "fuss"), "--download", str(folder / "download"), "--record", record]
    return int(scripts["prepare"].main([*places, *options]))


def test_fuss_is_downloaded_checked_unpacked_and_counted(
    tmp_path: Path, scripts: dict[str, Any], record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(scripts, tmp_path, record) == 0
    for version in VERSIONS:
        for split, count in SPLITS.items():
            assert len(read_fuss_examples(tmp_path / "fuss" / version, split)) == count
    assert list((tmp_path / "download").iterdir()) == []  # what is unpacked needs no archive
    said = capsys.readouterr()
    assert said.out == ""
    assert "ssdata_reverb/eval: no problems" in said.err and "FUSS_ssdata.tar.gz, MB: " in said.err
    record = record.replace("record", "nowhere")  # nothing is missing, so nothing is asked for
    assert prepare(scripts, tmp_path, record) == 0


def test_one_version_is_enough_and_archives_may_stay(
    tmp_path: Path, scripts: dict[str, Any], record: str
) -> None:
    assert prepare(scripts, tmp_path, record, "--versions", "ssdata", "--keep-archives") == 0
    assert [path.name for path in (tmp_path / "fuss").iterdir()] == ["ssdata"]
    assert [path.name for path in (tmp_path / "download").iterdir()] == ["FUSS_ssdata.tar.gz"]


def test_too_small_a_disk_is_refused_before_anything_is_downloaded(
    tmp_path: Path,
    scripts: dict[str, Any],
    record: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    unpacked = 2 * sum(SPLITS.values()) * 5 * 320_044
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=unpacked))
    assert prepare(scripts, tmp_path, record) == 1  # the archives themselves do not fit
    assert "GB are needed" in capsys.readouterr().err.splitlines()[-1]
    assert list((tmp_path / "download").iterdir()) == [] == list((tmp_path / "fuss").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=unpacked + 10**6))
    assert prepare(scripts, tmp_path, record) == 0


def test_a_corrupted_archive_is_refused(
    tmp_path: Path, scripts: dict[str, Any], record: str, archives: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(archives / "FUSS_ssdata.tar.gz", tmp_path)
    with (tmp_path / "FUSS_ssdata.tar.gz").open("r+b") as file:
        file.seek(100)
        file.write(b"!!!")
    (tmp_path / "download").mkdir()
    (tmp_path / "FUSS_ssdata.tar.gz").rename(tmp_path / "download/FUSS_ssdata.tar.gz")
    assert prepare(scripts, tmp_path, record, "--versions", "ssdata") == 1
    assert "the record says" in capsys.readouterr().err.splitlines()[-1]
    assert not (tmp_path / "fuss/ssdata").exists()
    assert prepare(scripts, tmp_path, record, "--versions", "ssdata") == 0


def test_what_is_missing_is_said(
    tmp_path: Path, scripts: dict[str, Any], record: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prepare(scripts, tmp_path, record, "--versions", "ssdata") == 0
    (tmp_path / "fuss/ssdata/train/example00001.wav").unlink()
    capsys.readouterr()
    assert prepare(scripts, tmp_path, record, "--versions", "ssdata", "--check") == 1
    assert capsys.readouterr().err.splitlines()[-3:] == [
        "ssdata: train/example00001.wav is missing",
        "ssdata: train/example00001_sources/ has no mixture",
        "ssdata: train has 1 of 2 examples; without number 1",
    ]
    assert prepare(scripts, tmp_path / "empty", record, "--check") == 1
    assert "ssdata_reverb: eval/ is missing" in capsys.readouterr().err


def test_many_problems_are_cut_short(
    tmp_path: Path,
    scripts: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(scripts["prepare"], "SHOWN_PROBLEMS", 2)
    assert prepare(scripts, tmp_path, "unused", "--check") == 1
    assert capsys.readouterr().err.splitlines()[-1] == "and 4 more"


# ---- make_like.py


def write_bank(folder: Path) -> Path:
    """Noise clips of three splits: backgrounds, one of them short, and families of foregrounds."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    kinds = [("ambience_background", 176_000), ("ambience_background", 70_000)]
    kinds += [(name, 9_000) for name in ("animals", "percussion", "speech", "household_ui") for _ in range(2)]
    rows: list[dict[str, object]] = []
    start = 0
    with (folder / "audio.i16").open("wb") as audio:
        for split in ("train", "validation", "evaluation"):
            for k, (rough_class, length) in enumerate(kinds):
                audio.write((generator.standard_normal(length) * 5000).astype("<i2").tobytes())
                row = {"start": start, "length": length, "rough_class": rough_class, "split": split}
                rows.append(row | {"family": f"{split}{k}", "bandwidth_hz": 8000})
                start += length
    with (folder / "clips.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return folder


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bank(tmp_path_factory.mktemp("bank") / "bank")


@pytest.fixture(scope="module")
def like(scripts: dict[str, Any], bank: Path) -> Path:
    output = bank.parent / "like"
    scripts["make_like"].make_like(bank, output, {"train": 8, "validation": 3, "eval": 4}, seed=1)
    return output


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("version", VERSIONS)
def test_the_set_is_a_fuss_whose_mixtures_are_the_sum_of_their_sources(like: Path, version: str) -> None:
    counts = set()
    for split, count in (("train", 8), ("validation", 3), ("eval", 4)):
        assert check_fuss_split(like / version, split, n_examples=count) == []
        examples = read_fuss_examples(like / version, split, sample_rate=16_000, n_samples=LENGTH)
        for example in examples:
            counts.add(len(example.sources))
            assert example.n_silent == 0
            assert float((example.mixture - example.sources.sum(0)).abs().max()) == 0
            assert float(example.mixture.abs().max()) < 0.9
        assert len(examples) == count
    assert counts == {1, 2, 3, 4}
    assert (like / version / "train/example00007_sources/background0_sound.wav").exists()
    assert (like / version / "eval/example0003_sources/background0_sound.wav").exists()


def active_level_db(waveform: np.ndarray) -> float:
    power = np.square(waveform.reshape(-1, 400)).mean(1)
    return float(10 * np.log10(power[power > 1e-4 * power.max()].mean()))


@pytest.mark.parametrize("version", VERSIONS)
def test_foregrounds_are_5_db_below_to_25_db_above_the_background(like: Path, version: str) -> None:
    levels = []
    for folder in (like / version / "train").glob("*_sources"):
        background, *others = [active_level_db(soundfile.read(path)[0]) for path in sorted(folder.iterdir())]
        levels += [level - background for level in others]
    slack = 0.2 if version == "ssdata" else 4  # a tail makes the time longer over which a source is active
    assert len(levels) >= 8
    assert -5 - slack <= min(levels) and max(levels) <= 25 + slack
    assert max(levels) - min(levels) > 10


def test_reverberant_sources_are_their_dry_ones_through_rooms(like: Path) -> None:
    for dry, wet in zip(*(read_fuss_examples(like / version, "train") for version in VERSIONS), strict=True):
        assert len(dry.sources) == len(wet.sources)
        for source, reverberated in zip(dry.sources, wet.sources, strict=True):
            cosine = float(source @ reverberated / source.norm() / reverberated.norm())
            assert 0.5 < cosine < 0.999  # the direct sound is there, and more


def test_a_smaller_set_is_the_beginning_of_a_larger_one_and_a_stopped_run_goes_on(
    scripts: dict[str, Any], bank: Path, like: Path, tmp_path: Path
) -> None:
    make = scripts["make_like"].make_like
    make(bank, tmp_path / "set", {"train": 3}, seed=1, versions=("ssdata",))
    small = contents(tmp_path / "set")
    large = contents(like)
    assert all(large[name] == content for name, content in small.items() if name.endswith(".wav"))
    (tmp_path / "set/ssdata/train/example00001.wav").unlink()  # as if it had been killed here
    (tmp_path / "set/ssdata/train/example00001_sources/background0_sound.wav").write_bytes(b"half")
    make(bank, tmp_path / "set", {"train": 8, "validation": 3, "eval": 4}, seed=1)
    assert contents(tmp_path / "set") == large


def test_asking_for_fewer_keeps_those_that_are_there_on_the_list(
    scripts: dict[str, Any], bank: Path, tmp_path: Path
) -> None:
    for count in (3, 2):
        scripts["make_like"].make_like(bank, tmp_path, {"eval": count}, seed=1, versions=("ssdata",))
    assert check_fuss_split(tmp_path / "ssdata", "eval", n_examples=3) == []


def test_another_seed_does_not_go_into_the_same_folder(
    scripts: dict[str, Any], bank: Path, like: Path
) -> None:
    with pytest.raises(SeparatorError, match=r"a set made with .*'seed': 1.*; remove it or pass another"):
        scripts["make_like"].make_like(bank, like, {"train": 1}, seed=2)


def test_measured_responses_are_used_when_they_are_given(
    scripts: dict[str, Any], bank: Path, tmp_path: Path
) -> None:
    """A response of a late echo alone and a direct sound: the echo is found in what was made."""
    room = tmp_path / "responses/hall"
    room.mkdir(parents=True)
    response = np.zeros(2 * 32_000)
    response[320], response[320 + 2 * 8000] = 1.0, 0.5  # at 32 kHz: 0.5 s, so 8,000 samples at 16 kHz
    soundfile.write(room / "echo.wav", response, 32_000, subtype="FLOAT")
    (tmp_path / "responses/README.txt").write_text("no sound")
    scripts["make_like"].make_like(
        bank, tmp_path / "set", {"train": 2}, seed=1, responses=tmp_path / "responses"
    )
    examples = [read_fuss_examples(tmp_path / "set" / version, "train") for version in VERSIONS]
    for dry, wet in zip(*examples, strict=True):
        for source, reverberated in zip(dry.sources.numpy(), wet.sources.numpy(), strict=True):
            echoed = source.copy()
            echoed[8000:] += 0.5 * source[:-8000]
            cosine = float(echoed @ reverberated / np.linalg.norm(echoed) / np.linalg.norm(reverberated))
            assert cosine > 0.999


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: None, "no .wav, .flac or .aiff file under"),
        (lambda folder: soundfile.write(folder / "a.wav", np.zeros(100), 16_000), "a.wav is silent"),
        (lambda folder: (folder / "a.wav").write_text("text"), "cannot be read as an impulse response"),
    ],
)
def test_unusable_responses_are_refused(
    scripts: dict[str, Any], tmp_path: Path, make: Any, message: str
) -> None:
    make(tmp_path)
    with pytest.raises(SeparatorError, match=message):
        scripts["make_like"].read_responses(tmp_path)


def test_the_command_works_with_several_processes_and_gives_the_same(
    bank: Path, like: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(DATA / "fuss/make_like.py"), "--bank", str(bank), "--seed", "1"]
    command += ["--train", "8", "--validation", "3", "--eval", "4", "--jobs", "2"]
    done = subprocess.run(
        [*command, "--output", str(tmp_path / "set")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and "examples: 15/15" in done.stderr
    assert contents(tmp_path / "set") == contents(like)


def test_a_missing_bank_is_one_line(
    scripts: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--bank", str(tmp_path / "none"), "--output", str(tmp_path / "out")]
    assert scripts["make_like"].main(options) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("make_like.py: error: no bank at") and "prepare.py" in line
    assert not (tmp_path / "out").exists()
