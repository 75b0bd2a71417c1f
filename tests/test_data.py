"""The soundscapes data: rules of the committed manifest, and the preparation on packages made here."""

import csv
import gzip
import importlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import wave
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import soundfile

from separator.errors import SeparatorError
from separator.fuss import read_fuss_examples

DATA = Path(__file__).resolve().parents[1] / "data"
SOUNDSCAPES = DATA / "soundscapes"
MODULES = ("prepare", "families", "splits", "unpack", "mixtures", "samples", "audit")
SPLITS = {"train", "validation", "evaluation"}

needs_dpkg = pytest.mark.skipif(
    shutil.which("dpkg-deb") is None, reason="dpkg-deb builds and reads the packages"
)


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, Any]]:
    """The modules of data/soundscapes, imported as the script imports them: from its own folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SOUNDSCAPES)
        modules: dict[str, ModuleType] = {name: importlib.import_module(name) for name in MODULES}
        yield modules
    for name in MODULES:
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def manifest() -> list[dict[str, str]]:
    with gzip.open(SOUNDSCAPES / "manifest.csv.gz", "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def used(manifest: list[dict[str, str]]) -> list[dict[str, str]]:
    return [clip for clip in manifest if clip["split"] != "unused"]


# ---- the committed manifest


def test_no_family_is_in_two_splits(used: list[dict[str, str]]) -> None:
    splits = defaultdict(set)
    for clip in used:
        splits[clip["family"]].add(clip["split"])
    assert [family for family, found in splits.items() if len(found) > 1] == []


def test_no_file_is_in_two_splits(used: list[dict[str, str]]) -> None:
    splits = defaultdict(set)
    for clip in used:
        if clip["sha256"]:
            splits[clip["sha256"]].add(clip["split"])
    assert [sha256 for sha256, found in splits.items() if len(found) > 1] == []


def test_every_class_is_in_every_split(used: list[dict[str, str]]) -> None:
    splits = defaultdict(set)
    for clip in used:
        splits[clip["rough_class"]].add(clip["split"])
    assert len(splits) == 10
    assert all(found == SPLITS for found in splits.values())


def test_held_out_packages_are_never_trained_on(used: list[dict[str, str]]) -> None:
    heldout = {clip["package"]: clip["split"] for clip in used if clip["package_heldout"] == "yes"}
    assert len(heldout) == 6
    assert set(heldout.values()) == {"evaluation"}


def test_scored_clips_have_the_full_band(used: list[dict[str, str]]) -> None:
    assert min(int(clip["bandwidth_hz"]) for clip in used if clip["split"] != "train") >= 7000


def test_evaluation_has_twenty_families_of_long_backgrounds(
    scripts: dict[str, Any], used: list[dict[str, str]]
) -> None:
    families = {
        clip["family"]
        for clip in used
        if clip["split"] == "evaluation"
        and clip["rough_class"] in scripts["mixtures"].BACKGROUND_CLASSES
        and float(clip["seconds"]) >= 9.5
    }
    assert len(families) >= 20


def test_long_speech_is_capped(used: list[dict[str, str]]) -> None:
    minutes = defaultdict(float)
    for clip in used:
        if clip["rough_class"] == "speech":
            minutes[clip["package"]] += float(clip["seconds"]) / 60
    assert minutes["tuxpaint-stamps-default"] <= 60
    assert minutes["festvox-ru"] <= 40


def test_every_clip_names_its_licence_and_every_package_its_version_and_sha256(
    manifest: list[dict[str, str]],
) -> None:
    with (SOUNDSCAPES / "packages.tsv").open(encoding="utf-8", newline="") as file:
        packages = {row["package"]: row for row in csv.DictReader(file, delimiter="\t")}
    for clip in manifest:
        assert clip["licence"] in packages[clip["package"]]["licences"].split("; "), clip["path"]
    for row in packages.values():
        assert row["version"] and len(row["deb_sha256"]) == 64 and int(row["deb_bytes"]) > 0


def test_manifest_is_small_enough_to_commit() -> None:
    assert (SOUNDSCAPES / "manifest.csv.gz").stat().st_size < 4e6


def test_manifest_is_what_its_rules_give(scripts: dict[str, Any], manifest: list[dict[str, str]]) -> None:
    raw = [scripts["families"].family_of(clip) for clip in manifest]
    families = scripts["families"].link_families(manifest, raw)
    assert families == [clip["family"] for clip in manifest]
    assert scripts["splits"].assign_splits(manifest, families) == [clip["split"] for clip in manifest]


# ---- families and splits


@pytest.mark.parametrize(
    ("package", "first", "second"),
    [
        ("0ad-data", "public.zip!audio/actor/fs_gravel4.ogg", "public.zip!audio/actor/fs_gravel5.ogg"),
        (
            "0ad-data",
            "z!audio/voice/greek/civ/civ_male_hunt_1.ogg",
            "z!audio/voice/greek/civ/civ_male_yes_2.ogg",
        ),
        ("fluid-soundfont-gm", "f.sf2!shdr[1] Violin G#4(L)", "f.sf2!shdr[2] Violin D7(L)"),
        ("freedoom", "doom/freedoom1.wad!dsbgact.wav", "doom/freedoom2.wad!dsbgdth1.wav"),
        (
            "scorched3d-data",
            "globalmods/none/data/wav/misc/dog2.wav",
            "globalmods/apoc/data/wav/misc/dog1.wav",
        ),
        (
            "megaglest-data",
            "magic/units/summoner/sounds/summoner_select5.wav",
            "commondata/sounds/summoner_die1.wav",
        ),
        ("tuxpaint-stamps-default", "food/apple_desc_es.ogg", "animals/cow_desc_es.ogg"),
        (
            "avldrums.lv2-soundfont",
            "Black_Pearl.sf2!shdr[4] 36-Pearl22Kick-1",
            "Red.sf2!shdr[5] 36-Ludwig26Kick-3",
        ),
        ("wesnoth-1.16-data", "core/sounds/dwarf-hit-2.ogg", "core/sounds/dwarf-die-1.ogg"),
    ],
)
def test_takes_of_one_session_are_one_family(
    scripts: dict[str, Any], package: str, first: str, second: str
) -> None:
    rough_class = "speech" if "desc" in first or "voice" in first else "animals"
    clips = [{"package": package, "path": path, "rough_class": rough_class} for path in (first, second)]
    assert scripts["families"].family_of(clips[0]) == scripts["families"].family_of(clips[1])


def test_two_packages_with_one_drum_kit_are_one_family(scripts: dict[str, Any]) -> None:
    kit = {"package": "hydrogen-drumkits", "path": "drumkits/The Black Pearl 1.0/PearlKick-Hard.wav"}
    soundfont = {"package": "avldrums.lv2-soundfont", "path": "B.sf2!shdr[0] 36-Pearl22Kick-1"}
    assert scripts["families"].family_of(kit) == scripts["families"].family_of(soundfont)


def clip_row(package: str, path: str, seconds: str, sha256: str = "") -> dict[str, str]:
    return {
        "package": package,
        "path": path,
        "seconds": seconds,
        "sha256": sha256,
        "rough_class": "animals",
        "isolated": "yes",
        "bandwidth_hz": "8000",
    }


def test_identical_files_equal_names_and_equal_lengths_link_families(scripts: dict[str, Any]) -> None:
    clips = [
        clip_row("a", "x/howl.wav", "2.345", "same"),
        clip_row("b", "y/wolf.wav", "9.999", "same"),  # the file of the first
        clip_row("c", "z/howl2.wav", "2.345", "other"),  # name and length of the first
        clip_row("b", "y/deep.wav", "9.999", "third"),  # length of the second, in its package
        clip_row("d", "y/calm.wav", "9.999", "fourth"),  # equal length in another package means nothing
    ]
    families = scripts["families"].link_families(clips, ["1", "2", "3", "4", "5"])
    assert families == ["1", "1", "1", "1", "5"]


def test_whole_families_are_dealt_and_a_dominant_one_trains(scripts: dict[str, Any]) -> None:
    clips = [clip_row("p", f"x/{k}.wav", "1.0") for k in range(100)]
    clips += [clip_row("p", f"big/{k}.wav", "1.0") for k in range(50)]
    families = [f"f{k // 2}" for k in range(100)] + ["big"] * 50
    splits = scripts["splits"].assign_splits(clips, families)
    assert splits[0::2][:50] == splits[1::2][:50]
    assert set(splits[100:]) == {"train"}
    assert splits.count("evaluation") == 20  # 12 % of 150 s, but 10 families at least
    assert splits.count("validation") == 12


def test_unfit_clips_of_a_scored_family_are_unused_not_trained_on(scripts: dict[str, Any]) -> None:
    clips = [clip_row("flare-game", f"x/{k}.wav", "1.0") for k in range(3)]
    clips[1]["bandwidth_hz"] = "4000"
    clips[2]["isolated"] = "unsure"
    assert scripts["splits"].assign_splits(clips, ["a", "a", "a"]) == ["evaluation", "unused", "unused"]


# ---- containers


def wave_bytes(samples: np.ndarray, rate: int) -> bytes:
    buffer = io.BytesIO()
    soundfile.write(buffer, samples.T, rate, format="WAV", subtype="PCM_16")
    return buffer.getvalue()


def ocg_bytes(entries: dict[str, Any]) -> bytes:
    """A C4Group, not yet compressed: nested dicts are groups."""
    contents = {
        name: ocg_bytes(value) if isinstance(value, dict) else value for name, value in entries.items()
    }
    header = bytearray(b"RedWolf Design GrpFolder".ljust(28, b"\0") + struct.pack("<iii", 1, 2, len(entries)))
    header = header.ljust(204, b"\0")
    for i in range(0, 202, 3):
        header[i], header[i + 2] = header[i + 2], header[i]
    table, body = b"", b""
    for name, content in contents.items():
        numbers = (0, int(isinstance(entries[name], dict)), len(content), 0, len(body))
        table += struct.pack("<260s5i", name.encode(), *numbers).ljust(316, b"\0")
        body += content
    return bytes(byte ^ 237 for byte in header) + table + body


def test_a_member_of_a_nested_clonk_group_comes_back(scripts: dict[str, Any]) -> None:
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(ocg_bytes({"A.ocg": {"x.wav": b"deep"}, "y.wav": b"flat"})) + packer.flush()
    file = io.BytesIO(b"\x1e\x8c" + packed[2:])
    found = scripts["unpack"].ocg_members(file, ["A.ocg/x.wav", "y.wav", "absent.wav"])
    assert found == {"A.ocg/x.wav": b"deep", "y.wav": b"flat"}


def test_a_doom_sound_comes_back_without_its_padding(scripts: dict[str, Any]) -> None:
    samples = bytes(range(100, 200))
    lump = struct.pack("<HHI", 3, 11025, 132) + b"\x80" * 16 + samples + b"\x80" * 16
    data = (
        struct.pack("<4sii", b"IWAD", 1, 12 + len(lump))
        + lump
        + struct.pack("<ii8s", 12, len(lump), b"DSPAIN")
    )
    (content,) = scripts["unpack"].wad_members(io.BytesIO(data), ["dspain.wav"]).values()
    with wave.open(io.BytesIO(content)) as file:
        assert (file.getframerate(), file.getsampwidth()) == (11025, 1)
        assert file.readframes(1000) == samples


def test_a_soundfont_sample_is_found_by_index_and_name(scripts: dict[str, Any]) -> None:
    samples = np.arange(1000, dtype="<i2")
    header = struct.Struct("<20sIIIIIBbHH")
    headers = header.pack(b"First", 0, 100, 0, 0, 8000, 60, 0, 0, 1)
    headers += header.pack(b"Second(L)", 150, 400, 0, 0, 22050, 60, 0, 0, 4)

    def chunk(name: bytes, content: bytes) -> bytes:
        return struct.pack("<4sI", name, len(content)) + content

    sdta = chunk(b"LIST", b"sdta" + chunk(b"smpl", samples.tobytes()))
    pdta = chunk(b"LIST", b"pdta" + chunk(b"shdr", headers))
    file = io.BytesIO(chunk(b"RIFF", b"sfbk" + sdta + pdta))
    found = scripts["unpack"].soundfont_samples(
        file, ["shdr[1] Second(L)", "shdr[0] Wrong name", "shdr[7] None"]
    )
    ((name, (taken, rate)),) = found.items()
    assert (name, rate) == ("shdr[1] Second(L)", 22050)
    assert taken.tolist() == list(range(150, 400))


def test_g722_is_decoded_at_16_khz(scripts: dict[str, Any]) -> None:
    av = pytest.importorskip("av")
    tone = (8000 * np.sin(2 * np.pi * 500 * np.arange(16000) / 16000)).astype(np.int16)
    encoder = av.CodecContext.create("g722", "w")
    encoder.sample_rate, encoder.layout, encoder.format = 16000, "mono", "s16"
    frame = av.AudioFrame.from_ndarray(tone[None], format="s16", layout="mono")
    frame.sample_rate = 16000
    content = b"".join(bytes(packet) for packet in [*encoder.encode(frame), *encoder.encode(None)])
    recording = scripts["unpack"].decode("a.g722", content)
    assert recording.sample_rate == 16000
    spectrum = np.abs(np.fft.rfft(recording.waveform[0][:16000]))
    assert int(spectrum.argmax()) == 500


# ---- the bank


def tone(frequency_hz: float, seconds: float, rate: int) -> np.ndarray:
    return np.sin(2 * np.pi * frequency_hz * np.arange(round(seconds * rate)) / rate)


def build_deb(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    tree = folder / name
    for path, content in files.items():
        (tree / path).parent.mkdir(parents=True, exist_ok=True)
        (tree / path).write_bytes(content)
    (tree / "DEBIAN").mkdir(parents=True)
    fields = {"Package": name, "Version": "1", "Architecture": "all", "Maintainer": "n <n@example.org>"}
    fields["Description"] = "made by a test"
    control = "".join(f"{key}: {value}\n" for key, value in fields.items())
    (tree / "DEBIAN" / "control").write_text(control)
    package = folder / f"{name}_1_all.deb"
    command = ["dpkg-deb", "--root-owner-group", "--build", str(tree), str(package)]
    subprocess.run(command, check=True, capture_output=True)
    return package


class World:
    """Two packages, their manifest and package list, as prepare.py reads them."""

    def __init__(self, folder: Path, scripts: dict[str, Any]) -> None:
        self.folder, self.scripts = folder, scripts
        silence = np.zeros(8000)
        padded = np.concatenate([silence, 0.1 * tone(1000, 0.5, 16000), silence]) + 0.05
        stereo = np.stack([0.5 * tone(440, 1, 44100), np.zeros(44100)])
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as packed:
            packed.writestr("in/side.wav", wave_bytes(0.2 * tone(250, 0.3, 8000)[None], 8000))
        self.files = {
            "alpha": {
                "share/stereo.wav": wave_bytes(stereo, 44100),
                "share/short.wav": wave_bytes(0.5 * tone(440, 0.05, 16000)[None], 16000),
                "share/broken.wav": b"no sound in here",
            },
            "beta": {
                "share/padded.wav": wave_bytes(padded[None], 16000),
                "share/sounds.pk3": archive.getvalue(),
            },
        }
        self.manifest_path, self.packages_path = folder / "manifest.csv.gz", folder / "packages.tsv"
        self.packages = folder / "debs"
        self.packages.mkdir()
        lines = ["package\tversion\tdeb_bytes\tdeb_sha256\tlicences"]
        for name, files in self.files.items():
            deb = build_deb(folder, name, files).rename(self.packages / f"{name}_1_all.deb")
            sha256 = scripts["unpack"].file_sha256(deb)
            lines.append(f"{name}\t1\t{deb.stat().st_size}\t{sha256}\tCC0")
        self.packages_path.write_text("\n".join(lines) + "\n")
        self.rows = [
            self.row("alpha", "share/stereo.wav", "train"),
            self.row("alpha", "share/short.wav", "train"),
            self.row("alpha", "share/broken.wav", "train"),
            self.row("beta", "share/padded.wav", "evaluation"),
            self.row("beta", "share/sounds.pk3!in/side.wav", "validation"),
        ]
        self.write_manifest()

    def row(self, package: str, path: str, split: str) -> dict[str, str]:
        name, _, member = path.partition("!")
        content = self.files[package][name]
        if member:
            content = zipfile.ZipFile(io.BytesIO(content)).read(member)
        sha256 = self.scripts["unpack"].decode(path, content).sha256
        row = dict.fromkeys(self.scripts["prepare"].MANIFEST_COLUMNS, "x")
        return row | {"package": package, "path": path, "split": split, "sha256": sha256, "seconds": "1"}

    def write_manifest(self) -> None:
        with gzip.open(self.manifest_path, "wt", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.scripts["prepare"].MANIFEST_COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)

    def run(self, output: str = "bank") -> int:
        options = ["--packages", self.packages, "--output", self.folder / output]
        options += ["--manifest", self.manifest_path, "--package-list", self.packages_path]
        return int(self.scripts["prepare"].main(["bank", *map(str, options)]))

    def bank(self, output: str = "bank") -> dict[str, np.ndarray]:
        folder = self.folder / output
        audio = np.fromfile(folder / "audio.i16", "<i2")
        with (folder / "clips.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert sum(int(row["length"]) for row in rows) == audio.size
        return {row["path"]: audio[int(row["start"]) :][: int(row["length"])] for row in rows}


@pytest.fixture
def world(tmp_path: Path, scripts: dict[str, Any]) -> World:
    return World(tmp_path, scripts)


@needs_dpkg
def test_a_bank_is_built_from_packages(world: World) -> None:
    assert world.run() == 0
    bank = world.bank()
    assert set(bank) == {"share/stereo.wav", "share/padded.wav", "share/sounds.pk3!in/side.wav"}
    for samples in bank.values():
        assert (
            abs(int(samples.max()) - 10 ** (-1 / 20) * 32767) < 400
        )  # -1 dBFS; a sine has no sample at its top
    stereo = bank["share/stereo.wav"].astype(float)
    assert abs(stereo.size - 16000) < 20
    assert abs(int(np.abs(np.fft.rfft(stereo, 16000)).argmax()) - 440) <= 1
    inside = bank["share/sounds.pk3!in/side.wav"].astype(float)
    assert abs(int(np.abs(np.fft.rfft(inside, 16000)).argmax()) - 250) <= 2


@needs_dpkg
def test_silence_around_a_clip_is_cut_and_its_offset_removed(world: World) -> None:
    world.run()
    padded = world.bank()["share/padded.wav"].astype(float)
    assert abs(padded.size - 8000) < 10  # half a second of 1.5
    assert abs(padded.mean()) < 30


@needs_dpkg
def test_what_is_dropped_is_reported_with_its_reason(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    world.run()
    dropped = json.loads((world.folder / "bank" / "bank.json").read_text())["dropped"]
    assert dropped["alpha: share/short.wav"] == "is shorter than 0.1 s"
    assert dropped["alpha: share/broken.wav"].startswith("cannot be decoded: ")
    assert "2 dropped" in capsys.readouterr().err


@needs_dpkg
def test_a_clip_that_the_package_lacks_is_reported(world: World) -> None:
    world.rows.append(world.rows[0] | {"path": "share/gone.wav"})
    world.write_manifest()
    assert world.run() == 0
    dropped = json.loads((world.folder / "bank" / "bank.json").read_text())["dropped"]
    assert dropped["alpha: share/gone.wav"] == "is not in the package"


@needs_dpkg
def test_a_killed_run_leaves_no_bank_and_continues_to_the_same_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.run("whole")
    prepare = world.scripts["prepare"]
    read, read_packages = prepare.read_package, []

    def read_until_killed(package: Path, paths: list[str]) -> Iterator[Any]:
        for recording in read(package, paths):
            yield recording
            if package.name.startswith("beta"):
                raise KeyboardInterrupt

    def read_and_note(package: Path, paths: list[str]) -> Iterator[Any]:
        read_packages.append(package.name)
        return read(package, paths)

    monkeypatch.setattr(prepare, "read_package", read_until_killed)
    assert world.run() == 130
    assert not (world.folder / "bank" / "clips.csv").exists()
    monkeypatch.setattr(prepare, "read_package", read_and_note)
    assert world.run() == 0
    assert read_packages == ["beta_1_all.deb"]
    for name in ("audio.i16", "clips.csv", "bank.json"):
        assert (world.folder / "bank" / name).read_bytes() == (world.folder / "whole" / name).read_bytes()


@needs_dpkg
def test_another_split_needs_no_decoding(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.run()
    world.rows[3]["split"], world.rows[4]["split"] = "unused", "train"
    world.write_manifest()
    monkeypatch.setattr(world.scripts["prepare"], "read_package", None)
    assert world.run() == 0
    assert set(world.bank()) == {"share/stereo.wav", "share/sounds.pk3!in/side.wav"}


@needs_dpkg
@pytest.mark.parametrize("what", ["package", "clip"])
def test_another_sha256_stops_with_one_line(
    world: World, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "package":
        with (world.packages / "alpha_1_all.deb").open("ab") as file:
            file.write(b"!")
    else:
        world.rows[0]["sha256"] = "0" * 64
        world.write_manifest()
    assert world.run() == 1
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("prepare.py: error: ")
    ]
    assert "SHA-256" in line and "packages.tsv" in line
    assert not (world.folder / "bank" / "clips.csv").exists()


def fake_apt(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An apt-get that runs `script`; `$2` is the package."""
    (folder / "bin").mkdir()
    (folder / "bin" / "apt-get").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}")


