"""The public API: a waveform or a file of any length, rate and channels into sources and a residual.

Two passes: the first lets the network hear the input and keeps its masks, from which is decided, once for the
whole input, which slots are sources; the second applies the masks of those at the input's own rate. What no
source takes is the residual, so sources + residual = input. `Separator.separate` works in memory,
`Separator.separate_file` from file to files in bounded memory; both give the same stems.
"""

import math
import warnings
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from separator.audio import MAX_CHANNELS, Samples, Warn, inspect_audio, read_blocks
from separator.checkpoint import load_model
from separator.errors import SeparatorError
from separator.formats import choose_coding
from separator.naming import MAX_SLOTS, TEMPLATE, StemNames
from separator.network import SeparationNetwork
from separator.rendering import Renderer
from separator.results import FileSeparation
from separator.segments import SEGMENT_SECONDS, Analysis, analyse
from separator.stems import StemSet, check_replaceable, check_writable
from separator.stft import STFT
from separator.writing import Stem

SMALL_SEGMENT_SECONDS = 6  # what is tried where a device has no memory for more
ANALYSIS_SHARE = 0.8  # of the time of a run, as the progress shows it

Array = TypeVar("Array", npt.NDArray[Any], Tensor)


def warn_python(message: str) -> None:
    """Take a warning to Python's own ones."""
    warnings.warn(message, stacklevel=3)


@dataclass(frozen=True)
class Separation(Generic[Array]):
    """A waveform taken apart; arrays are of the kind that was given, sources ordered by falling energy."""

    estimates: Array
    """(source, channel, time)."""
    residual: Array
    """(channel, time): the input minus the estimates."""
    existence: Array
    """(source,), probability that it is a source."""
    masks: Array
    """(source, frequency, time) in the model's view."""
    evidence: Array | None
    """(slot + 1, band, token time): share nobody has explained before the first and after every slot, in the
    order of decoding; None for a model whose slots do not deplete evidence."""
    sample_rate: int


