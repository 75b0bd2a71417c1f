"""Prepares the soundscapes data: a training bank and evaluation mixtures from free packages of Debian 12.

    python data/soundscapes/prepare.py bank        packages -> bank/audio.i16, bank/clips.csv
    python data/soundscapes/prepare.py mixtures    bank -> mixtures/ in FUSS layout
    python data/soundscapes/prepare.py samples     packages -> ../samples
    python data/soundscapes/prepare.py audit       bank -> recordings on both sides of the split, as a table
    python data/soundscapes/prepare.py manifest --clips clips.csv    measured clips -> manifest.csv.gz

Packages and clips are checked against the SHA-256 in `packages.tsv` and `manifest.csv.gz`. A finished
package is kept as a shard, so a killed run goes on where it was. README.md beside this file says more.
"""

import argparse
import csv
import gzip
import io
import json
import os
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import torchaudio
from audit import find_siblings
from families import Clip, family_of, link_families
from mixtures import write_mixtures
from samples import sample_paths, write_samples
from splits import assign_splits, held_out
from unpack import Recording, file_sha256, read_package

from separator.errors import SeparatorError
from separator.script import Parser, counted, exit_status

HERE = Path(__file__).resolve().parent
SAMPLE_RATE = 16000
PEAK_DB = -1.0  # of every clip in the bank
TRIM_DB = -50.0  # leading and trailing parts below this, re the peak, are cut
MIN_SECONDS = 0.1
SILENT_PEAK = 1e-4  # -80 dBFS: a clip without sound
_SETTINGS = f"{SAMPLE_RATE} {PEAK_DB} {TRIM_DB} {MIN_SECONDS} {SILENT_PEAK}"
FULL_PATHS = {"0ad-data": "usr/share/games/0ad/mods/public/"}  # the measured list names this container alone
STEPS = ("bank", "mixtures", "samples", "audit", "manifest")
MANIFEST_COLUMNS = (
    "package",
    "path",
    "family",
    "rough_class",
    "licence",
    "tier",
    "isolated",
    "split",
    "package_heldout",
    "seconds",
    "bandwidth_hz",
    "sha256",
)
BANK_COLUMNS = (
    "clip",
    "start",
    "length",
    "package",
    "path",
    "family",
    "rough_class",
    "licence",
    "tier",
    "isolated",
    "bandwidth_hz",
    "split",
    "package_heldout",
)


