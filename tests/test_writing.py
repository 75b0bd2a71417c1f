"""Files are whole or not there: full disks, interrupts, kills, other runs; and what each format can hold."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from separator import Separator, SeparatorError, writing
from separator.audio import AudioInfo
from separator.formats import CODINGS, MP3_RATES, Coding, choose_coding
from separator.naming import FORMATS, StemNames
from separator.stems import StemSet
from separator.writing import (
    TEMPORARY,
    AudioWriter,
    holds_sound,
    remove_unfinished,
    wav_container,
    write_audio,
)

INFO = AudioInfo(Path("mix.wav"), 48_000, 2, 20_000, "WAV", "PCM_16")
ALL = [(form, subtype) for form, subtypes in CODINGS.items() for subtype in subtypes]


def noise(channels: int = 2, length: int = 20_000) -> np.ndarray:
    return np.random.default_rng(0).uniform(-0.5, 0.5, (channels, length))


@contextmanager
def file_size_limit(size: int):
    """A disk on which no file can be larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write_stems(folder: Path, coding: Coding, samples: np.ndarray) -> None:
    names = StemNames(Path("mix.wav"), folder, extension=coding.extension)
    with StemSet(names, 2, INFO, coding) as stems:
        for start in range(0, 20_000, 6000):
            block = samples[:, start : start + 6000]
            stems.write(block, np.stack([0.3 * block, 0.5 * block]))
        stems.publish()


def test_the_names_and_the_codings_of_formats_agree():
    assert tuple(CODINGS) == FORMATS


@pytest.mark.parametrize(("form", "subtype"), ALL)
def test_every_coding_is_written_whole_and_reads_back(tmp_path, form, subtype):
    coding = Coding(form, subtype)
    chord = 0.2 * np.sin(np.outer((440, 550), 2 * np.pi / 48_000 * np.arange(20_000)))
    samples = chord if coding.lossy else noise()  # noise is what lossy codings lose first
    write_stems(tmp_path, coding, samples)
    total = np.zeros((20_000, 2))
    for name in ("source1", "source2", "residual"):
        file = tmp_path / "mix" / f"{name}.{form}"
        found, rate = soundfile.read(file)
        assert (rate, found.shape, soundfile.info(file).subtype) == (48_000, total.shape, subtype)
        total += found
    assert len(list((tmp_path / "mix").iterdir())) == 3
    error = np.abs(total - samples.T)
    if not coding.lossy:
        assert error.max() <= (1e-7 if coding.bits is None else 2.0**-coding.bits + 1e-12)
    else:
        assert 1e-6 < error[2000:-2000].max() < 0.02


@pytest.mark.parametrize(
    ("own", "form", "expected"),
    [
        ("PCM_U8", "wav", "PCM_U8"),
        ("PCM_16", "flac", "PCM_16"),
        ("PCM_32", "flac", "PCM_24"),
        ("FLOAT", "flac", "PCM_24"),
        ("MPEG_LAYER_III", "wav", "FLOAT"),
        ("ULAW", "wav", "PCM_16"),
        ("DOUBLE", "wav", "DOUBLE"),
        ("FLOAT", "mp3", "MPEG_LAYER_III"),
        ("PCM_16", "ogg", "VORBIS"),
    ],
)
def test_the_inputs_own_depth_is_kept_where_the_format_has_it(own, form, expected):
    assert choose_coding(replace(INFO, subtype=own), form).subtype == expected


@pytest.mark.parametrize(
    ("form", "subtype", "rate", "channels", "complaint"),
    [
        ("m4a", None, 48_000, 2, "format='m4a' is not known; pass wav, flac, mp3 or ogg"),
        (
            "flac",
            "FLOAT",
            48_000,
            2,
            "subtype='FLOAT' is no coding of flac here; pass PCM_24, PCM_16 or PCM_S8",
        ),
        (
            "flac",
            None,
            48_000,
            9,
            "9 channels, which flac (PCM_16) cannot hold: it takes up to 655350 Hz with up to 8",
        ),
        (
            "mp3",
            None,
            96_000,
            2,
            "96000 Hz and 2 channels, which mp3 (MPEG_LAYER_III) cannot hold: it takes 8000, 11025",
        ),
        ("mp3", None, 44_100, 3, "cannot hold: it takes 8000"),
        ("ogg", None, 384_000, 1, "it takes up to 200000 Hz with up to 8 channels; pass another format"),
        ("ogg", "OPUS", 44_100, 2, "it takes 8000, 12000, 16000, 24000, 48000 Hz"),
    ],
)
def test_what_a_format_cannot_hold_is_refused_by_name(form, subtype, rate, channels, complaint):
    with pytest.raises(SeparatorError) as caught:
        choose_coding(replace(INFO, sample_rate=rate, channels=channels), form, subtype)
    assert complaint in str(caught.value)