@needs_dpkg
def test_missing_packages_are_downloaded_with_apt(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = world.packages.rename(world.folder / "archive")
    fake_apt(world.folder, f'cp "{archive}/$2_1_all.deb" .', monkeypatch)
    assert world.run() == 0
    assert sorted(path.name for path in world.packages.iterdir()) == ["alpha_1_all.deb", "beta_1_all.deb"]


@needs_dpkg
def test_a_package_that_apt_cannot_fetch_names_the_remedy(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.packages / "alpha_1_all.deb").unlink()
    fake_apt(world.folder, 'echo "E: Unable to locate package $2" >&2; exit 100', monkeypatch)
    assert world.run() == 1
    (line,) = [
        line for line in capsys.readouterr().err.splitlines() if line.startswith("prepare.py: error: ")
    ]
    assert "Unable to locate package alpha" in line and "apt-get update" in line and "--packages" in line


# ---- mixtures


def write_bank(folder: Path, splits: tuple[str, ...] = ("evaluation", "validation")) -> None:
    """Noise clips: per split 4 backgrounds and 4 classes of short foregrounds, some in held-out packages."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    rows: list[dict[str, object]] = []
    start = 0
    with (folder / "audio.i16").open("wb") as audio:
        for split in splits:
            for k in range(24):
                rough_class = ("ambience_background", "animals", "percussion", "speech")[k % 4]
                if k % 4 == 3 and k > 12:
                    rough_class = "household_ui"
                length = 176_000 if rough_class == "ambience_background" else 4000 * (1 + k % 5)
                audio.write((generator.standard_normal(length) * 5000).astype("<i2").tobytes())
                row = {"clip": len(rows), "start": start, "length": length, "package": f"p{k % 3}"}
                row |= {"path": f"{split}{k}", "family": f"{split}{k}", "rough_class": rough_class}
                row |= {"licence": "CC0", "tier": 1, "isolated": "yes", "bandwidth_hz": 8000, "split": split}
                rows.append(row | {"package_heldout": "yes" if k % 3 else "no"})
                start += length
    with (folder / "clips.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


@pytest.fixture
def mixture_folder(tmp_path: Path, scripts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(scripts["mixtures"], "MIXTURES_PER_COUNT", {"evaluation": 6, "validation": 2})
    write_bank(tmp_path / "bank")
    scripts["mixtures"].write_mixtures(tmp_path / "bank", tmp_path / "mixtures", progress=lambda line: None)
    return tmp_path / "mixtures"


def test_mixtures_read_as_fuss_and_are_the_sum_of_their_sources(mixture_folder: Path) -> None:
    for split, count in (("evaluation", 6), ("validation", 2)):
        examples = read_fuss_examples(mixture_folder, split)
        assert [len(example.sources) for example in examples] == [
            k for k in (1, 2, 3, 4) for _ in range(count)
        ]
        for example in examples:
            assert (example.mixture.shape[-1], example.sample_rate) == (160_000, 16_000)
            assert float((example.mixture - example.sources.sum(0)).abs().max()) == 0
            assert float(example.mixture.abs().max()) < 0.9
            assert float(example.mixture.square().mean().log10() * 10) < -17.9


def test_sources_of_a_mixture_differ_in_family_and_in_class_and_package(mixture_folder: Path) -> None:
    with (mixture_folder / "evaluation_examples.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 24
    for row in rows:
        count = int(row["n_sources"])
        assert len({row[f"family{k}"] for k in range(count)}) == count
        assert len({(row[f"rough_class{k}"], row[f"package{k}"]) for k in range(count)}) == count
        assert not row.get(f"family{count}")
        assert all(row[f"licence{k}"] for k in range(count))
    assert sum(row["package_heldout"] == "yes" for row in rows) == 8  # a third of each count


def test_foregrounds_are_at_the_levels_that_the_table_says(
    scripts: dict[str, Any], mixture_folder: Path
) -> None:
    active_rms = scripts["mixtures"].active_rms
    with (mixture_folder / "evaluation_examples.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["n_sources"]) > 1]
    for row in rows:
        stems = sorted((mixture_folder / row["mixture"].replace(".wav", "_sources")).glob("*.wav"))
        levels = [20 * np.log10(active_rms(soundfile.read(stem)[0])) for stem in stems]
        for k, level in enumerate(levels):
            assert abs(level - levels[0] - float(row[f"level_db{k}"])) < 0.1
            assert k == 0 or -5 <= float(row[f"level_db{k}"]) <= 25


def test_the_same_seed_gives_the_same_mixtures(scripts: dict[str, Any], mixture_folder: Path) -> None:
    again = mixture_folder.parent / "again"
    scripts["mixtures"].write_mixtures(mixture_folder.parent / "bank", again, progress=lambda line: None)
    files = sorted(path.relative_to(again) for path in again.rglob("*") if path.is_file())
    assert len(files) == 32 + 80 + 4
    for path in files:
        assert (again / path).read_bytes() == (mixture_folder / path).read_bytes()


def test_a_short_background_is_looped_without_a_gap(scripts: dict[str, Any]) -> None:
    noise = np.random.default_rng(1).standard_normal(70_000)
    filled = scripts["mixtures"]._fill(noise, np.random.default_rng(2))
    power = np.square(filled).reshape(-1, 1000).mean(1)
    assert filled.size == 160_000
    assert power.min() > 0.7 and power.max() < 1.4


def test_a_bank_without_material_names_the_remedy(tmp_path: Path, scripts: dict[str, Any]) -> None:
    with pytest.raises(SeparatorError, match=r"prepare\.py bank"):
        scripts["mixtures"].write_mixtures(tmp_path, tmp_path / "out", progress=print)
    write_bank(tmp_path / "bank", splits=("validation",))
    with pytest.raises(SeparatorError, match="evaluation has 0 backgrounds"):
        scripts["mixtures"].write_mixtures(tmp_path / "bank", tmp_path / "out", progress=print)


# ---- the audit


@pytest.mark.parametrize(
    ("original", "copy", "delay"),
    [(5, 29, 50), (8, 24, 30_000)],  # a short clip, trimmed a little later; a background, from the middle on
)
def test_the_audit_finds_a_planted_copy_and_nothing_else(
    tmp_path: Path, scripts: dict[str, Any], original: int, copy: int, delay: int
) -> None:
    write_bank(tmp_path / "bank", splits=("train", "evaluation"))
    with (tmp_path / "bank" / "clips.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    audio = np.fromfile(tmp_path / "bank" / "audio.i16", "<i2")
    start, place, length = int(rows[original]["start"]), int(rows[copy]["start"]), int(rows[copy]["length"])
    assert rows[original]["length"] == rows[copy]["length"]
    audio[place : place + length] = np.roll(audio[start : start + length], delay) // 2
    audio.tofile(tmp_path / "bank" / "audio.i16")
    (pair,) = scripts["audit"].find_siblings(tmp_path / "bank")
    assert (pair.scored["path"], pair.trained["path"]) == (rows[copy]["path"], rows[original]["path"])
    assert pair.correlation > 0.9


# ---- the sample recordings


@pytest.mark.parametrize(
    ("name", "n_sources", "seconds", "rate", "channels"),
    [
        ("single", 1, 5, 16000, 1),
        ("mix3", 3, 10, 16000, 1),
        ("mix4", 4, 10, 16000, 1),
        ("stereo", 2, 4, 44100, 2),
    ],
)
def test_a_sample_is_the_sum_of_its_sources(
    name: str, n_sources: int, seconds: int, rate: int, channels: int
) -> None:
    mixture, mixture_rate = soundfile.read(DATA / "samples" / f"{name}.wav", dtype="int16", always_2d=True)
    paths = sorted((DATA / "samples" / f"{name}_sources").iterdir())
    sources = [soundfile.read(path, dtype="int16", always_2d=True)[0].astype(int) for path in paths]
    assert (mixture_rate, mixture.shape, len(sources)) == (rate, (rate * seconds, channels), n_sources)
    assert np.array_equal(np.sum(sources, axis=0), mixture)
    assert soundfile.info(DATA / "samples" / f"{name}.wav").subtype == "PCM_16"


def test_samples_are_free_never_trained_on_and_named(
    scripts: dict[str, Any], used: list[dict[str, str]]
) -> None:
    clips = {clip["path"]: clip for clip in used}
    readme = (DATA / "samples" / "README.md").read_text()
    for path in scripts["samples"].sample_paths():
        assert clips[path]["package_heldout"] == "yes"
        assert clips[path]["licence"] in ("CC0", "CC0-1.0", "public-domain")
        assert path.rsplit("/", 1)[-1] in readme


def test_samples_are_under_3_mb() -> None:
    assert sum(path.stat().st_size for path in (DATA / "samples").rglob("*.[wf]*") if path.is_file()) < 3e6


def test_a_sample_that_may_not_be_passed_on_is_refused(tmp_path: Path, scripts: dict[str, Any]) -> None:
    rows = [
        {"path": path, "licence": "GPL-2", "split": "evaluation"}
        for path in scripts["samples"].sample_paths()
    ]
    with pytest.raises(SeparatorError, match="GPL-2"):
        scripts["samples"].write_samples([], rows, tmp_path)


def test_data_readme_says_where_the_classes_are() -> None:
    assert "separator/datasets.py" in (DATA / "README.md").read_text().splitlines()[0]
