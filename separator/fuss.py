"""Reading mixtures in the layout of the FUSS data set, ours and the original alike.

A split is ``{split}/exampleN.wav`` beside ``{split}/exampleN_sources/*.wav``, listed in
``{split}_example_list.txt`` (tab-separated: mixture, then its sources); without the list the folders are
read. A source that an example does not have may have no file or a file of zeros: sources are counted by
energy, not by files. ``FussExamples`` reads any such split, ``check_fuss_split`` says what is wrong with one,
and `fuss_mixing` trains on one. An optional ``{split}_examples.csv`` with the columns
``mixture`` and ``package_heldout`` marks mixtures whose sources all come from packages that training never
saw.

Reference: Wisdom et al., FUSS, Zenodo record 3743844, CC BY 4.0.
"""

import csv
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import soundfile
import torch
from torch import Tensor

from separator.audio import read_audio
from separator.errors import SeparatorError
from separator.metrics import is_active
from separator.script import counted

SAMPLE_RATE = 16_000
N_SAMPLES = 10 * SAMPLE_RATE
MAX_SOURCES = 4
AUDIO_SUFFIXES = (".wav", ".flac")  # of what a folder of sources or estimates holds
RESIDUAL = "residual"  # name of a file in a folder of stems that is no source
FUSS_SPLITS = {"train": 20_000, "validation": 1_000, "eval": 1_000}  # examples of the original
_FLAGS = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}


@dataclass(frozen=True)
class Example:
    """One mixture and its true sources."""

    name: str
    mixture: Tensor
    """(time), as the file has it."""
    sources: Tensor
    """(source, time), those that sound; there may be none."""
    sample_rate: int
    package_heldout: bool | None = None
    """Whether all sources come from packages never trained on; None where nothing says so."""
    n_silent: int = 0
    """Source files without sound, which were dropped."""


@dataclass(frozen=True)
class _Entry:
    mixture: Path | None
    """None where the mixture is the sum of the sources alone."""
    sources: tuple[Path, ...]
    package_heldout: bool | None = None
    name: str = ""
    """Of the mixture's file, where there is one."""


class FussExamples(Sequence[Example]):
    """The examples of one split; audio is read when an example is asked for, and not kept."""

    def __init__(
        self, entries: Sequence[_Entry], sample_rate: int | None = None, n_samples: int | None = None
    ) -> None:
        self._entries = tuple(entries)
        self._sample_rate = sample_rate
        self._n_samples = n_samples

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> "FussExamples": ...
    def __getitem__(self, index: int | slice) -> "Example | FussExamples":
        """One example, read from its files; or, for a slice, a part of the split.

        Raises:
            SeparatorError: a file cannot be read, has another rate or length than asked for, or a source
            differs from its mixture in one of them.
        """
        if isinstance(index, slice):
            return FussExamples(self._entries[index], self._sample_rate, self._n_samples)
        entry = self._entries[index]
        example = _read_example(entry)
        found = example.sample_rate, example.mixture.shape[0]
        wanted = self._sample_rate or found[0], self._n_samples or found[1]
        if found != wanted:
            raise SeparatorError(f"{entry.mixture or example.name} {_is_not(*found, *wanted)}")
        return example


def read_fuss_examples(
    directory: str | Path, split: str, *, sample_rate: int | None = None, n_samples: int | None = None
) -> FussExamples:
    """List the examples of ``split`` in ``directory``, in the order of the list or of their numbers.

    Examples of another ``sample_rate`` or ``n_samples`` are refused when they are read; None takes any.

    Raises:
        SeparatorError: the folder or split is missing or empty, a file of an example does not exist, or the
        csv is unusable.
    """
    root = Path(directory)
    if not root.is_dir():
        raise SeparatorError(
            f"no folder {root}; pass the folder that holds {split}/ and {split}_example_list.txt"
        )
    listing = root / f"{split}_example_list.txt"
    pairs = _read_listing(root, split, listing) if listing.is_file() else _scan_folder(root, split)
    if not pairs:
        raise SeparatorError(
            f"{split=} in {root} has no examples; expected {split}/example*.wav or {listing.name}"
        )
    flags = _read_flags(root / f"{split}_examples.csv")
    entries = [_Entry(mixture, sources, flags.get(mixture.stem)) for mixture, sources in pairs]
    return FussExamples(entries, sample_rate, n_samples)