def test_what_a_format_cannot_hold_is_refused_before_any_work(tmp_path, random_model, monkeypatch):
    separator = Separator.load(random_model)
    monkeypatch.setattr("separator.separate.analyse", lambda *a, **k: pytest.fail("the network was run"))
    soundfile.write(tmp_path / "a.wav", noise(3).T, 48_000)
    with pytest.raises(SeparatorError, match="mp3"):
        separator.separate_file(tmp_path / "a.wav", tmp_path / "out", format="mp3")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("rate", MP3_RATES)
def test_every_rate_that_mp3_claims_is_written(tmp_path, rate):
    with AudioWriter(tmp_path / "a.mp3", rate, (2, 9), Coding("mp3", "MPEG_LAYER_III")) as writer:
        writer.write(noise(2, 9))
        writer.finish()
        writer.publish(tmp_path / "a.mp3")
    assert soundfile.info(tmp_path / "a.mp3").samplerate == rate


def test_lossy_formats_say_so(tmp_path, random_model):
    soundfile.write(tmp_path / "a.wav", noise().T, 48_000)
    said: list[str] = []
    Separator.load(random_model).separate_file(
        tmp_path / "a.wav", tmp_path / "out", format="mp3", warn=said.append
    )
    assert len(said) == 1
    assert "mp3 is lossy, so the stems add up only about" in said[0]


def test_a_lossy_stem_that_would_clip_is_scaled_with_the_others(tmp_path):
    names = StemNames(Path("mix.wav"), tmp_path, extension=".ogg")
    with StemSet(names, 1, INFO, Coding("ogg", "VORBIS")) as stems:
        stems.write(3 * noise(), 0.9 * 3 * noise()[None])
        assert stems.fitting_gain == pytest.approx(1 / (0.9 * 1.5), rel=1e-3)


def test_rf64_takes_over_where_a_wav_header_cannot_count(tmp_path, monkeypatch):
    coding = Coding("wav", "PCM_16")
    assert wav_container((2, 2**30 - 2**20), coding) == "WAV"
    assert wav_container((2, 2**30), coding) == "RF64"
    assert wav_container((1, 2**29), Coding("wav", "DOUBLE")) == "RF64"
    monkeypatch.setattr("separator.writing.MAX_WAV_BYTES", 1000)
    write_audio(tmp_path / "a.wav", noise(), 48_000, subtype="PCM_16")
    assert (tmp_path / "a.wav").read_bytes()[:4] == b"RF64"
    np.testing.assert_allclose(soundfile.read(tmp_path / "a.wav")[0].T, noise(), atol=2**-15)


def test_a_header_that_states_too_little_does_not_keep_rf64_from_taking_over(
    tmp_path, random_model, monkeypatch
):
    """The container is chosen by the samples that were heard, not by those a header states."""
    soundfile.write(tmp_path / "a.mp3", noise(1, 30_000).T, 48_000, format="MP3")
    monkeypatch.setattr("separator.writing.MAX_WAV_BYTES", 4 * 20_000)
    separator = Separator.load(random_model)
    monkeypatch.setattr(
        "separator.separate.inspect_audio", lambda path, **k: AudioInfo(path, 48_000, 1, 5, "MP3", "X")
    )
    separator.separate_file(tmp_path / "a.mp3", tmp_path / "out")
    assert (tmp_path / "out/a/residual.wav").read_bytes()[:4] == b"RF64"


@pytest.mark.parametrize(("form", "subtype"), ALL)
def test_a_disk_that_is_full_at_any_byte_leaves_no_stem(tmp_path, form, subtype):
    coding = Coding(form, subtype)
    write_stems(tmp_path / "whole", coding, noise())
    size = (tmp_path / "whole" / "mix" / f"residual.{form}").stat().st_size
    for limit in (0, 10, 50, size // 3, size * 4 // 5, size - 300, size - 1):
        with (
            file_size_limit(limit),
            pytest.raises(SeparatorError, match=r"cannot be written \(File too large\)"),
        ):
            write_stems(tmp_path / "out", coding, noise())
        assert not (tmp_path / "out").exists()


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, random_model):
    """On a file system of its own, where that can be made; a limit on file sizes stands for it elsewhere."""
    disk = tmp_path / "disk"
    disk.mkdir()
    soundfile.write(tmp_path / "a.wav", noise(2, 200_000).T, 48_000)
    separator = Separator.load(random_model)
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(disk)]
    mounted = os.geteuid() == 0 and subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        with (
            file_size_limit(1 << 20 if not mounted else resource.RLIM_INFINITY),
            pytest.raises(SeparatorError, match=r"No space left on device|File too large"),
        ):
            separator.separate_file(tmp_path / "a.wav", disk / "out")
        assert [path for path in disk.rglob("*") if path.is_file()] == []
    finally:
        if mounted:
            subprocess.run(["umount", str(disk)], check=True)


