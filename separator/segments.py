"""The network over a whole file: overlapping segments, one identity a stem, one stream of masks.

The network hears segments of `SEGMENT_SECONDS` that overlap by `OVERLAP_SECONDS`. Which slot of a segment
continues which stem is decided by linear assignment on a similarity that compares, where a stem sounds in the
overlap, what both segments gave it there, and otherwise the mean spectra of stem and slot. Masks are
cross-faded over the overlap: as convex combinations they still sum to one with the residual's. A file of one
segment is heard in one piece.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from separator.audio import Samples, resample, windows
from separator.network import FRAMES_PER_TOKEN, Decomposition, SeparationNetwork
from separator.rendering import MaskSpool
from separator.results import FloatArray, Overview
from separator.stft import STFT

SEGMENT_SECONDS = 10
OVERLAP_SECONDS = 2
SEED = 0  # of the noise on the slots' start, the same in every segment of every run
UNLIKE = 0.5  # a slot less similar than this to a stem goes rather to a stem that is silent so far
EXISTING_SHARE = 0.2  # of a stem's energy; the more, the sooner a short sound is lost for the whole file
OVERVIEW_COLUMNS = 1000


class Analysis(NamedTuple):
    """What the network says about a whole file."""

    spool: MaskSpool
    existence: FloatArray
    """(slot,), probability that it is a source: what segments with `EXISTING_SHARE` of its energy reach."""
    overview: Overview
    evidence: FloatArray | None
    """(slot + 1, band, token time), where it was asked for and the model has any."""
    length: int
    """Samples that were heard."""


class _Heard(NamedTuple):
    """One segment: what the network says, and the power of its view."""

    masks: Tensor  # (slot, frequency, time)
    existence: Tensor  # (slot,)
    evidence: Tensor | None  # (slot + 1, band, token time)
    power: Tensor  # (frequency, time)


def analyse(
    network: SeparationNetwork,
    blocks: Iterable[Samples],
    sample_rate: int,
    *,
    n_slots: int,
    length: int,
    segment_seconds: int = SEGMENT_SECONDS,
    keep_evidence: bool = False,
    spool_dir: Path | None = None,
    progress: Callable[[float], None] = lambda share: None,
) -> Analysis:
    """Run ``network`` over a stream of blocks (channel, time) of about ``length`` samples.

    ``progress`` is told the share that is done. The largest part of a file that is held is a segment; the
    masks of many go to a temporary file in ``spool_dir``. ``keep_evidence`` holds all of it in memory.

    Raises:
        SeparatorError: the disk is full.
    """
    config = network.config
    device = next(network.parameters()).device
    stft = STFT(config.n_fft, config.hop_length).to(device)
    hop = (segment_seconds - OVERLAP_SECONDS) * config.sample_rate // config.hop_length  # frames
    n_frames = stft.n_frames(length * config.sample_rate // sample_rate)
    spool = MaskSpool(n_slots, stft.n_frequencies, spool_dir)
    stitcher = _Stitcher(spool, n_slots, hop, n_frames, keep_evidence)
    n_samples = 0
    stride = (segment_seconds - OVERLAP_SECONDS) * sample_rate
    try:
        for index, segment in enumerate(windows(blocks, stride, segment_seconds * sample_rate)):
            waveform = torch.from_numpy(segment.astype(np.float32)).to(device)
            view = mono_view(stft(resample(waveform, sample_rate, config.sample_rate)))
            stitcher.add(_hear(network, view, n_slots))
            n_samples = index * stride + segment.shape[1]
            progress(min(1.0, n_samples / max(1, length)))
    except BaseException:
        spool.close()
        raise
    return stitcher.finish(n_samples, sample_rate, config.sample_rate)


def mono_view(spectrogram: Tensor) -> Tensor:
    """The model's view (frequency, time) of the channels' spectrograms (channel, frequency, time).

    One channel is taken as it is. Of several, every bin has the mean power and the phase of the loudest, so
    nothing cancels: neither R = -L nor two microphones apart.
    """
    if spectrogram.shape[0] == 1:
        return spectrogram[0]
    magnitude = spectrogram.abs()
    loudest = spectrogram.gather(0, magnitude.argmax(0, keepdim=True))[0]
    return magnitude.square().mean(0).sqrt() * torch.sgn(loudest)


def _hear(network: SeparationNetwork, view: Tensor, n_slots: int) -> _Heard:
    """Run the network on the spectrogram of a segment."""
    devices = [view.device] if view.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.inference_mode():
        torch.manual_seed(SEED)
        out: Decomposition = network(view[None], n_slots=n_slots)
    masks = out.masks[0].float().cpu()
    existence = torch.sigmoid(out.existence_logits[0].float()).cpu()
    evidence = None
    if out.evidence is not None:
        evidence = torch.cat(out.evidence).float().cpu().unflatten(1, out.token_grid)
    return _Heard(masks, existence, evidence, view.abs().square().cpu())


class _Stitcher:
    """Joins segments into one stream of masks and sums up what is said about each stem."""

    def __init__(self, spool: MaskSpool, n_slots: int, hop: int, n_frames: int, keep_evidence: bool) -> None:
        self.spool = spool
        self.hop = hop  # frames from one segment to the next
        self.spectra = torch.zeros(n_slots, spool.n_frequencies)  # energy of each stem so far
        self.existence = [[0.0] * n_slots]  # of each stem in every segment, after one without sound
        self.energy = [[0.0] * n_slots]
        self.n_heard = 0  # frames
        self.tail: tuple[Tensor, Tensor] | None = None  # masks and power that the next segment overlaps
        per_column = -(-n_frames // OVERVIEW_COLUMNS)
        self.picture = _Thinned(per_column)
        self.evidence = _Evidence(hop, -(-per_column // FRAMES_PER_TOKEN), keep_evidence)

    def add(self, heard: _Heard) -> None:
        """Append a segment."""
        masks, power = heard.masks, heard.power
        spectra = (masks * power).sum(-1)
        existence = heard.existence
        if self.tail is not None:
            order = self._continuation(heard, spectra)
            masks, spectra, existence = masks[order], spectra[order], existence[order]
            masks = _cross_fade(self.tail[0], masks)
        self.spectra += spectra
        self.existence.append(existence.tolist())
        self.energy.append(spectra.sum(1).tolist())
        self.n_heard += power.shape[-1]
        if heard.evidence is not None:
            self.evidence.add(heard.evidence)
        self._emit(masks[..., : self.hop], power[..., : self.hop])
        self.tail = masks[..., self.hop :], power[..., self.hop :]

    def finish(self, length: int, sample_rate: int, view_rate: int) -> Analysis:
        """Append the last segment's end and sum up."""
        if self.tail is not None:
            self._emit(*self.tail)
        existence = _whole_existence(torch.tensor(self.existence), torch.tensor(self.energy))
        power = self.picture.finish()
        evidence, whole = self.evidence.finish()
        overview = Overview(power[0], power[1:], evidence, length / sample_rate, view_rate)
        return Analysis(self.spool, existence.numpy(), overview, whole, length)

    def _emit(self, masks: Tensor, power: Tensor) -> None:
        self.spool.append(masks)
        self.picture.add(torch.cat([power[None], masks.square() * power]))

    def _continuation(self, heard: _Heard, spectra: Tensor) -> list[int]:
        """For every stem, the slot of the new segment that continues it."""
        from scipy.optimize import linear_sum_assignment  # takes a fifth of a second; short files need none

        old_masks, power = self.tail or (heard.masks, heard.power)
        n = old_masks.shape[-1]
        old = old_masks * power.sqrt()
        new = heard.masks[..., :n] * heard.power[..., :n].sqrt()
        old_energy, new_energy = self.spectra.sum(1), spectra.sum(1)
        old_presence = _presence(old, old_energy, self.n_heard)
        new_presence = _presence(new, new_energy, heard.power.shape[-1])
        presence = torch.minimum(old_presence[:, None], new_presence)
        alike = presence * _cosines(old.flatten(1), new.flatten(1))
        alike += (1 - presence) * _cosines(self.spectra.sqrt(), spectra.sqrt())
        importance = (old_energy[:, None] * new_energy) ** 0.25
        _, order = linear_sum_assignment((importance * (alike - UNLIKE)).numpy(), maximize=True)
        return [int(slot) for slot in order]