def read_source_folders(directory: str | Path) -> FussExamples:
    """List the folders of ``directory`` as examples: the sound files of a folder are its sources.

    A folder's name, less ``_sources`` at its end, is the example's; the mixture is the sum of the sources.

    Raises:
        SeparatorError: there is no such folder, or none in it, or one without a sound file.
    """
    root = Path(directory)
    folders = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
    if not folders:
        raise SeparatorError(f"{root} has no folders of sources; expected {root}/EXAMPLE/*.wav")
    entries = []
    for folder in folders:
        sources = sorted(
            path
            for path in folder.iterdir()
            if path.suffix.lower() in AUDIO_SUFFIXES and path.stem != RESIDUAL
        )
        if not sources:
            raise SeparatorError(f"{folder} holds no sound file ({', '.join(AUDIO_SUFFIXES)})")
        entries.append(_Entry(None, tuple(sources), name=folder.name.removesuffix("_sources")))
    return FussExamples(entries)


def check_fuss_split(
    directory: str | Path,
    split: str,
    *,
    n_examples: int | None = None,
    sample_rate: int = SAMPLE_RATE,
    n_samples: int = N_SAMPLES,
) -> list[str]:
    """Say in one line each what is missing from a split, left over in it, or of another rate or length.

    Files are opened for their headers alone. ``n_examples`` is how many there should be, numbered from 0.
    """
    root = Path(directory)
    if not (root / split).is_dir():
        return [f"{split}/ is missing in {root}"]
    listing = root / f"{split}_example_list.txt"
    lines = listing.read_text().splitlines() if listing.is_file() else []
    names = [name.strip() for line in lines for name in line.split("\t") if name.strip()]
    listed = {_find(root, split, name) or root / name for name in names}
    found = {path for pattern in ("*.wav", "*_sources/*.wav") for path in (root / split).glob(pattern)}
    mixtures = {path for path in found if path.parent == root / split}
    problems = [] if lines else [f"{listing.name} is missing or empty"]
    problems += [f"{path.relative_to(root)} is missing" for path in sorted(listed - found)]
    if lines:
        problems += [f"{path.relative_to(root)} is not in {listing.name}" for path in sorted(found - listed)]
    for folder in sorted({path.parent for path in found - mixtures}):
        if folder.with_name(f"{folder.name.removesuffix('_sources')}.wav") not in mixtures:
            problems.append(f"{folder.relative_to(root)}/ has no mixture")
    problems += [line for path in sorted(found) if (line := _check_header(path, sample_rate, n_samples))]
    if n_examples is not None and len(mixtures) != n_examples:
        absent = sorted(set(range(n_examples)) - {_number(path) for path in mixtures})
        names = [str(number) for number in absent[:5]] + ["..."] * (len(absent) > 5)
        without = f"; without number {', '.join(names)}" if names else ""
        problems.append(f"{split} has {len(mixtures)} of {counted(n_examples, 'example')}{without}")
    return problems


def _read_listing(root: Path, split: str, listing: Path) -> list[tuple[Path, tuple[Path, ...]]]:
    """Mixture and sources of each line."""
    pairs = []
    for number, line in enumerate(listing.read_text().splitlines(), 1):
        names = [name.strip() for name in line.split("\t") if name.strip()]
        paths = []
        for name in names:
            found = _find(root, split, name)
            if found is None:
                raise SeparatorError(
                    f"{name!r}, line {number} of {listing.name}, is not in {root}; "
                    "unpack or prepare the split again, or take the file off the list"
                )
            paths.append(found)
        if paths:
            pairs.append((paths[0], tuple(paths[1:])))
    return pairs


