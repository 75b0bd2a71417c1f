"""Reading mixtures in the layout of the FUSS data set, ours and the original alike.

A split is ``{split}/exampleN.wav`` beside ``{split}/exampleN_sources/*.wav``, listed in
``{split}_example_list.txt`` (tab-separated: mixture, then its sources); without the list the folders are
read. A source that an example does not have may have no file or a file of zeros: sources are counted by
energy, not by files. An optional ``{split}_examples.csv`` with the columns ``mixture`` and
``package_heldout`` marks mixtures whose sources all come from packages that training never saw.

Reference: Wisdom et al., FUSS, Zenodo record 3743844, CC BY 4.0.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from separator.audio import read_audio
from separator.errors import SeparatorError
from separator.metrics import is_active

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


@dataclass(frozen=True)
class _Entry:
    mixture: Path
    sources: tuple[Path, ...]
    package_heldout: bool | None


class FussExamples(Sequence[Example]):
    """The examples of one split; audio is read when an example is asked for, and not kept."""

    def __init__(self, entries: Sequence[_Entry]) -> None:
        self._entries = tuple(entries)

    def __len__(self) -> int:
        return len(self._entries)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> "FussExamples": ...
    def __getitem__(self, index: int | slice) -> "Example | FussExamples":
        """One example, read from its files; or, for a slice, a part of the split.

        Raises:
            SeparatorError: a file cannot be read, or a source differs from its mixture in rate or length.
        """
        if isinstance(index, slice):
            return FussExamples(self._entries[index])
        return _read_example(self._entries[index])


def read_fuss_examples(directory: str | Path, split: str) -> FussExamples:
    """List the examples of ``split`` in ``directory``, in the order of the list or of their names.

    Raises:
        SeparatorError: the folder or split is missing or empty, a listed file does not exist, or the csv is
        unusable.
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
    return FussExamples([_Entry(mixture, sources, flags.get(mixture.stem)) for mixture, sources in pairs])


def _read_listing(root: Path, split: str, listing: Path) -> list[tuple[Path, tuple[Path, ...]]]:
    """Mixture and sources of each line; paths are relative to the root or to the split's folder."""
    pairs = []
    for number, line in enumerate(listing.read_text().splitlines(), 1):
        names = [name.strip() for name in line.split("\t") if name.strip()]
        paths = []
        for name in names:
            found = next((path for path in (root / name, root / split / name) if path.is_file()), None)
            if found is None:
                raise SeparatorError(
                    f"{name!r}, line {number} of {listing.name}, is not in {root}; "
                    "unpack or prepare the split again, or take the file off the list"
                )
            paths.append(found)
        if paths:
            pairs.append((paths[0], tuple(paths[1:])))
    return pairs


def _scan_folder(root: Path, split: str) -> list[tuple[Path, tuple[Path, ...]]]:
    mixtures = sorted((root / split).glob("*.wav"))
    return [
        (mixture, tuple(sorted(mixture.with_name(f"{mixture.stem}_sources").glob("*.wav"))))
        for mixture in mixtures
    ]


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
    mixture, sample_rate = _read_mono(entry.mixture)
    waveforms = []
    for path in entry.sources:
        source, source_rate = _read_mono(path)
        if source_rate != sample_rate or source.shape != mixture.shape:
            raise SeparatorError(
                f"{path.name} of {entry.mixture.name} has {source.shape[0]} samples at {source_rate} Hz, "
                f"the mixture {mixture.shape[0]} at {sample_rate} Hz; a source must be as long as its mixture"
            )
        waveforms.append(source)
    sources = torch.stack(waveforms) if waveforms else mixture.new_zeros(0, mixture.shape[0])
    return Example(
        entry.mixture.stem, mixture, sources[is_active(sources)], sample_rate, entry.package_heldout
    )


def _read_mono(path: Path) -> tuple[Tensor, int]:
    audio = read_audio(path)
    if audio.info.channels != 1:
        raise SeparatorError(f"{path} has {audio.info.channels} channels; the FUSS layout is mono")
    return torch.from_numpy(audio.waveform[0]), audio.sample_rate