class _Evidence:
    """Evidence (step, band, token time) of segments in one stream, thinned out and, if asked for, whole."""

    def __init__(self, hop: int, per_column: int, keep: bool) -> None:
        self.hop = hop / FRAMES_PER_TOKEN  # tokens
        self.thinned = _Thinned(per_column)
        self.whole: list[Tensor] | None = [] if keep else None
        self.last: Tensor | None = None  # of the last segment, from where the one before it ended
        self.n_segments = 0
        self.n_emitted = 0  # tokens

    def add(self, evidence: Tensor) -> None:
        """Append a segment's; two are cut mid-overlap, where the cross-fade of their masks is even."""
        begin = round(self.n_segments * self.hop)  # token at which this segment begins
        if self.last is not None:
            late = (self.n_emitted + self.last.shape[-1] - begin) // 2
            self._emit(self.last[..., : begin + late - self.n_emitted])
            evidence = evidence[..., late:]
        self.last = evidence.half()
        self.n_segments += 1

    def finish(self) -> tuple[FloatArray | None, FloatArray | None]:
        """Return it thinned out and whole."""
        if self.last is None:
            return None, None
        self._emit(self.last)
        return self.thinned.finish(), torch.cat(self.whole, -1).float().numpy() if self.whole else None

    def _emit(self, evidence: Tensor) -> None:
        self.n_emitted += evidence.shape[-1]
        self.thinned.add(evidence.float())
        if self.whole is not None:
            self.whole.append(evidence.clone())


