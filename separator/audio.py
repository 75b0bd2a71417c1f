"""Audio files and sample rates at the front of the pipeline.

A waveform is (channel, time), in [-1, 1] where the file has integers. What a file says of itself is an
`AudioInfo`, and `read_blocks` streams what that describes: a whole file, or a part of it. Every check that
needs no model stands here and imports no torch, so that a bad file is refused at once.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from separator.decoding import Samples as Samples
from separator.decoding import Warn as Warn
from separator.decoding import open_decoder
from separator.errors import SeparatorError
from separator.script import counted

if TYPE_CHECKING:
    from torch import Tensor

BLOCK_SAMPLES = 1 << 18  # samples a channel that are read at a time
MAX_PERIOD = 2560  # 192 kHz to 11.025 kHz; the resampling filter holds about the square of it
MAX_CHANNELS = 64  # a waveform with more is taken for (time, channel)
MIN_RATE, MAX_RATE = 1000, 768_000  # Hz; a file that says otherwise is no recording


@dataclass(frozen=True)
class AudioInfo:
    """What a readable audio file says of itself, and what is to be read of it."""

    path: Path
    sample_rate: int
    channels: int
    length: int
    """Samples a channel in the part that is read, as the header says; counted where it does not."""
    format: str
    """Name of the container, such as ``WAV``."""
    subtype: str
    """libsndfile's name of the coding of a sample, such as ``PCM_16``."""
    first: int = 0
    """Sample from which the file is read."""
    limit: int | None = None
    """Samples that are read at most; None reads to the end."""
    repair: bool = False
    """Whether samples that are no finite numbers are taken as 0."""


@dataclass(frozen=True)
class AudioFile:
    """A whole file in memory: ``waveform`` (channel, time) float32 and where it comes from."""

    waveform: npt.NDArray[np.float32]
    info: AudioInfo

    @property
    def sample_rate(self) -> int:
        """The file's own rate, Hz."""
        return self.info.sample_rate


def ignore(message: str) -> None:
    """Take a warning and say nothing."""


def inspect_audio(
    path: str | Path,
    *,
    start: float = 0.0,
    duration: float | None = None,
    repair: bool = False,
    warn: Warn = ignore,
) -> AudioInfo:
    """Check that ``path`` is audio that can be separated, without any model.

    ``start`` and ``duration``, seconds, choose a part. ``warn`` is told of wrong headers, of data that break
    off or cannot be decoded and, with ``repair``, of samples that are taken as 0.

    Raises:
        SeparatorError: the file is missing, a folder, empty, not audio, has no samples in the part, or one is
            NaN or inf; or ``start`` or ``duration`` is not a time.
    """
    path = Path(path)
    check_part(start, duration)
    if path.is_dir():
        raise SeparatorError(f"{path} is a folder; pass the audio files in it")
    if not path.exists():
        raise SeparatorError(f"{path} does not exist; check the path")
    if not path.is_file():
        raise SeparatorError(f"{path} is a pipe or device, which cannot be read twice; pass a file")
    if path.stat().st_size == 0:
        raise SeparatorError(f"{path} is empty (0 bytes); pass a file with audio in it")
    with open_decoder(path, warn) as file:
        rate, total = file.sample_rate, file.length
        if not (MIN_RATE <= rate <= MAX_RATE and 1 <= file.channels <= MAX_CHANNELS):
            raise SeparatorError(
                f"{path} says {rate} Hz and {counted(file.channels, 'channel')}; "
                f"pass a file of {MIN_RATE} to {MAX_RATE} Hz with at most {MAX_CHANNELS} channels"
            )
        first = round(start * rate)
        limit = None if duration is None else max(1, round(duration * rate))
        info = AudioInfo(
            path, rate, file.channels, 0, file.format, file.subtype, first=first, limit=limit, repair=repair
        )
    n_read = 0
    for block in read_blocks(info, warn=warn):
        n_read += block.shape[1]
        if total is not None and info.subtype not in ("FLOAT", "DOUBLE"):
            break  # integers are always finite, and one block shows that there are samples
    if n_read == 0:
        if first:
            whole = "" if total is None else f" (it has {total / rate:.2f} s)"
            raise SeparatorError(f"{path} has no samples from {start=} s on{whole}; pass an earlier start")
        raise SeparatorError(f"{path} has no samples (0 of {rate} Hz); pass a file with audio in it")
    if total is None:
        return replace(info, length=n_read)
    return replace(info, length=min(max(n_read, total - first), limit or total))


def check_part(start: float, duration: float | None) -> None:
    """Check the times that choose a part of a file.

    Raises:
        SeparatorError: ``start`` or ``duration`` is no time.
    """
    if not (math.isfinite(start) and start >= 0):
        raise SeparatorError(f"{start=} is no time in a file; pass seconds from 0")
    if duration is not None and not (math.isfinite(duration) and duration > 0):
        raise SeparatorError(f"{duration=} is no duration; pass seconds above 0, or None to read to the end")


