"""Audio files and sample rates at the front of the pipeline.

Files are read by libsndfile (soundfile). A waveform is (channel, time), in [-1, 1] where the file has
integers. Every check that needs no model stands here and imports no torch, so that a bad file is refused at
once.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import soundfile

from separator.errors import SeparatorError

if TYPE_CHECKING:
    from torch import Tensor

Samples = npt.NDArray[np.floating[Any]]

BLOCK_SAMPLES = 1 << 18  # samples a channel that are read at a time
MAX_PERIOD = 2560  # 192 kHz to 11.025 kHz; the resampling filter holds about the square of it
READABLE = "wav, flac, ogg, opus, mp3, aiff or au"


@dataclass(frozen=True)
class AudioInfo:
    """What a readable audio file says of itself."""

    path: Path
    sample_rate: int
    channels: int
    length: int
    """Samples a channel, as the header says."""
    format: str
    """libsndfile's name of the container, such as ``WAV``."""
    subtype: str
    """libsndfile's name of the coding of a sample, such as ``PCM_16``."""


@dataclass(frozen=True)
class AudioFile:
    """A whole file in memory: ``waveform`` (channel, time) float32 and where it comes from."""

    waveform: npt.NDArray[np.float32]
    info: AudioInfo

    @property
    def sample_rate(self) -> int:
        """The file's own rate, Hz."""
        return self.info.sample_rate


def inspect_audio(path: str | Path) -> AudioInfo:
    """Check that ``path`` is audio that can be separated, without any model.

    Raises:
        SeparatorError: the file is missing, a folder, empty, not audio, has no samples, or one is NaN or inf.
    """
    path = Path(path)
    if path.is_dir():
        raise SeparatorError(f"{path} is a folder; pass the audio files in it")
    if not path.exists():
        raise SeparatorError(f"{path} does not exist; check the path")
    if path.is_file() and path.stat().st_size == 0:
        raise SeparatorError(f"{path} is empty (0 bytes); pass a file with audio in it")
    with _open(path) as file:
        info = AudioInfo(path, file.samplerate, file.channels, file.frames, file.format, file.subtype)
    position = 0
    for block in read_blocks(path):
        finite = np.isfinite(block)
        if not finite.all():
            channel, sample = min(np.argwhere(~finite).tolist(), key=lambda where: where[1])
            raise SeparatorError(
                f"{path} has {block[channel, sample]} at sample {position + sample} of channel {channel + 1}"
                "; pass a file whose samples are all finite numbers"
            )
        position += block.shape[1]
        if info.subtype not in ("FLOAT", "DOUBLE"):
            break  # integers are always finite, and one block shows that there are samples
    if position == 0:
        raise SeparatorError(
            f"{path} has no samples (0 of {info.sample_rate} Hz); pass a file with audio in it"
        )
    return info


def read_audio(path: str | Path) -> AudioFile:
    """Read a whole file.

    Raises:
        SeparatorError: as `inspect_audio`, or the file breaks off in a way that cannot be decoded.
    """
    info = inspect_audio(path)
    blocks = [block.astype(np.float32) for block in read_blocks(info.path)]
    return AudioFile(np.concatenate(blocks, axis=1), info)


def read_blocks(path: Path, size: int = BLOCK_SAMPLES) -> Iterator[Samples]:
    """Yield float64 blocks (channel, time) of at most ``size`` samples to the end of the file.

    Raises:
        SeparatorError: the data cannot be decoded.
    """
    with _open(path) as file:
        while True:
            try:
                block = file.read(size, dtype="float64", always_2d=True)
            except soundfile.LibsndfileError as error:
                raise SeparatorError(
                    f"{path} cannot be decoded ({_reason(error)}); restore the file"
                ) from error
            if not len(block):
                return
            yield np.ascontiguousarray(block.T)


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


def _open(path: Path) -> soundfile.SoundFile:
    """Open for reading.

    Raises:
        SeparatorError: libsndfile does not know the content.
    """
    try:
        return soundfile.SoundFile(path)
    except soundfile.LibsndfileError as error:
        reason = _reason(error)
    except TypeError:
        reason = "raw samples without a header"
    raise SeparatorError(f"{path} is not audio that can be read ({reason}); pass a {READABLE} file")


def _reason(error: soundfile.LibsndfileError) -> str:
    """What libsndfile says, as part of a sentence."""
    return str(error.error_string).strip().rstrip(".")