class _Thinned:
    """Means of (row, frequency, time) over ``n`` frames a column; over more where columns become too many.

    What it keeps has one size from the beginning: small pieces kept for long would hold much memory around
    them.
    """

    def __init__(self, n: int) -> None:
        self.n = max(1, n)
        self.n_columns = 0
        self.columns: Tensor | None = None  # (row, frequency, column), with room for all
        self.n_summed = 0  # frames of the next column
        self.sum: Tensor | None = None  # (row, frequency)

    def add(self, values: Tensor) -> None:
        """Append frames."""
        if self.columns is None or self.sum is None:
            self.columns = values.new_zeros((*values.shape[:-1], 2 * OVERVIEW_COLUMNS))
            self.sum = values.new_zeros(values.shape[:-1])
        while values.shape[-1]:
            count = min(values.shape[-1] // self.n, self.columns.shape[-1] - self.n_columns)
            if self.n_summed or not count:  # a part of a column
                piece, values = values.tensor_split([self.n - self.n_summed], -1)
                self.n_summed += piece.shape[-1]
                self.sum += piece.sum(-1)
                if self.n_summed == self.n:
                    self._end_column(self.columns, self.sum)
                continue
            whole, values = values.tensor_split([count * self.n], -1)
            means = whole.unflatten(-1, (count, self.n)).mean(-1)
            self.columns[..., self.n_columns : self.n_columns + count] = means
            self.n_columns += count
            self._make_room(self.columns)

    def finish(self) -> FloatArray:
        """Return (row, frequency, column)."""
        if self.columns is None or self.sum is None:
            return np.zeros((0, 0, 0), np.float32)
        if self.n_summed:
            self._end_column(self.columns, self.sum)
        return self.columns[..., : self.n_columns].clone().numpy()

    def _end_column(self, columns: Tensor, total: Tensor) -> None:
        """Put down the mean of the frames summed so far."""
        columns[..., self.n_columns] = total / self.n_summed
        total.zero_()
        self.n_summed = 0
        self.n_columns += 1
        self._make_room(columns)

    def _make_room(self, columns: Tensor) -> None:
        """Let two columns become one where there is no room for another."""
        if self.n_columns == columns.shape[-1]:
            self.n_columns //= 2
            columns[..., : self.n_columns] = columns.unflatten(-1, (self.n_columns, 2)).mean(-1)
            self.n *= 2


def _whole_existence(existence: Tensor, energy: Tensor) -> Tensor:
    """Probability of each stem of (segment, stem) that segments with `EXISTING_SHARE` of its energy reach.

    A source sounds in a part of a file, and there only some segments show it. What this returns is what a
    segment said, so a threshold means for a file what it means for a segment. A stem without energy has none;
    what two segments overlap in counts for both.
    """
    falling, order = existence.sort(0, descending=True)
    energy = energy.double().gather(0, order).cumsum(0)
    reached = (energy >= EXISTING_SHARE * energy[-1]) & (energy > 0)
    return torch.where(reached, falling, 0.0).amax(0)


def _cross_fade(tail: Tensor, masks: Tensor) -> Tensor:
    """``masks`` whose first frames come in as ``tail`` goes out; outermost frames weigh nothing."""
    n = tail.shape[-1]
    weight = torch.linspace(0, 1, n)
    return torch.cat([torch.lerp(tail, masks[..., :n], weight), masks[..., n:]], -1)


def _presence(amplitude: Tensor, energy: Tensor, n_frames: int) -> Tensor:
    """Mean power of (slot, frequency, time) over that of ``energy`` in ``n_frames``, at most one."""
    mean = amplitude.square().sum((1, 2)) / amplitude.shape[-1]
    return (mean * n_frames / energy.clamp(min=1e-30)).clamp(max=1)


def _cosines(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every row of ``a`` with every row of ``b``; zero where a row is zero."""
    return torch.nn.functional.normalize(a, dim=-1) @ torch.nn.functional.normalize(b, dim=-1).T
