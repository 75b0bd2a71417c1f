"""Stems on disk at the end of the pipeline: ``<output>/<stem of the input>/source1.wav ... residual.wav``.

The stems of one input add up to it. In integer files they do so to the bit: the sources are rounded first,
and the residual is the rounded input minus them. If a stem would not fit its integers, one gain is due for
all. Files are written under temporary names and appear under their own only when all of them are complete.
"""

import math
import os
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import soundfile

from separator.audio import AudioInfo, Samples
from separator.errors import SeparatorError

INTEGER_BITS = {"PCM_U8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
RESIDUAL = "residual.wav"
PICTURE = "separation.png"
HEADER_BYTES = 256  # of a wav file; its chunks before the samples are shorter
MAX_WAV_BYTES = 2**32 - 2**20  # a WAV header counts 32 bits; RF64 takes over just below
# codings a wav file cannot or should not have, and what comes nearest; lossy ones decode to floats
_NEAREST = {
    **dict.fromkeys(("PCM_S8", "DPCM_8"), "PCM_U8"),
    **dict.fromkeys(("ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "ALAC_16", "DPCM_16"), "PCM_16"),
    **dict.fromkeys(("ALAC_20", "ALAC_24"), "PCM_24"),
    "ALAC_32": "PCM_32",
}


@dataclass(frozen=True)
class Stem:
    """One written file."""

    file: Path
    energy: float
    """Sum of its squared samples."""
    level_db: float | None
    """Root mean square re full scale; None for digital silence."""


def stem_subtype(subtype: str) -> str:
    """Coding of the stems of a file with ``subtype``: its own if wav has it, else the nearest.

    >>> [stem_subtype(name) for name in ("PCM_24", "DOUBLE", "PCM_S8", "VORBIS")]
    ['PCM_24', 'DOUBLE', 'PCM_U8', 'FLOAT']
    """
    return subtype if subtype in INTEGER_BITS or subtype == "DOUBLE" else _NEAREST.get(subtype, "FLOAT")


def stem_folder(path: str | Path, output_dir: str | Path, *, overwrite: bool) -> Path:
    """Folder for the stems of the input at ``path``; it need not exist yet.

    Raises:
        SeparatorError: it holds stems already (unless ``overwrite``), or it is the input's own folder.
    """
    path = Path(path)
    # "..wav" and "...wav" have the stems "." and "..", which would leave the output folder
    folder = Path(output_dir) / (path.stem if path.stem.strip(".") else path.name)
    if folder.resolve() == path.resolve().parent:
        raise SeparatorError(f"stems of {path} would go into its own folder; pass another output folder")
    present = sorted(item.name for item in _stems_in(folder))
    if present and not overwrite:
        raise SeparatorError(
            f"{folder} holds {', '.join(present)}; overwrite them (--overwrite) or name another folder"
        )
    return folder


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


def write_audio(
    path: str | Path, waveform: Samples, sample_rate: int, *, subtype: str = "FLOAT", overwrite: bool = False
) -> Stem:
    """Write ``waveform`` (channel, time) as a wav file that appears under its name when it is complete.

    Raises:
        SeparatorError: the file exists (unless ``overwrite``), or a sample does not fit ``subtype``.
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
    with _Writer(path, sample_rate, waveform.shape, subtype) as writer:
        writer.write(samples)
        return writer.publish()


class StemSet:
    """The sources and the residual of one input while they are written; a context manager.

    Leaving it without `publish` leaves nothing behind. ``gain`` multiplies input and estimates alike.
    """

    def __init__(self, folder: Path, n_sources: int, info: AudioInfo, *, gain: float = 1.0) -> None:
        self.folder = folder
        self.n_sources = n_sources
        self.info = info
        self.gain = gain
        self.subtype = stem_subtype(info.subtype)
        self._peak = 0.0
        self._writers: list[_Writer] = []
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SeparatorError(
                f"{self.folder} cannot be created ({error.strerror}); pass another output folder"
            ) from error
        shape = (self.info.channels, self.info.length)
        for name in [*map(_source_name, range(self.n_sources)), RESIDUAL]:
            writer = _Writer(self.folder / name, self.info.sample_rate, shape, self.subtype)
            self._writers.append(self._stack.enter_context(writer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, mixture: Samples, estimates: Samples) -> None:
        """Append a block: the input (channel, time) and its estimates (source, channel, time)."""
        mixture = self.gain * mixture.astype(np.float64)
        sources = self.gain * estimates.astype(np.float64)
        bits = INTEGER_BITS.get(self.subtype)
        if bits is not None:
            mixture, sources = np.rint(mixture * 2.0 ** (bits - 1)), np.rint(sources * 2.0 ** (bits - 1))
        elif self.subtype == "FLOAT":
            sources = sources.astype(np.float32).astype(np.float64)
        for writer, samples in zip(self._writers, [*sources, mixture - sources.sum(0)], strict=True):
            self._peak = max(self._peak, float(np.abs(samples).max()))
            writer.write(samples)

    @property
    def fitting_gain(self) -> float:
        """`gain`, or less where a stem written so far does not fit its integers."""
        bits = INTEGER_BITS.get(self.subtype)
        if bits is None or self._peak <= 2.0 ** (bits - 1) - 1:
            return self.gain
        room = 2.0 ** (bits - 1) - 1 - (self.n_sources + 2)  # each rounding may add a half to the residual
        return self.gain * room / self._peak

    def publish(self) -> tuple[list[int], list[Stem], Stem]:
        """Give the files their names, sources from the most energetic on, and remove those of an earlier run.

        Returns the sources' order (the estimate that became source1 first), the sources and the residual.
        """
        order = sorted(range(self.n_sources), key=lambda s: (-self._writers[s].energy, s))
        for old in _stems_in(self.folder):
            if old.name not in [RESIDUAL, *map(_source_name, range(self.n_sources))]:
                old.unlink()
        sources = [self._writers[s].publish(self.folder / _source_name(k)) for k, s in enumerate(order)]
        return order, sources, self._writers[-1].publish()


class _Writer:
    """One wav file under a temporary name; it vanishes unless published."""

    def __init__(self, path: Path, sample_rate: int, shape: tuple[int, ...], subtype: str) -> None:
        self.path = path
        self.energy = 0.0
        self._count = 0
        self._bits = INTEGER_BITS.get(subtype)
        self._temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
        n_bytes = math.prod(shape) * (8 if subtype == "DOUBLE" else (self._bits or 32) // 8)
        container = "RF64" if n_bytes > MAX_WAV_BYTES else "WAV"
        try:
            self._file = soundfile.SoundFile(
                self._temporary, "w", sample_rate, shape[0], subtype=subtype, format=container
            )
        except soundfile.LibsndfileError as error:
            self._temporary.unlink(missing_ok=True)
            raise SeparatorError(
                f"{path} cannot be written ({error.error_string}); pass another folder"
            ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def write(self, samples: Samples) -> None:
        """Append (channel, time); integer codings take whole numbers of their own step."""
        data: npt.NDArray[Any] = samples.T
        scale = 1.0
        if self._bits is not None:
            scale = 2.0 ** (self._bits - 1)
            data = (np.clip(data, -scale, scale - 1).astype(np.int64) << (32 - self._bits)).astype(np.int32)
        self.energy += float(np.square(samples, dtype=np.float64).sum()) / scale**2
        self._count += samples.size
        try:
            self._file.write(np.ascontiguousarray(data))
        except soundfile.LibsndfileError as error:
            raise SeparatorError(
                f"{self.path} cannot be written ({error.error_string}); free the disk"
            ) from error

    def publish(self, path: Path | None = None) -> Stem:
        """Complete the file and give it its name."""
        path = path or self.path
        self._file.close()
        _erase_time(self._temporary)
        os.replace(self._temporary, path)
        mean_square = self.energy / max(1, self._count)
        return Stem(path, self.energy, 10 * math.log10(mean_square) if mean_square > 0 else None)


def _erase_time(path: Path) -> None:
    """Zero the time of writing in a float file's PEAK chunk: the same input must give the same bytes."""
    with path.open("r+b") as file:
        at = file.read(HEADER_BYTES).find(b"PEAK")
        if at >= 0:  # chunk id, size, version, time, each of four bytes
            file.seek(at + 12)
            file.write(bytes(4))


def _source_name(index: int) -> str:
    """Name of the source that comes ``index``-th."""
    return f"source{index + 1}.wav"


def _stems_in(folder: Path) -> list[Path]:
    """Files of an earlier run."""
    numbered = [
        item for item in folder.glob("source*.wav") if item.name[len("source") : -len(".wav")].isdigit()
    ]
    return numbered + [item for item in (folder / RESIDUAL, folder / PICTURE) if item.exists()]


def _fits(samples: Samples, bits: int) -> bool:
    """Whether whole numbers fit ``bits`` bits."""
    return bool(
        samples.size == 0
        or (samples.min() >= -(2.0 ** (bits - 1)) and samples.max() <= 2.0 ** (bits - 1) - 1)
    )