def test_masks_that_find_no_room_are_one_line(tmp_path, random_model, monkeypatch):
    monkeypatch.setattr("separator.rendering.SPOOL_BYTES", 1000)
    soundfile.write(tmp_path / "a.wav", noise(2, 200_000).T, 48_000)
    separator = Separator.load(random_model)
    with file_size_limit(10_000), pytest.raises(SeparatorError, match=r"masks cannot be kept in .*too large"):
        separator.separate_file(tmp_path / "a.wav", tmp_path / "out")


SLOW = """
import signal, sys, time
from pathlib import Path
import numpy as np
signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start background jobs without it
from separator.audio import AudioInfo
from separator.formats import Coding
from separator.naming import StemNames
from separator.stems import StemSet
folder, value, pause = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
info = AudioInfo(Path("mix.wav"), 48_000, 2, 20_000, "WAV", "FLOAT")
with StemSet(StemNames(Path("mix.wav"), folder), 5, info, Coding("wav", "FLOAT")) as stems:
    for _ in range(20):
        stems.write(np.full((2, 1000), value), np.full((5, 2, 1000), value))
        print("block", flush=True)
        time.sleep(pause)
    stems.publish()
"""


def start(folder: Path, value: float = 0.1, pause: float = 0.05) -> subprocess.Popen:
    command = [sys.executable, "-c", SLOW, str(folder), str(value), str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("kill", "leaves"),
    [(signal.SIGINT, lambda path: False), (signal.SIGKILL, lambda path: path.suffix == ".part")],
)
def test_a_run_that_is_ended_midway_leaves_no_file_that_looks_whole(
    tmp_path, kill, leaves: Callable[[Path], bool]
):
    process = start(tmp_path / "out")
    assert process.stdout is not None
    for _ in range(3):
        process.stdout.readline()
    process.send_signal(kill)
    process.communicate()
    assert process.returncode != 0
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert all(leaves(path) and path.name.startswith(".") for path in files)
    assert len(files) == 6 * (kill == signal.SIGKILL)
    process = start(tmp_path / "out", pause=0)  # which takes away what is left
    assert process.wait() == 0
    assert {path.stem.rstrip("12345") for path in tmp_path.rglob("*.*")} == {"source", "residual"}


def test_only_what_a_dead_run_has_left_is_removed(tmp_path):
    left = [tmp_path / TEMPORARY.format("123-abcd"), tmp_path / TEMPORARY.format("x")]
    others = [tmp_path / ".separate-notes.txt", tmp_path / "take.part"]
    for path in [*left, *others]:
        path.write_bytes(b"")
    with AudioWriter(tmp_path / "a.wav", 8000, (1, 10), Coding("wav", "FLOAT")) as writer:
        writer.write(np.zeros((1, 10)))
        remove_unfinished(tmp_path)
        assert not any(path.exists() for path in left)
        assert all(path.exists() for path in others)
        writer.finish()
        remove_unfinished(tmp_path)  # complete, but still without its name
        writer.publish(tmp_path / "a.wav")
    assert sorted(tmp_path.iterdir()) == sorted([*others, tmp_path / "a.wav"])


def test_a_file_that_is_taken_away_before_it_is_locked_is_created_again(tmp_path, monkeypatch):
    lock = writing.fcntl.flock

    def come_between(handle: int, how: int) -> None:
        monkeypatch.setattr(writing.fcntl, "flock", lock)
        remove_unfinished(tmp_path)
        lock(handle, how)

    monkeypatch.setattr(writing.fcntl, "flock", come_between)
    with AudioWriter(tmp_path / "a.wav", 8000, (1, 10), Coding("wav", "FLOAT")) as writer:
        writer.write(np.zeros((1, 10)))
        writer.finish()
        writer.publish(tmp_path / "a.wav")
    assert [path.name for path in tmp_path.iterdir()] == ["a.wav"]


