"""One audio file at the end of the pipeline: written under a temporary name, complete before it has its own.

libsndfile says when the disk is full while samples are written, but not while it closes a file: the end of a
finished file is read back before it counts as complete. A temporary file is locked while it is in use. The
system lifts the lock of a process that dies, and what a killed run has left is known by that.
"""

import math
import os
import secrets
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import soundfile

from separator.decoding import Samples
from separator.errors import SeparatorError
from separator.formats import INTEGER_BITS, Coding

if sys.platform != "win32":
    import fcntl

HEADER_BYTES = 256  # of a wav file; its chunks before the samples are shorter
MAX_WAV_BYTES = 2**32 - 2**20  # a WAV header counts 32 bits; RF64 takes over just below
ENCODED_SAMPLES = 1 << 12  # that go to an encoder at a time; libvorbis keeps all of them on the stack
PROBE_BYTES = 1 << 16  # that are tried where a file could not be written
TEMPORARY = ".separate-{}.part"  # of a length of its own: that of a long name must not be too long
_BINARY = getattr(os, "O_BINARY", 0)
CONTAINERS = {"flac": "FLAC", "mp3": "MP3", "ogg": "OGG"}
WAV_CONTAINERS = ("WAV", "WAVEX", "RF64")


@dataclass(frozen=True)
class Stem:
    """One written file."""

    file: Path
    energy: float
    """Sum of its squared samples."""
    level_db: float | None
    """Root mean square re full scale; None for digital silence."""


def write_audio(
    path: str | Path, waveform: Samples, sample_rate: int, *, subtype: str = "FLOAT", overwrite: bool = False
) -> Stem:
    """Write ``waveform`` (channel, time) as a wav file that appears under its name when it is complete.

    Raises:
        SeparatorError: the file exists (unless ``overwrite``), a sample does not fit ``subtype``, or the disk
            is full.
    """
    path = Path(path)
    if path.exists() and not overwrite:
        raise SeparatorError(f"{path} exists already; pass overwrite=True or another path")
    bits = INTEGER_BITS.get(subtype)
    samples = waveform if bits is None else np.rint(waveform * 2.0 ** (bits - 1))
    if bits is not None and not _fits(samples, bits):
        peak = float(np.abs(waveform).max())
        raise SeparatorError(
            f"{peak=:.4f} does not fit {subtype}; scale the waveform or pass subtype='FLOAT'"
        )
    with AudioWriter(path, sample_rate, waveform.shape, Coding("wav", subtype)) as writer:
        writer.write(samples)
        writer.finish()
        return writer.publish(path)


