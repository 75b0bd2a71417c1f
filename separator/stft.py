"""The short-time Fourier transform at the front and the end of the pipeline; it owns all frame arithmetic.

The square root of a periodic Hann window is used twice, for analysis and for synthesis. Its square sums to
a constant over the frames whenever the hop divides the window at least twice, so it is a tight frame:
the inverse is the adjoint, reconstruction is exact up to both edges, and (with the constant divided out) the
energy of a spectrogram is the energy of its waveform. Frame t is centred on sample
``t * hop_length - n_fft / 2 + hop_length``.

Reference: Allen and Rabiner, "A unified approach to short-time Fourier analysis and synthesis", 1977.
"""

import math

import torch
from torch import Tensor, nn

from separator.errors import SeparatorError
from separator.script import counted


class STFT(nn.Module):
    """A frozen tight-frame STFT: ``forward`` analyses, ``inverse`` synthesises.

    Raises:
        SeparatorError: ``hop_length`` does not divide ``n_fft`` at least twice.
    """

    window: Tensor

    def __init__(self, n_fft: int = 512, hop_length: int = 256) -> None:
        super().__init__()
        if hop_length < 1 or n_fft % hop_length or n_fft < 2 * hop_length:
            raise SeparatorError(
                f"{hop_length=} does not divide {n_fft=} two or more times; pass for example n_fft // 2"
            )
        self.n_fft = n_fft
        self.hop_length = hop_length
        self.overlaps = n_fft // hop_length
        # periodic Hann: w^2 sums to overlaps / 2 over the frames; divided out, analysis keeps energy
        hann = torch.hann_window(n_fft, periodic=True, dtype=torch.float64)
        window = torch.sqrt(hann / (self.overlaps / 2)).float()
        self.register_buffer("window", window, persistent=False)

    @property
    def n_frequencies(self) -> int:
        """Frequency bins of a spectrogram, DC and Nyquist included."""
        return self.n_fft // 2 + 1

    def n_frames(self, length: int) -> int:
        """Frames that cover ``length`` samples, each sample by the same number of frames."""
        return math.ceil(length / self.hop_length) + self.overlaps - 1

    def forward(self, waveform: Tensor) -> Tensor:
        """Analyse ``waveform`` (..., time) into a complex spectrogram (..., frequency, time)."""
        length = waveform.shape[-1]
        left = self.n_fft - self.hop_length
        padded_length = (self.n_frames(length) - 1) * self.hop_length + self.n_fft
        padded = nn.functional.pad(waveform, (left, padded_length - left - length))
        frames = padded.unfold(-1, self.n_fft, self.hop_length)  # (..., time, n_fft)
        spectrum: Tensor = torch.fft.rfft(frames * self.window, norm="ortho")
        return spectrum.transpose(-1, -2)

    def inverse(self, spectrogram: Tensor, length: int) -> Tensor:
        """Synthesise (..., frequency, time) into the ``length`` samples that were analysed.

        Raises:
            SeparatorError: the spectrogram's frames are not those of ``length`` samples.
        """
        n_frames = spectrogram.shape[-1]
        if n_frames != self.n_frames(length):
            raise SeparatorError(
                f"{counted(n_frames, 'frame')} cannot make {counted(length, 'sample')}; "
                f"pass a spectrogram of {counted(self.n_frames(length), 'frame')}"
            )
        frames = torch.fft.irfft(spectrogram.transpose(-1, -2), n=self.n_fft, norm="ortho") * self.window
        pieces = frames.unflatten(-1, (self.overlaps, self.hop_length))  # (..., time, overlap, hop)
        hops = n_frames + self.overlaps - 1
        padded = pieces.new_zeros((*pieces.shape[:-3], hops, self.hop_length))
        for overlap in range(self.overlaps):
            padded[..., overlap : overlap + n_frames, :] += pieces[..., overlap, :]
        left = self.n_fft - self.hop_length
        waveform: Tensor = padded.flatten(-2)[..., left : left + length]
        return waveform