def _find(root: Path, split: str, name: str) -> Path | None:
    """The file that a list names, relative to the root or to the split's folder."""
    return next((path for path in (root / name, root / split / name) if path.is_file()), None)


def _scan_folder(root: Path, split: str) -> list[tuple[Path, tuple[Path, ...]]]:
    pairs = []
    for mixture in sorted((root / split).glob("*.wav"), key=lambda path: (_number(path), path.name)):
        folder = mixture.with_name(f"{mixture.stem}_sources")
        if not folder.is_dir():
            raise SeparatorError(f"{mixture} has no folder {folder.name}/ of its sources beside it")
        pairs.append((mixture, tuple(sorted(folder.glob("*.wav")))))
    return pairs


def _number(mixture: Path) -> float:
    """The number in an example's name, whatever its digits; infinite where there is none."""
    digits = re.search(r"(\d+)$", mixture.stem)
    return int(digits[1]) if digits else math.inf


def _check_header(path: Path, sample_rate: int, n_samples: int) -> str | None:
    try:
        info = soundfile.info(path)
    except soundfile.LibsndfileError as error:
        return f"{path} cannot be read: {error}"
    if info.channels != 1:
        return f"{path} has {info.channels} channels; the FUSS layout is mono"
    if (info.samplerate, info.frames) != (sample_rate, n_samples):
        return f"{path} {_is_not(info.samplerate, info.frames, sample_rate, n_samples)}"
    return None


def _is_not(rate: int, length: int, wanted_rate: int, wanted_length: int) -> str:
    return f"has {counted(length, 'sample')} at {rate} Hz, not {wanted_length} at {wanted_rate} Hz"


def _read_flags(table: Path) -> dict[str, bool]:
    """``package_heldout`` by the stem of the mixture's name; empty where the table has no such column."""
    if not table.is_file():
        return {}
    with table.open(newline="") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or []
        if "mixture" not in columns:
            raise SeparatorError(
                f"{table.name} has the columns {columns}, no 'mixture'; add it or remove the file"
            )
        if "package_heldout" not in columns:
            return {}
        flags = {}
        for row in reader:
            value = (row["package_heldout"] or "").strip().lower()
            if value not in _FLAGS:
                raise SeparatorError(
                    f"package_heldout={value!r} of {row['mixture']!r} in {table.name} "
                    f"is none of {', '.join(_FLAGS)}"
                )
            flags[Path(row["mixture"]).stem] = _FLAGS[value]
    return flags


def _read_example(entry: _Entry) -> Example:
    first = entry.mixture or entry.sources[0]
    mixture, sample_rate = _read_mono(first)
    waveforms = []
    for path in entry.sources:
        source, source_rate = (mixture, sample_rate) if path == first else _read_mono(path)
        if source_rate != sample_rate or source.shape != mixture.shape:
            what = "the mixture" if entry.mixture else first.name
            raise SeparatorError(
                f"{path.name} of {first.name if entry.mixture else entry.name} has "
                f"{counted(source.shape[0], 'sample')} at {source_rate} Hz, {what} {mixture.shape[0]} at "
                f"{sample_rate} Hz; "
                "a source must be as long as its mixture"
            )
        waveforms.append(source)
    sources = torch.stack(waveforms) if waveforms else mixture.new_zeros(0, mixture.shape[0])
    active = is_active(sources)
    return Example(
        entry.mixture.stem if entry.mixture else entry.name,
        mixture if entry.mixture else sources.sum(0),
        sources[active],
        sample_rate,
        entry.package_heldout,
        n_silent=int((~active).sum()),
    )


def _read_mono(path: Path) -> tuple[Tensor, int]:
    audio = read_audio(path)
    if audio.info.channels != 1:
        raise SeparatorError(f"{path} has {audio.info.channels} channels; the FUSS layout is mono")
    return torch.from_numpy(audio.waveform[0]), audio.sample_rate