def test_a_file_system_without_locks_keeps_its_files(tmp_path, monkeypatch):
    def refuse(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(writing.fcntl, "flock", refuse)
    left = tmp_path / TEMPORARY.format("123-abcd")
    left.write_bytes(b"")
    remove_unfinished(tmp_path)
    write_audio(tmp_path / "a.wav", np.zeros((1, 10), np.float32), 8000)
    assert sorted(tmp_path.iterdir()) == sorted([left, tmp_path / "a.wav"])


def test_two_runs_that_write_to_one_new_folder_never_mix(tmp_path):
    for attempt in range(3):
        folder = tmp_path / str(attempt)
        runs = [start(folder, value, 0.001) for value in (0.1, 0.2)]
        errors = [run.communicate()[1] for run in runs]
        assert sorted(run.returncode for run in runs) == [0, 1]
        loser = next(error for run, error in zip(runs, errors, strict=True) if run.returncode)
        assert "from another run meanwhile" in loser
        values = {soundfile.read(path)[0][0, 0] for path in (folder / "mix").glob("source*.wav")}
        assert len(values) == 1
        assert sorted(path.name for path in (folder / "mix").iterdir()) == [
            "residual.wav",
            *(f"source{k}.wav" for k in range(1, 6)),
        ]


def test_a_set_that_cannot_be_published_as_a_whole_is_not_published_at_all(tmp_path, monkeypatch):
    publish = AudioWriter.publish

    def fail_at_the_residual(self: AudioWriter, path: Path):
        if path.name == "residual.wav":
            raise KeyboardInterrupt
        return publish(self, path)

    monkeypatch.setattr(AudioWriter, "publish", fail_at_the_residual)
    with pytest.raises(KeyboardInterrupt):
        write_stems(tmp_path / "out", Coding("wav", "PCM_16"), noise())
    assert not (tmp_path / "out").exists()


def test_temporary_names_are_short_where_the_names_of_stems_are_not(tmp_path):
    long = "x" * 240
    with AudioWriter(tmp_path / f"{long}.wav", 8000, (1, 10), Coding("wav", "PCM_16")) as writer:
        writer.write(np.zeros((1, 10)))
        writer.finish()
        writer.publish(tmp_path / f"{long}.wav")
    assert [path.name for path in tmp_path.iterdir()] == [f"{long}.wav"]


@pytest.mark.parametrize(("form", "subtype"), [("flac", "PCM_16"), ("mp3", "MPEG_LAYER_III")])
def test_the_same_stems_have_the_same_bytes_in_other_formats_too(tmp_path, form, subtype):
    for name in ("first", "second"):
        write_stems(tmp_path / name, Coding(form, subtype), noise())
        time.sleep(1.1 if name == "first" else 0)
    first, second = (
        (tmp_path / name / "mix" / f"source1.{form}").read_bytes() for name in ("first", "second")
    )
    assert first == second


@pytest.mark.parametrize(
    ("coding", "shape"),
    [
        (Coding("wav", "PCM_U8"), (2, 1)),
        (Coding("wav", "DOUBLE"), (9, 100)),
        (Coding("flac", "PCM_24"), (2, 100)),
        (Coding("mp3", "MPEG_LAYER_III"), (1, 1)),
        (Coding("ogg", "VORBIS"), (2, 100)),
        (Coding("ogg", "OPUS"), (1, 100)),
    ],
)
def test_what_is_written_is_known_as_sound(tmp_path, coding, shape):
    path = tmp_path / f"a{coding.extension}"
    with AudioWriter(path, 16_000, shape, coding) as writer:
        writer.write(np.zeros(shape))
        writer.finish()
        writer.publish(path)
    assert holds_sound(path)
    for extension in FORMATS:
        other = tmp_path / f"b.{extension}"
        other.write_bytes(path.read_bytes())
        assert holds_sound(other) == (other.suffix == path.suffix)


@pytest.mark.parametrize("extension", FORMATS)
def test_what_is_no_sound_is_known_as_such(tmp_path, extension):
    path = tmp_path / f"a.{extension}"
    assert not holds_sound(path)
    rng = np.random.default_rng(0)
    for content in (b"", b"plain words, no sound\n" * 20, bytes(5000), b"RIFF\0\0\0\0WAVE", rng.bytes(5000)):
        path.write_bytes(content)
        assert not holds_sound(path)
    path.unlink()
    path.mkdir()
    assert not holds_sound(path)
