"""Stems on disk at the end of the pipeline: source1, source2, ... and the residual, where `StemNames` says.

The stems of one input add up to it. In integer files they do so to the bit: the sources are rounded first,
and the residual is the rounded input minus them. If a stem would not fit, one gain is due for all. Files are
written under temporary names and appear under their own only when all of them are complete, the residual
last: stems without a residual are those of a run that was killed. What such a run has left under temporary
names goes when the next one writes to the same folder. No file is replaced or removed that is not of the kind
its name says: it is none of an earlier run.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Self

import numpy as np

from separator.audio import AudioInfo, Samples, Warn, ignore
from separator.errors import SeparatorError
from separator.formats import Coding
from separator.naming import StemNames
from separator.writing import AudioWriter, Stem, holds_sound, remove_unfinished

if sys.platform != "win32":
    import fcntl

PNG = b"\x89PNG\r\n\x1a\n"


def check_writable(output_dir: str | Path) -> None:
    """Create ``output_dir`` and try to write in it.

    Raises:
        SeparatorError: that fails.
    """
    try:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise SeparatorError(
            f"output folder {output_dir} cannot be written ({error.strerror}); pass another one"
        ) from error


def check_replaceable(names: StemNames, n_slots: int, *, picture: bool = False) -> None:
    """Refuse to replace a file that is none of an earlier run, before any work.

    ``n_slots`` is the largest number of sources that may be written, ``picture`` whether one will be.

    Raises:
        SeparatorError: a file where a stem or the picture may go is not of the kind its name says.
    """
    paths = [*map(names.source, range(n_slots)), names.residual, *[names.picture] * picture]
    _refuse_foreign([path for path in paths if os.path.lexists(path) and not _is_result(path)])


class StemSet:
    """The sources and the residual of one input while they are written; a context manager.

    Leaving it without `publish` leaves nothing behind. ``gain`` multiplies input and estimates alike.
    """

    def __init__(
        self,
        names: StemNames,
        n_sources: int,
        info: AudioInfo,
        coding: Coding,
        *,
        gain: float = 1.0,
        overwrite: bool = False,
        warn: Warn = ignore,
    ) -> None:
        self.names = names
        self.n_sources = n_sources
        self.info = info
        self.coding = coding
        self.gain = gain
        self.overwrite = overwrite
        self.warn = warn
        self._writers: list[AudioWriter] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        shape = (self.info.channels, self.info.length)
        paths = [*map(self.names.source, range(self.n_sources)), self.names.residual]
        with ExitStack() as stack:
            for folder in dict.fromkeys(path.parent for path in paths):
                self._make_folder(folder, stack)
                remove_unfinished(folder)
            for path in paths:
                writer = AudioWriter(path, self.info.sample_rate, shape, self.coding)
                self._writers.append(stack.enter_context(writer))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _make_folder(self, folder: Path, stack: ExitStack) -> None:
        """Make a folder that, with those above it, goes away again if it stays empty.

        Raises:
            SeparatorError: it cannot be made.
        """
        for new in [path for path in [*reversed(folder.parents), folder] if not path.exists()]:
            try:
                new.mkdir(exist_ok=True)
            except OSError as error:
                raise SeparatorError(
                    f"{new} cannot be created ({error.strerror}); pass another output folder"
                ) from error
            stack.callback(_remove_if_empty, new)

    def write(self, mixture: Samples, estimates: Samples) -> None:
        """Append a block: the input (channel, time) and its estimates (source, channel, time)."""
        mixture = self.gain * mixture.astype(np.float64)
        sources = self.gain * estimates.astype(np.float64)
        if self.coding.bits is not None:
            step = 2.0 ** (1 - self.coding.bits)
            mixture, sources = np.rint(mixture / step), np.rint(sources / step)
        elif self.coding.subtype == "FLOAT":
            sources = sources.astype(np.float32).astype(np.float64)
        for writer, samples in zip(self._writers, [*sources, mixture - sources.sum(0)], strict=True):
            writer.write(samples)

    @property
    def fitting_gain(self) -> float:
        """`gain`, or less where a stem written so far does not fit its coding."""
        peak = max(writer.peak for writer in self._writers)
        if peak <= self.coding.largest:
            return self.gain
        room = self.coding.largest * (1 - 1e-6)
        if self.coding.bits is not None:
            room = self.coding.largest - self.n_sources - 2  # each rounding may add a half to the residual
        return self.gain * room / peak

    def publish(self) -> tuple[list[int], list[Stem], Stem]:
        """Give the files their names, sources from the most energetic on, and remove those of an earlier run.

        A warning names what is removed with nothing in its place, and what stays as it is not of the kind its
        name says.

        Returns the sources' order (the estimate that became source1 first), the sources and the residual.

        Raises:
            SeparatorError: the disk is full, another run has put its stems there (unless ``overwrite``), or
                a file that is not of the kind its name says stands where a stem goes.
        """
        order = sorted(range(self.n_sources), key=lambda s: (-self._writers[s].energy, s))
        for writer in self._writers:
            writer.finish()
        pairs = [(self._writers[s], self.names.source(k)) for k, s in enumerate(order)]
        pairs.append((self._writers[-1], self.names.residual))
        try:
            return order, *self._rename(pairs)
        except OSError as error:
            raise SeparatorError(
                f"{error.filename} cannot be replaced ({error.strerror}); pass another output folder"
            ) from error

    def _rename(self, pairs: list[tuple[AudioWriter, Path]]) -> tuple[list[Stem], Stem]:
        """Put finished files in the place of an earlier run's; all of them, or none stays.

        Raises:
            OSError: an old file cannot be removed.
        """
        with _locked(self.names.residual.parent), ExitStack() as undo:
            old = self.names.present()
            if old and not self.overwrite:
                raise SeparatorError(
                    f"{old[0].parent} got {', '.join(path.name for path in old)} from another run meanwhile; "
                    "pass --overwrite to replace them, or another output folder"
                )
            foreign = [path for path in old if not _is_result(path)]
            _refuse_foreign([path for _, path in pairs if path in foreign])
            for path in foreign:
                self.warn(f"{path} is no {path.suffix[1:]} file, so it stays beside the new stems")
            removed = [path for path in old if path not in foreign]
            removed.sort(key=lambda path: "residual" not in path.name)  # first: marks them incomplete
            for path in removed:
                path.unlink(missing_ok=True)
            stems = []
            for writer, path in pairs:
                undo.callback(path.unlink, missing_ok=True)
                stems.append(writer.publish(path))
            undo.pop_all()
        if gone := [path.name for path in removed if not path.exists()]:
            self.warn(f"{removed[0].parent}: {', '.join(sorted(gone))} of an earlier run removed")
        return stems[:-1], stems[-1]


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keep other runs from publishing into ``folder``; the system lifts the lock of a process that dies."""
    if sys.platform == "win32":
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a network file system may have no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _is_result(path: Path) -> bool:
    """Whether a file is of the kind its name says: sound, or a picture."""
    if path.suffix != ".png":
        return holds_sound(path)
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(PNG)) == PNG


def _refuse_foreign(paths: list[Path]) -> None:
    """Raise SeparatorError if there are ``paths``, which are in the way and none of an earlier run."""
    if paths:
        raise SeparatorError(
            f"{paths[0]} is no {paths[0].suffix[1:]} file, so it is not replaced; "
            "move it, or pass another output folder"
        )


def _remove_if_empty(folder: Path) -> None:
    with suppress(OSError):
        folder.rmdir()