class Separator:
    """A network ready to separate; `load` makes one from a model's name or folder.

    With ``fall_back`` a device without enough memory is given smaller segments, and if those are too large
    the network goes to the CPU for good.
    """

    def __init__(self, network: SeparationNetwork, *, fall_back: bool = False) -> None:
        if network.training:
            raise SeparatorError(f"{network.training=}; call network.eval() before separating")
        self.network = network
        self.fall_back = fall_back

    @classmethod
    def load(cls, name_or_dir: str | Path = "soundscapes", device: str = "auto") -> "Separator":
        """Load a shipped model by name, or one from its folder.

        ``auto`` takes a GPU if there is one, and falls back from it when its memory is full.

        Raises:
            SeparatorError: there is no such model, its files are corrupt, or there is no such device.
        """
        return cls(load_model(name_or_dir, _pick_device(device)), fall_back=device == "auto")

    def separate(
        self,
        waveform: Array,
        sample_rate: int,
        n_slots: int = 4,
        min_existence: float | None = None,
        *,
        warn: Warn = warn_python,
    ) -> Separation[Array]:
        """Separate a waveform (channel, time), floats, into at most ``n_slots`` sources and a residual.

        ``min_existence`` is the probability from which a slot counts as a source: None means the model's own
        threshold, and 0 returns every slot.

        Raises:
            SeparatorError: the waveform, the rate, ``n_slots`` or ``min_existence`` is not as described.
        """
        threshold = self._threshold(n_slots, min_existence)
        samples = _checked(waveform, sample_rate)
        analysis = self._analyse(
            lambda: [samples],
            sample_rate,
            warn,
            n_slots=n_slots,
            length=samples.shape[1],
            keep_evidence=True,
        )
        slots = _sources(analysis, threshold)
        with closing(analysis.spool):
            stretches = list(self._renderer(analysis, sample_rate).render([samples], slots))
            masks = analysis.spool.read(0, analysis.spool.n_frames).numpy()
        estimates = np.concatenate([block for _, block in stretches], axis=-1)
        order = np.argsort(-np.square(estimates, dtype=np.float64).sum((1, 2)), kind="stable")
        slots = [slots[k] for k in order]
        estimates = estimates[order]
        evidence = analysis.evidence

        def back(values: Samples) -> Array:
            """Of the kind that was given."""
            if isinstance(waveform, Tensor):
                return torch.from_numpy(np.ascontiguousarray(values)).to(waveform.device)
            return values

        return Separation(
            estimates=back(estimates),
            residual=back(samples - estimates.sum(0)),
            existence=back(analysis.existence[slots]),
            masks=back(masks[slots]),
            evidence=None if evidence is None else back(evidence),
            sample_rate=sample_rate,
        )

    def separate_file(
        self,
        path: str | Path,
        output_dir: str | Path = "separated",
        n_slots: int = 4,
        min_existence: float | None = None,
        *,
        filename: str = TEMPLATE,
        folder: str = "",
        format: str = "wav",
        subtype: str | None = None,
        start: float = 0.0,
        duration: float | None = None,
        repair: bool = False,
        overwrite: bool = False,
        progress: Callable[[float], None] = lambda share: None,
        warn: Warn = warn_python,
    ) -> FileSeparation:
        """Separate a file into ``<output_dir>/<stem>/source1.wav ... residual.wav``; else as `separate`.

        ``filename`` and ``folder`` name the stems as in `naming.StemNames`. They have the file's rate,
        channels, length and, in a ``format`` that has it and without a ``subtype``, its coding of samples.
        ``start`` and ``duration``, seconds, choose a part of the file; ``repair`` takes samples that are NaN
        or inf as 0. ``progress`` is told the share that is done, ``warn`` what is wrong with the file.

        Raises:
            SeparatorError: the file cannot be read, the stems cannot be written or are there already.
        """
        threshold = self._threshold(n_slots, min_existence)
        warn = _once(warn)
        info = inspect_audio(path, start=start, duration=duration, repair=repair, warn=warn)
        coding = choose_coding(info, format, subtype)
        names = StemNames(info.path, Path(output_dir), filename, coding.extension, folder)
        names.check(overwrite)
        check_replaceable(names, n_slots)
        check_writable(output_dir)
        if coding.lossy:
            warn(f"{path}: {coding.format} is lossy, so the stems add up only about; in wav and flac exactly")
        analysis = self._analyse(
            lambda: read_blocks(info, warn=warn),
            info.sample_rate,
            warn,
            n_slots=n_slots,
            length=info.length,
            spool_dir=names.output_dir,
            progress=lambda share: progress(ANALYSIS_SHARE * share),
        )
        info = replace(info, length=analysis.length)
        slots = _sources(analysis, threshold)
        renderer = self._renderer(analysis, info.sample_rate)
        share_left = 1 - ANALYSIS_SHARE
        with closing(analysis.spool):
            written = _write_stems(
                renderer,
                lambda gain: StemSet(
                    names, len(slots), info, coding, gain=gain, overwrite=overwrite, warn=warn
                ),
                slots,
                lambda share: progress(ANALYSIS_SHARE + share_left * share),
            )
        slots = [slots[k] for k in written.order]
        view = analysis.overview
        return FileSeparation(
            input=info.path,
            sample_rate=info.sample_rate,
            channels=info.channels,
            seconds=info.length / info.sample_rate,
            gain_db=20 * math.log10(written.gain),
            sources=tuple(written.sources),
            existence=tuple(float(analysis.existence[s]) for s in slots),
            residual=written.residual,
            overview=replace(view, slots=view.slots[slots]),
        )

    def _analyse(
        self, blocks: Callable[[], Iterable[Samples]], sample_rate: int, warn: Warn, **options: Any
    ) -> Analysis:
        """Run the network, with less where its device has no memory for more.

        Raises:
            SeparatorError: there is no memory, and the device may not be left.
        """
        device = next(self.network.parameters()).device
        for seconds in (SEGMENT_SECONDS, SMALL_SEGMENT_SECONDS):
            try:
                return analyse(self.network, blocks(), sample_rate, segment_seconds=seconds, **options)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
            if not self.fall_back:
                raise SeparatorError(
                    f"{device=!s} has no memory left; free it, or pass device='auto' or 'cpu'"
                )
            if seconds == SEGMENT_SECONDS:
                warn(f"{device} has no memory for segments of {seconds} s; trying {SMALL_SEGMENT_SECONDS} s")
        warn(
            f"{device} has no memory for segments of {SMALL_SEGMENT_SECONDS} s either; going on with the CPU"
        )
        self.network.to("cpu")
        return analyse(self.network, blocks(), sample_rate, **options)

    def _threshold(self, n_slots: int, min_existence: float | None) -> float:
        """Check the options; return the probability from which a slot is a source."""
        if not isinstance(n_slots, int | np.integer) or not 1 <= n_slots <= MAX_SLOTS:
            raise SeparatorError(f"{n_slots=} is no whole number from 1 to {MAX_SLOTS}; pass one")
        if min_existence is None:
            return self.network.config.min_existence
        if not 0 <= min_existence <= 1:
            raise SeparatorError(f"{min_existence=} is no probability; pass a number from 0 to 1")
        return min_existence

    def _renderer(self, analysis: Analysis, sample_rate: int) -> Renderer:
        config = self.network.config
        stft = STFT(config.n_fft, config.hop_length)
        return Renderer(analysis.spool, stft, config.sample_rate, sample_rate)