def read_manifest(path: Path) -> list[Clip]:
    """The clips of the committed manifest."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_manifest(clips_csv: Path, path: Path) -> None:
    """Write the manifest: the measured clips with their family and split."""
    with clips_csv.open(encoding="utf-8", newline="") as file:
        clips = list(csv.DictReader(file))
    clips = [clip | {"path": FULL_PATHS.get(clip["package"], "") + clip["path"]} for clip in clips]
    families = link_families(clips, [family_of(clip) for clip in clips])
    splits = assign_splits(clips, families)
    text = io.StringIO()
    writer = csv.DictWriter(text, MANIFEST_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    for clip, family, split in zip(clips, families, splits, strict=True):
        heldout = held_out(clip["package"])
        writer.writerow(clip | {"family": family, "split": split, "package_heldout": heldout})
    with path.open("wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", filename="", mtime=0) as file:
        file.write(text.getvalue().encode())


def read_packages(path: Path) -> dict[str, dict[str, str]]:
    """Version, size, SHA-256 and licences of each package, by name."""
    with path.open(encoding="utf-8", newline="") as file:
        return {row["package"]: row for row in csv.DictReader(file, delimiter="\t")}


def fetch_package(name: str, sha256: str, directory: Path) -> Path:
    """The `.deb` of a package in `directory`, downloaded by apt if it is not there, checked by its SHA-256.

    Raises:
        SeparatorError: apt cannot fetch it, or the file is not the one the manifest describes.
    """
    found = sorted(directory.glob(f"{name}_*.deb"))
    if not found:
        directory.mkdir(parents=True, exist_ok=True)
        reason = _download(name, directory)
        found = sorted(directory.glob(f"{name}_*.deb"))
        if not found:
            raise SeparatorError(
                f"apt-get download {name} failed ({reason}); run `apt-get update` on Debian 12, "
                "or put the .deb files into a folder and pass it as --packages"
            )
    actual = file_sha256(found[-1])
    if actual != sha256:
        raise SeparatorError(
            f"{found[-1]} has SHA-256 {actual}, packages.tsv says {sha256}; delete the file to download it "
            "again, or get the version that packages.tsv names"
        )
    return found[-1]


def _download(name: str, directory: Path) -> str:
    """Fetch a package with apt; return the last line of its errors."""
    command = ["apt-get", "download", name]
    try:
        fetch = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "apt-get is not installed"
    return (fetch.stderr.strip().splitlines() or ["no reason given"])[-1]


def to_bank_clip(recording: Recording) -> np.ndarray | str:
    """Mono 16 kHz int16 without offset and surrounding silence, peak -1 dBFS; or why the clip is dropped."""
    if recording.waveform is None:
        return f"cannot be decoded: {recording.error}"
    waveform = recording.waveform.mean(axis=0, dtype=np.float32)
    if waveform.size == 0 or not np.isfinite(waveform).all():
        return "has no finite samples"
    if recording.sample_rate != SAMPLE_RATE:
        waveform = torchaudio.functional.resample(
            torch.from_numpy(waveform), recording.sample_rate, SAMPLE_RATE, lowpass_filter_width=24
        ).numpy()
    waveform = waveform - waveform.mean()
    peak = float(np.abs(waveform).max(initial=0.0))
    if peak < SILENT_PEAK:
        return "is silent"
    loud = np.flatnonzero(np.abs(waveform) > peak * 10 ** (TRIM_DB / 20))
    waveform = waveform[loud[0] : loud[-1] + 1]
    if waveform.size < MIN_SECONDS * SAMPLE_RATE:
        return f"is shorter than {MIN_SECONDS} s"
    samples: np.ndarray = np.round(waveform * (10 ** (PEAK_DB / 20) / peak * 32767)).astype("<i2")
    return samples


def build_bank(
    manifest: Sequence[Clip], packages: dict[str, dict[str, str]], *, package_dir: Path, output: Path
) -> dict[str, object]:
    """Write `output/audio.i16` and `output/clips.csv`; return the report that `output/bank.json` keeps."""
    by_package: dict[str, list[Clip]] = defaultdict(list)
    for clip in manifest:
        if clip["split"] != "unused":
            by_package[clip["package"]].append(clip)
    unknown = sorted(set(by_package) - set(packages))
    if unknown:
        raise SeparatorError(f"packages.tsv lacks {unknown} of the manifest; add version and SHA-256")
    shards = output / "shards"
    shards.mkdir(parents=True, exist_ok=True)
    total_bytes = sum(int(packages[name]["deb_bytes"]) for name in by_package)
    started, done_bytes = time.monotonic(), 0
    for number, (name, clips) in enumerate(sorted(by_package.items()), start=1):
        if not _shard_is_current(shards, name, clips):
            package = fetch_package(name, packages[name]["deb_sha256"], package_dir)
            _write_shard(shards, name, clips, package)
            done_bytes += int(packages[name]["deb_bytes"])
            elapsed = time.monotonic() - started
            left = elapsed * (total_bytes - done_bytes) / done_bytes
            _progress(
                f"[{number}/{len(by_package)}] {name}: {counted(len(clips), 'clip')}, about {left:.0f} s left"
            )
        else:
            total_bytes -= int(packages[name]["deb_bytes"])
            _progress(f"[{number}/{len(by_package)}] {name}: done before")
    return _merge(shards, by_package, output)


def _write_shard(shards: Path, name: str, clips: Sequence[Clip], package: Path) -> None:
    """Decode one package; the JSON file comes last and marks the shard as complete."""
    expected = {clip["path"]: clip["sha256"] for clip in clips}
    audio, marker = shards / f"{name}.i16", shards / f"{name}.json"
    marker.unlink(missing_ok=True)
    decoded: dict[str, dict[str, object]] = {}  # by path, in the order of the samples
    with audio.open("wb") as file:
        for recording in read_package(package, list(expected)):
            if expected[recording.path] not in ("", recording.sha256):
                raise SeparatorError(
                    f"{name}: {recording.path} has SHA-256 {recording.sha256}, the manifest says "
                    f"{expected[recording.path]}; get the version of the package that packages.tsv names"
                )
            samples = to_bank_clip(recording)
            reason = samples if isinstance(samples, str) else ""
            length = 0 if isinstance(samples, str) else file.write(samples.tobytes()) // 2
            sha256 = expected[recording.path]
            decoded[recording.path] = {"sha256": sha256, "length": length, "dropped": reason}
        file.flush()
        os.fsync(file.fileno())
    for path in expected.keys() - decoded.keys():
        decoded[path] = {"sha256": expected[path], "length": 0, "dropped": "is not in the package"}
    _replace_text(marker, json.dumps({"settings": _SETTINGS, "clips": decoded}, ensure_ascii=False))


def _shard_is_current(shards: Path, name: str, clips: Sequence[Clip]) -> bool:
    """Whether a shard holds at least these clips, made with these settings."""
    marker, audio = shards / f"{name}.json", shards / f"{name}.i16"
    if not marker.is_file() or not audio.is_file():
        return False
    content = json.loads(marker.read_text(encoding="utf-8"))
    decoded = content["clips"]
    complete = audio.stat().st_size == 2 * sum(entry["length"] for entry in decoded.values())
    known = all(decoded.get(clip["path"], {}).get("sha256") == clip["sha256"] for clip in clips)
    return bool(complete and known and content["settings"] == _SETTINGS)


def _merge(shards: Path, by_package: dict[str, list[Clip]], output: Path) -> dict[str, object]:
    """Join the shards. `clips.csv` goes first and comes back last: without it there is no bank."""
    (output / "clips.csv").unlink(missing_ok=True)
    rows: list[dict[str, object]] = []
    dropped: dict[str, str] = {}
    start = 0
    with (output / "audio.i16.part").open("wb") as audio:
        for name, clips in sorted(by_package.items()):
            decoded = json.loads((shards / f"{name}.json").read_text(encoding="utf-8"))["clips"]
            details = {clip["path"]: clip for clip in clips}
            with (shards / f"{name}.i16").open("rb") as shard:
                for path, entry in decoded.items():
                    samples = shard.read(2 * entry["length"])
                    if path not in details:
                        continue
                    if entry["dropped"]:
                        dropped[f"{name}: {path}"] = entry["dropped"]
                        continue
                    audio.write(samples)
                    place = {"clip": len(rows), "start": start, "length": entry["length"]}
                    rows.append({**details[path], **place})
                    start += entry["length"]
    (output / "audio.i16.part").replace(output / "audio.i16")
    text = io.StringIO()
    writer = csv.DictWriter(text, BANK_COLUMNS, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    report = {"sample_rate": SAMPLE_RATE, "clips": len(rows), "dropped": dropped, "minutes": _minutes(rows)}
    _replace_text(output / "bank.json", json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    _replace_text(output / "clips.csv", text.getvalue())
    return report


def _minutes(rows: Sequence[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Minutes by split and class."""
    samples: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        samples[str(row["split"])][str(row["rough_class"])] += int(str(row["length"]))
    return {
        split: {name: round(count / SAMPLE_RATE / 60, 2) for name, count in sorted(classes.items())}
        for split, classes in sorted(samples.items())
    }