class AudioWriter:
    """One file in the folder of ``path``, under a temporary name; it vanishes unless published.

    ``shape`` (channel, time) tells whether a wav file needs the wide header of RF64.

    Raises:
        SeparatorError: the file cannot be created or, in its methods, written.
    """

    def __init__(self, path: Path, sample_rate: int, shape: tuple[int, ...], coding: Coding) -> None:
        self.path = path
        self.energy = 0.0
        self.peak = 0.0
        """Largest sample so far, in its own steps where it is an integer."""
        self._coding = coding
        self._n_channels = shape[0]
        self._n_frames = 0
        self._temporary: Path
        self._lock: int | None = None
        container = CONTAINERS.get(coding.format) or wav_container(shape, coding)
        try:
            handle = self._create()
            self._file: Any = soundfile.SoundFile(
                handle, "w", sample_rate, shape[0], subtype=coding.subtype, format=container
            )
        except (OSError, soundfile.LibsndfileError) as error:
            failure = self._failure(error)
            self._remove()
            raise failure from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(soundfile.LibsndfileError):
            self._file.close()
        self._remove()

    def write(self, samples: Samples) -> None:
        """Append (channel, time); integer codings take whole numbers of their own step."""
        data: npt.NDArray[Any] = samples.T
        scale = 1.0
        if self._coding.bits is not None:
            bits = self._coding.bits
            scale = 2.0 ** (bits - 1)
            data = (np.clip(data, -scale, scale - 1).astype(np.int64) << (32 - bits)).astype(np.int32)
        if samples.size:
            self.peak = max(self.peak, float(np.abs(samples).max()))
        self.energy += float(np.square(samples, dtype=np.float64).sum()) / scale**2
        size = ENCODED_SAMPLES if self._coding.lossy else max(1, len(data))
        try:
            for start in range(0, len(data), size):
                self._file.write(np.ascontiguousarray(data[start : start + size]))
        except (soundfile.LibsndfileError, AssertionError) as error:  # the latter where it took fewer samples
            raise self._failure(error) from error
        self._n_frames += len(data)

    def finish(self) -> None:
        """Complete the file, still under its temporary name."""
        try:
            self._file.close()
            if self._coding.format == "wav":
                _erase_time(self._temporary)
            with soundfile.SoundFile(os.open(self._temporary, os.O_RDONLY | _BINARY)) as file:
                file.seek(max(0, self._n_frames - 1))
                whole = file.frames == self._n_frames and len(file.read(1)) == min(1, self._n_frames)
        except (soundfile.LibsndfileError, OSError) as error:
            raise self._failure(error) from error
        if not whole:
            raise self._failure(None)

    def publish(self, path: Path) -> Stem:
        """Give the finished file its name."""
        try:
            os.replace(self._temporary, path)
        except OSError as error:
            raise self._failure(error) from error
        n_values = self._n_frames * self._n_channels
        mean_square = self.energy / max(1, n_values)
        return Stem(path, self.energy, 10 * math.log10(mean_square) if mean_square > 0 else None)

    def _create(self) -> int:
        """Create the temporary file, locked until `_remove`, and return a handle of it.

        Raises:
            OSError: that fails.
        """
        while True:
            name = TEMPORARY.format(f"{os.getpid()}-{secrets.token_hex(4)}")
            self._temporary = self.path.with_name(name)
            handle = os.open(self._temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | _BINARY, 0o666)
            if sys.platform == "win32":
                return handle
            with suppress(OSError):  # a network file system may have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            if self._temporary.exists():
                self._lock = os.dup(handle)
                return handle
            os.close(handle)  # another run has come between, and taken it for a killed one's

    def _remove(self) -> None:
        """Remove the temporary file, unless it has its name."""
        self._temporary.unlink(missing_ok=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _failure(self, error: Exception | None) -> SeparatorError:
        """Say why; libsndfile knows no more than that the system refused, so the system is asked again."""
        reason = getattr(error, "strerror", None)
        try:
            with self._temporary.open("ab") as file:
                file.write(bytes(PROBE_BYTES))
        except OSError as refused:
            reason = reason or refused.strerror
        reason = reason or str(getattr(error, "error_string", "the end is missing")).strip().rstrip(".")
        return SeparatorError(
            f"{self.path} cannot be written ({reason}); free the disk or pass another folder"
        )


def remove_unfinished(folder: Path) -> None:
    """Remove temporary files in ``folder`` that no process has locked: a run that was killed has left them.

    On Windows and where the file system has no locks they stay.
    """
    if sys.platform == "win32":
        return
    for path in folder.glob(TEMPORARY.format("*")):
        with suppress(OSError):  # it is in use, or gone
            handle = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(handle)


def wav_container(shape: tuple[int, ...], coding: Coding) -> str:
    """WAV, or RF64 where its header cannot count the bytes of ``shape`` (channel, time)."""
    sample_bytes = 8 if coding.subtype == "DOUBLE" else (coding.bits or 32) // 8
    return "RF64" if math.prod(shape) * sample_bytes > MAX_WAV_BYTES else "WAV"


def holds_sound(path: Path) -> bool:
    """Whether a file has samples in the container that its extension says, as those of `AudioWriter` have."""
    if not path.is_file():
        return False
    try:
        with soundfile.SoundFile(os.open(path, os.O_RDONLY | _BINARY)) as file:
            known = WAV_CONTAINERS if path.suffix == ".wav" else (CONTAINERS.get(path.suffix[1:]),)
            return file.format in known and len(file.read(1)) == 1
    except (soundfile.LibsndfileError, OSError):
        return False


def _erase_time(path: Path) -> None:
    """Zero the time of writing in a float file's PEAK chunk: the same input must give the same bytes."""
    with path.open("r+b") as file:
        at = file.read(HEADER_BYTES).find(b"PEAK")
        if at >= 0:  # chunk id, size, version, time, each of four bytes
            file.seek(at + 12)
            file.write(bytes(4))


def _fits(samples: Samples, bits: int) -> bool:
    """Whether whole numbers fit ``bits`` bits."""
    return bool(
        samples.size == 0
        or (samples.min() >= -(2.0 ** (bits - 1)) and samples.max() <= 2.0 ** (bits - 1) - 1)
    )
