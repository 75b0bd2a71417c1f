"""Formats of stems: which there are, what each can hold, and which coding comes nearest to an input's own.

Integer codings add up to the bit, float ones to the rounding of a float; mp3 and ogg are lossy, so that their
stems add up only about.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from separator.audio import MAX_CHANNELS, MAX_RATE, AudioInfo
from separator.errors import SeparatorError
from separator.script import counted

INTEGER_BITS = {"PCM_S8": 8, "PCM_U8": 8, "PCM_16": 16, "PCM_24": 24, "PCM_32": 32}
SPEECH_RATES = (8000, 12_000, 16_000, 24_000, 48_000)  # Hz, of Opus
MP3_RATES = (8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)  # Hz
MAX_FLAC_RATE = 655_350  # Hz
MAX_VORBIS_RATE = 200_000  # Hz; libvorbis crashes above
# codings of inputs that stems cannot or should not have, and what comes nearest; lossy ones decode to floats
_NEAREST = {
    "DPCM_8": "PCM_S8",
    **dict.fromkeys(("ULAW", "ALAW", "IMA_ADPCM", "MS_ADPCM", "GSM610", "ALAC_16", "DPCM_16"), "PCM_16"),
    **dict.fromkeys(("ALAC_20", "ALAC_24"), "PCM_24"),
    "ALAC_32": "PCM_32",
}


@dataclass(frozen=True)
class Coding:
    """How the stems of one input are written."""

    format: str
    """``wav``, ``flac``, ``mp3`` or ``ogg``."""
    subtype: str
    """libsndfile's name of the coding of a sample."""

    @property
    def extension(self) -> str:
        """With its dot."""
        return f".{self.format}"

    @property
    def bits(self) -> int | None:
        """Of an integer sample; None for floats and lossy codings."""
        return INTEGER_BITS.get(self.subtype)

    @property
    def lossy(self) -> bool:
        """Whether a file does not hold the samples that were written."""
        return self.format in ("mp3", "ogg")

    @property
    def largest(self) -> float:
        """Largest value a sample can have, in its own steps where it is an integer; no bound for floats."""
        if self.bits is not None:
            return 2.0 ** (self.bits - 1) - 1
        return 1.0 if self.lossy else float("inf")


@dataclass(frozen=True)
class _Limits:
    """What a coding can hold."""

    channels: int
    rates: tuple[int, ...] = ()
    max_rate: int = MAX_RATE

    def holds(self, info: AudioInfo) -> bool:
        rate_fits = info.sample_rate in self.rates if self.rates else info.sample_rate <= self.max_rate
        return rate_fits and info.channels <= self.channels

    def __str__(self) -> str:
        rates = ", ".join(map(str, self.rates)) if self.rates else f"up to {self.max_rate}"
        return f"{rates} Hz with up to {self.channels} channels"


_FLAC = _Limits(8, max_rate=MAX_FLAC_RATE)
CODINGS: dict[str, dict[str, _Limits]] = {  # format, subtypes; the first is the default where none is nearer
    "wav": dict.fromkeys(("FLOAT", "DOUBLE", "PCM_U8", "PCM_16", "PCM_24", "PCM_32"), _Limits(MAX_CHANNELS)),
    "flac": dict.fromkeys(("PCM_24", "PCM_16", "PCM_S8"), _FLAC),
    "mp3": {"MPEG_LAYER_III": _Limits(2, MP3_RATES)},
    "ogg": {"VORBIS": _Limits(8, max_rate=MAX_VORBIS_RATE), "OPUS": _Limits(8, SPEECH_RATES)},
}


def choose_coding(info: AudioInfo, format: str = "wav", subtype: str | None = None) -> Coding:
    """Coding of the stems of an input; without a ``subtype`` the nearest to the input's own.

    Raises:
        SeparatorError: there is no such format or subtype, or it cannot hold the input's rate or channels.
    """
    if format not in CODINGS:
        raise SeparatorError(f"{format=} is not known; pass {_choice(CODINGS)}")
    known = CODINGS[format]
    if subtype is None:
        subtype = nearest_subtype(info.subtype, format)
    elif subtype not in known:
        raise SeparatorError(f"{subtype=} is no coding of {format} here; pass {_choice(known)}")
    limits = known[subtype]
    if not limits.holds(info):
        raise SeparatorError(
            f"{info.path} has {info.sample_rate} Hz and {counted(info.channels, 'channel')}, "
            f"which {format} ({subtype}) cannot hold: it takes {limits}; pass another format, such as wav"
        )
    return Coding(format, subtype)


def nearest_subtype(subtype: str, format: str = "wav") -> str:
    """Coding of the stems of a file with ``subtype``: its own if the format has it, else the nearest.

    >>> [nearest_subtype(name) for name in ("PCM_24", "DOUBLE", "PCM_S8", "VORBIS")]
    ['PCM_24', 'DOUBLE', 'PCM_U8', 'FLOAT']
    >>> [nearest_subtype(name, "flac") for name in ("PCM_16", "PCM_32", "PCM_U8", "FLOAT")]
    ['PCM_16', 'PCM_24', 'PCM_S8', 'PCM_24']
    """
    subtype = _NEAREST.get(subtype, subtype)
    known = CODINGS[format]
    if subtype in known:
        return subtype
    of_same_depth = [name for name in known if INTEGER_BITS.get(name, 0) == INTEGER_BITS.get(subtype, -1)]
    return next(iter([*of_same_depth, *known]))


def _choice(names: Iterable[str]) -> str:
    """Names as a sentence has them."""
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