def _replace_text(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    with part.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _report_lines(report: dict[str, object]) -> Iterator[str]:
    minutes, dropped = report["minutes"], report["dropped"]
    if isinstance(minutes, dict):
        for split, classes in minutes.items():
            parts = ", ".join(f"{name} {value}" for name, value in classes.items())
            yield f"{split}: {sum(classes.values()):.1f} min ({parts})"
    if isinstance(dropped, dict):
        yield f"{counted(report['clips'], 'clip')} kept, {len(dropped)} dropped (listed in bank.json):"
        for reason, count in Counter(dropped.values()).most_common(8):
            yield f"  {count}: {reason}"


def _run_step(options: argparse.Namespace) -> None:
    if options.step == "manifest":
        write_manifest(options.clips, options.manifest)
    elif options.step == "bank":
        manifest, packages = read_manifest(options.manifest), read_packages(options.package_list)
        report = build_bank(manifest, packages, package_dir=options.packages, output=options.bank)
        for line in _report_lines(report):
            _progress(line)
    elif options.step == "samples":
        manifest, packages = read_manifest(options.manifest), read_packages(options.package_list)
        names = {clip["package"] for clip in manifest if clip["path"] in sample_paths()}
        sources = [
            fetch_package(name, packages[name]["deb_sha256"], options.packages) for name in sorted(names)
        ]
        write_samples(sources, manifest, options.samples)
    elif options.step == "mixtures":
        write_mixtures(options.bank, options.mixtures, progress=_progress)
    else:
        for pair in find_siblings(options.bank):
            print(f"{pair.correlation:.2f}", *_where(pair.scored), *_where(pair.trained), sep="\t")


def _where(clip: Clip) -> tuple[str, str, str]:
    return clip["split"], clip["family"], clip["path"].rsplit("/", 1)[-1]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one step of the preparation; 0 when it is complete, 1 with one line on stderr when it is not."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", nargs="?", default="bank", choices=STEPS)
    parser.add_argument("--packages", type=Path, default=HERE / "packages", help="folder of the .deb files")
    parser.add_argument("--bank", "--output", type=Path, default=HERE / "bank", help="folder of the bank")
    parser.add_argument("--mixtures", type=Path, default=HERE / "mixtures", help="folder of the mixtures")
    parser.add_argument("--samples", type=Path, default=HERE.parent / "samples", help="folder of the samples")
    parser.add_argument("--manifest", type=Path, default=HERE / "manifest.csv.gz")
    parser.add_argument("--package-list", type=Path, default=HERE / "packages.tsv")
    parser.add_argument("--clips", type=Path, help="measured clips, for the manifest step")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if options.step == "manifest" and options.clips is None:
        parser.error("the manifest step needs --clips")
    return exit_status(lambda: _run_step(options), __file__, resumes=True)


if __name__ == "__main__":
    sys.exit(main())