def read_audio(path: str | Path) -> AudioFile:
    """Read a whole file.

    Raises:
        SeparatorError: as `inspect_audio`.
    """
    info = inspect_audio(path)
    blocks = [block.astype(np.float32) for block in read_blocks(info)]
    return AudioFile(np.concatenate(blocks, axis=1), info)


def read_blocks(info: AudioInfo, size: int = BLOCK_SAMPLES, *, warn: Warn = ignore) -> Iterator[Samples]:
    """Yield float64 blocks (channel, time) of at most ``size`` samples of what ``info`` describes.

    Raises:
        SeparatorError: a sample is NaN or inf (unless repaired), or the file cannot be opened any more.
    """
    bad = _BadSamples(info)
    with open_decoder(info.path, ignore) as file:
        position = file.skip(info.first)
        stop = None if info.limit is None else info.first + info.limit
        for block in file.blocks(size, warn):
            begin, position = position, position + block.shape[1]
            part = block[:, max(0, info.first - begin) : None if stop is None else max(0, stop - begin)]
            if part.shape[1]:
                yield bad.checked(part, max(begin, info.first))
            if stop is not None and position >= stop:
                break
    bad.report(warn)


class _BadSamples:
    """Samples that are NaN or inf: refused or, counted, taken as 0."""

    def __init__(self, info: AudioInfo) -> None:
        self.info = info
        self.count = 0
        self.where = ""

    def checked(self, block: Samples, position: int) -> Samples:
        """Return a block (channel, time) that starts at sample ``position`` with finite numbers only.

        Raises:
            SeparatorError: it has others, and they are not to be repaired.
        """
        finite = np.isfinite(block)
        if finite.all():
            return block
        if not self.count:
            channel, sample = min(np.argwhere(~finite).tolist(), key=lambda where: where[1])
            self.where = f"{block[channel, sample]} at sample {position + sample} of channel {channel + 1}"
        if not self.info.repair:
            raise SeparatorError(
                f"{self.info.path} has {self.where}; pass a file whose samples are all finite numbers, "
                "or repair=True (--repair), which takes the others as 0"
            )
        self.count += int(finite.size - finite.sum())
        return np.where(finite, block, 0.0)

    def report(self, warn: Warn) -> None:
        """Say how many were repaired."""
        if self.count:
            samples = counted(self.count, "sample")
            warn(f"{self.info.path}: {samples} of NaN or inf taken as 0, first {self.where}")


def windows(blocks: Iterable[Samples], hop: int, length: int) -> Iterator[Samples]:
    """Cut a stream of blocks (channel, time) into windows of ``length`` samples that start every ``hop``.

    The last window is the first that reaches the end of the stream; it may be shorter.

    >>> [w.tolist() for w in windows([np.arange(4.0)[None], np.arange(4.0, 7.0)[None]], hop=3, length=4)]
    [[[0.0, 1.0, 2.0, 3.0]], [[3.0, 4.0, 5.0, 6.0]]]
    """
    held: list[Samples] = []
    n_held = 0
    for block in blocks:
        held.append(block)
        n_held += block.shape[1]
        while n_held > length:  # more than a window, so this one is not the last
            joined = np.concatenate(held, axis=1) if len(held) > 1 else held[0]
            yield joined[:, :length]
            held, n_held = [joined[:, hop:]], joined.shape[1] - hop
    if n_held:
        yield np.concatenate(held, axis=1)


def resample(waveform: "Tensor", from_rate: int, to_rate: int) -> "Tensor":
    """Resample (..., time) to ``round(time * to_rate / from_rate)`` samples, at least one.

    A pair of rates whose ratio needs a longer period than `MAX_PERIOD` is taken to the nearest ratio that
    does not; the difference is below one part in six million.

    Raises:
        SeparatorError: a rate is not positive.
    """
    if from_rate < 1 or to_rate < 1:
        raise SeparatorError(
            f"{from_rate=} Hz to {to_rate=} Hz: rates must be positive; pass the file's own rate"
        )
    if from_rate == to_rate:
        return waveform
    from torch.nn.functional import pad
    from torchaudio.functional import resample as sinc_resample

    ratio = Fraction(to_rate, from_rate)
    near = (
        ratio.limit_denominator(MAX_PERIOD) if ratio <= 1 else 1 / (1 / ratio).limit_denominator(MAX_PERIOD)
    )
    length = max(1, round(waveform.shape[-1] * ratio))
    result = sinc_resample(waveform, near.denominator, near.numerator, lowpass_filter_width=32, rolloff=0.97)
    return pad(result, (0, max(0, length - result.shape[-1])))[..., :length]