class _Written(NamedTuple):
    """What was written for one input."""

    order: list[int]  # of the estimates, by falling energy
    sources: list[Stem]
    residual: Stem
    gain: float


def _write_stems(
    renderer: Renderer,
    stem_set: Callable[[float], StemSet],
    slots: list[int],
    progress: Callable[[float], None],
    gain: float = 1.0,
) -> _Written:
    """Apply the masks of ``slots`` to the file; again with a lower gain where a stem would clip."""
    length = 0
    with stem_set(gain) as stems:
        for mixture, estimates in renderer.render(read_blocks(stems.info), slots):
            stems.write(mixture, estimates)
            length += mixture.shape[1]
            progress(min(1.0, length / stems.info.length))
        fitting = stems.fitting_gain
        if fitting == gain:
            return _Written(*stems.publish(), gain)
    return _write_stems(renderer, stem_set, slots, progress, fitting)


def _once(warn: Warn) -> Warn:
    """Pass every message on once, though a file is read more than once."""
    said: set[str] = set()

    def warn_once(message: str) -> None:
        if message not in said:
            said.add(message)
            warn(message)

    return warn_once


def _sources(analysis: Analysis, threshold: float) -> list[int]:
    """Slots that count as sources."""
    return [s for s, p in enumerate(analysis.existence.tolist()) if p >= threshold]


def _pick_device(device: str) -> torch.device:
    """Resolve ``auto`` to a GPU where there is one.

    Raises:
        SeparatorError: torch does not know or have the device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise SeparatorError(f"{device=} cannot be used ({reason}); pass auto or cpu") from error


def _checked(waveform: npt.NDArray[Any] | Tensor, sample_rate: int) -> npt.NDArray[np.float32]:
    """Return the waveform as float32.

    Raises:
        SeparatorError: it is not (channel, time) of finite floats, or the rate is not positive.
    """
    values = waveform.detach().cpu().numpy() if isinstance(waveform, Tensor) else waveform
    if sample_rate < 1:
        raise SeparatorError(f"{sample_rate=} Hz is not positive; pass the waveform's own rate")
    if values.ndim != 2 or not 1 <= values.shape[0] <= MAX_CHANNELS or values.shape[1] < 1:
        raise SeparatorError(
            f"waveform has shape {values.shape}; pass (channel, time) with 1 to {MAX_CHANNELS} channels"
            ", a mono one as waveform[None]"
        )
    if not np.issubdtype(values.dtype, np.floating):
        raise SeparatorError(f"waveform is {values.dtype}; pass floats, 16-bit integers divided by 32768")
    if not np.isfinite(values).all():
        channel, sample = np.argwhere(~np.isfinite(values))[0]
        raise SeparatorError(
            f"waveform[{channel}, {sample}] is {values[channel, sample]}; pass finite numbers only"
        )
    return values.astype(np.float32)
