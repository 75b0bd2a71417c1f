"""Masks of the model's view to estimates at a file's own rate, window by window.

The model's masks lie on frames of ``hop_length / sample_rate`` seconds and bins of ``sample_rate / n_fft``
Hz. A file of another rate is transformed with a window of about the same duration, and the masks are
interpolated linearly to its frames and bins; at the model's rate they are taken as they are. Bins above the
model's band follow its top band.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from separator.audio import Samples, windows
from separator.errors import SeparatorError
from separator.masks import apply_masks
from separator.stft import STFT

HOP_STEP = 16  # hops are multiples of it, so that every common rate has a fast transform
TOP_BAND_SHARE = 1 / 8  # of the model's band: its mean mask holds above the band
SPOOL_BYTES = 1 << 22  # masks beyond this go to a temporary file
WINDOW_VALUES = 1 << 19  # complex values of all estimates in a window: bounds the memory


class MaskSpool:
    """Masks of a whole file as float16, frame after frame; in a temporary file when they are many.

    The file has no name (where the system allows that), so it goes with the process, however that ends. It
    is in ``folder``, or where temporary files are kept, and takes 2 bytes a slot, frequency and frame.
    """

    def __init__(self, n_slots: int, n_frequencies: int, folder: Path | None = None) -> None:
        self.n_frames = 0
        self.n_frequencies = n_frequencies
        self._folder = folder
        self._shape = (n_slots, n_frequencies)
        self._frame_bytes = 2 * n_slots * n_frequencies
        self._file = tempfile.SpooledTemporaryFile(SPOOL_BYTES, dir=str(folder) if folder else None)  # noqa: SIM115 (kept open)

    def append(self, masks: Tensor) -> None:
        """Add masks (slot, frequency, time).

        Raises:
            SeparatorError: the disk is full.
        """
        data = masks.permute(2, 0, 1).to("cpu", torch.float16).contiguous().numpy().tobytes()
        try:
            self._file.seek(self.n_frames * self._frame_bytes)
            self._file.write(data)
        except OSError as error:
            raise SeparatorError(
                f"masks cannot be kept in {self._folder or tempfile.gettempdir()} ({error.strerror}); "
                "free the disk or pass another output folder"
            ) from error
        self.n_frames += masks.shape[-1]

    def close(self) -> None:
        """Give up the masks and the room they take."""
        self._file.close()

    def read(self, start: int, stop: int) -> Tensor:
        """Masks (slot, frequency, time) of the frames from ``start`` to before ``stop``; the ends repeat."""
        frames = torch.arange(start, stop).clamp(0, self.n_frames - 1)
        first, last = int(frames[0]), int(frames[-1])
        self._file.seek(first * self._frame_bytes)
        data = self._file.read((last + 1 - first) * self._frame_bytes)
        masks = torch.from_numpy(np.frombuffer(data, np.float16).reshape(-1, *self._shape).astype(np.float32))
        return masks[frames - first].permute(1, 2, 0)


class Renderer:
    """Applies the masks in ``spool``, made by ``model_stft`` at ``model_rate``, at ``sample_rate``."""

    def __init__(self, spool: MaskSpool, model_stft: STFT, model_rate: int, sample_rate: int) -> None:
        self.spool = spool
        hop = model_stft.hop_length
        if sample_rate != model_rate:
            hop = HOP_STEP * max(1, round(hop * sample_rate / model_rate / HOP_STEP))
        self.stft = STFT(hop * model_stft.overlaps, hop)
        self._frame_ratio = Fraction(hop * model_rate, model_stft.hop_length * sample_rate)
        self._centre = model_stft.overlaps / 2 - 1  # frame t is centred on (t - centre) hops
        top = model_stft.n_frequencies - 1
        bins = _scale(
            torch.arange(self.stft.n_frequencies, dtype=torch.float64),
            Fraction(sample_rate * model_stft.n_fft, model_rate * self.stft.n_fft),
        )
        self._bins = bins[bins <= top]  # in the model's band, counted in its bins
        self._top_band = max(1, round(top * TOP_BAND_SHARE))

    def masks(self, start: int, n_frames: int, slots: Sequence[int]) -> Tensor:
        """Masks (slot, frequency, time) of ``slots`` on ``n_frames`` frames of the file's own transform."""
        frames = torch.arange(start, start + n_frames, dtype=torch.float64)
        positions = _scale(frames - self._centre, self._frame_ratio) + self._centre
        first = math.floor(positions[0])
        found = self.spool.read(first, math.floor(positions[-1]) + 2)[list(slots)]
        found = _interpolate(found, positions - first)
        top = found[:, -self._top_band :].mean(1, keepdim=True)
        inside = _interpolate(found.transpose(1, 2), self._bins).transpose(1, 2)
        return torch.cat([inside, top.expand(-1, self.stft.n_frequencies - len(self._bins), -1)], 1)

    def render(self, blocks: Iterable[Samples], slots: Sequence[int]) -> Iterator[tuple[Samples, Samples]]:
        """Yield stretch after stretch of the input (channel, time) and the estimates of ``slots`` on it.

        A window holds one transform length of context on either side, all that reaches into its middle, so
        the estimates are those of one transform of the whole stream, however it is cut.
        """
        blocks = iter(blocks)
        first = next(blocks)
        n_channels = first.shape[0]
        context = self.stft.n_fft
        values = max(1, len(slots)) * n_channels * self.stft.n_frequencies
        n_frames = max(self.stft.overlaps, WINDOW_VALUES // values)
        size = n_frames * self.stft.hop_length
        silence = np.zeros((n_channels, context))
        padded = chain([silence, first], blocks, [silence])
        for index, window in enumerate(windows(padded, size, size + 2 * context)):
            core = slice(context, window.shape[1] - context)
            start = index * n_frames - self.stft.overlaps
            yield window[:, core], self._estimates(window, start, slots)[..., core]

    def _estimates(self, window: Samples, start: int, slots: Sequence[int]) -> Samples:
        """Estimates (source, channel, time) of a window whose first frame is ``start``."""
        waveform = torch.from_numpy(window.astype(np.float32))
        if not slots:
            return np.zeros((0, *window.shape), np.float32)
        spectrogram = self.stft(waveform)  # (channel, frequency, time)
        masks = self.masks(start, spectrogram.shape[-1], slots)
        masked = apply_masks(masks, spectrogram)  # (channel, source, frequency, time)
        return self.stft.inverse(masked, window.shape[1]).transpose(0, 1).numpy()


def _scale(values: Tensor, ratio: Fraction) -> Tensor:
    """``values * ratio``, exact where the result is whole: there masks must be taken as they are."""
    return values * ratio.numerator / ratio.denominator


def _interpolate(values: Tensor, positions: Tensor) -> Tensor:
    """Linear interpolation along the last dimension at ``positions``; beyond the last value it stays."""
    left = positions.floor().long().clamp(max=values.shape[-1] - 1)
    right = (left + 1).clamp(max=values.shape[-1] - 1)
    return torch.lerp(values[..., left], values[..., right], (positions - left).to(values.dtype))
