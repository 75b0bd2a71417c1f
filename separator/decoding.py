"""Decoders at the front of the pipeline: libsndfile first, FFmpeg for what libsndfile does not know.

Both give blocks (channel, time) of float64 in [-1, 1] where the file has integers, in bounded memory. The
content decides which one it is; only a stream without any header, such as .g722, is known by its name. Where
a WAV or AIFF header states a wrong size, the samples are read to the end of the file all the same. FFmpeg
comes in the wheel of ``av``; it opens nothing but the file itself.
"""

import io
import math
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import soundfile

from separator.errors import SeparatorError
from separator.headers import SampleRegion, find_samples, ogg_breaks_off
from separator.script import counted

Samples = npt.NDArray[np.floating[Any]]
Warn = Callable[[str], None]

READABLE = "wav, flac, ogg, opus, mp3, aiff, m4a, mp4, webm, wma or wv"
FIXED_BYTES = {  # of a sample, in the codings that need no state to be read
    **dict.fromkeys(("PCM_S8", "PCM_U8", "ULAW", "ALAW"), 1),
    **{"PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8},
}
DEMUXERS = (  # files of sound or video; no playlists, pictures or texts
    "aac,ac3,aiff,amr,ape,asf,au,avi,caf,dsf,dts,dtshd,eac3,flac,flv,g722,gsm,matroska,mov,mp3,mpc,mpc8,mpeg,"
    "mpegts,mxf,ogg,qcp,rm,tak,truehd,tta,voc,w64,wav,wtv,wv,xwma"
)
LIBSNDFILE_CODECS = ("pcm_", "flac", "vorbis", "opus", "mp3")  # that libsndfile reads in a sound container
VIDEO_CONTAINERS = ("matroska", "mov", "asf", "avi", "flv", "mpeg", "mxf", "wtv")
CODED = ("FLAC", "OGG", "MP3")  # containers in libsndfile's names
CODED_SAMPLES = 4096  # that are decoded at a time, so that little is lost where the data break off
UNSUPPORTED = 1  # libsndfile's error for content it does not know
LOW_BYTE = 0xFF


class Decoder(Protocol):
    """An open file; a context manager."""

    sample_rate: int
    channels: int

    @property
    def length(self) -> int | None:
        """Samples a channel as the file says; None if it does not say."""
        ...

    format: str
    """Container, such as ``WAV``."""
    subtype: str
    """Coding of a sample in libsndfile's names; for FFmpeg's, the one its samples fit."""

    def __enter__(self) -> "Decoder": ...
    def __exit__(self, *exception: object) -> None: ...
    def skip(self, count: int) -> int:
        """Pass over ``count`` samples at the start if that needs no decoding; return how many were."""
        ...

    def blocks(self, size: int, warn: Warn) -> Iterator[Samples]:
        """Yield blocks (channel, time) of at most ``size`` samples to the end; ``warn`` is told of gaps."""
        ...


def open_decoder(path: Path, warn: Warn) -> Decoder:
    """Open ``path`` for decoding; ``warn`` is told where its header is wrong or its data damaged.

    Raises:
        SeparatorError: neither libsndfile nor FFmpeg knows the content, or it cannot be opened.
    """
    try:
        return _SndfileDecoder(path, warn)
    except soundfile.LibsndfileError as error:
        refused = _reason(error)
    except OSError as error:
        raise SeparatorError(f"{path} cannot be opened ({error.strerror}); check its permissions") from error
    try:
        return _FFmpegDecoder(path, warn)
    except _UnknownContentError as error:
        reason = refused or str(error)
        raise SeparatorError(
            f"{path} is not audio that can be read ({reason}); pass a {READABLE} file"
        ) from None


class _UnknownContentError(Exception):
    """FFmpeg finds no sound in a file."""


class _SndfileDecoder:
    """libsndfile; samples beyond a wrong size in the header are read as raw ones of the same coding."""

    def __init__(self, path: Path, warn: Warn) -> None:
        self._path = path
        self._region: _Region | None = None
        # by descriptor: by name, soundfile would take x.raw for headerless whatever it holds
        self._file = soundfile.SoundFile(os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0)))
        self.sample_rate: int = self._file.samplerate
        self.channels: int = self._file.channels
        self.length: int = self._file.frames
        self.format: str = self._file.format
        self.subtype: str = self._file.subtype
        self._first: Samples | None = None
        self._plain = self.subtype in FIXED_BYTES and self.format not in CODED
        if not self._plain:
            self._decode_first()
            if self.format == "OGG" and ogg_breaks_off(path):
                warn(f"{path}: the last page is missing, the file is cut off; what is there is read")
            return
        frame_bytes = FIXED_BYTES[self.subtype] * self.channels
        region = find_samples(path)
        if region is not None and region.stated // frame_bytes != region.present // frame_bytes:
            self._read_all(region, frame_bytes, warn)

    def _decode_first(self) -> None:
        """Decode a first block: a coded file may open and then hold nothing that libsndfile can decode.

        Raises:
            soundfile.LibsndfileError: that is so.
        """
        try:
            self._first = self._file.read(CODED_SAMPLES, dtype="float64", always_2d=True)
            if not len(self._first):
                raise soundfile.LibsndfileError(UNSUPPORTED)
        except soundfile.LibsndfileError:
            self._file.close()
            raise

    def _read_all(self, region: SampleRegion, frame_bytes: int, warn: Warn) -> None:
        """Take the samples that are there for those that the header states."""
        present = region.present // frame_bytes
        warn(
            f"{self._path}: the header states {counted(region.stated // frame_bytes, 'sample')}, "
            f"the file holds {present}; what the file holds is read"
        )
        if present == self.length:
            return
        endian = self._file.endian if self._file.endian != "FILE" else None
        if endian is None:
            endian = "BIG" if self.format == "AIFF" else "LITTLE"
        self._file.close()
        self._region = _Region(self._path, region.start, present * frame_bytes)
        self._file = soundfile.SoundFile(
            self._region, "r", self.sample_rate, self.channels, self.subtype, endian, "RAW"
        )
        self.length = present

    def __enter__(self) -> "_SndfileDecoder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
        if self._region is not None:
            self._region.close()

    def skip(self, count: int) -> int:
        """Seek where a sample has a fixed size; elsewhere seeking may be inexact."""
        return int(self._file.seek(min(count, self.length))) if self._plain else 0

    def blocks(self, size: int, warn: Warn) -> Iterator[Samples]:
        """Yield blocks; data that break off end the stream with a warning."""
        n_read = self._file.tell() if self._plain else 0
        size = size if self._plain else min(size, CODED_SAMPLES)
        reason = ""
        while True:
            try:
                block, self._first = self._first, None
                if block is None:
                    block = self._file.read(size, dtype="float64", always_2d=True)
            except soundfile.LibsndfileError as error:
                reason = f" ({_reason(error)})"
                break
            if not len(block):
                break
            n_read += len(block)
            for start in range(0, len(block), size):
                yield np.ascontiguousarray(block[start : start + size].T)
        if reason or n_read < self.length:
            warn(
                f"{self._path}: the data break off at {n_read / self.sample_rate:.2f} s of "
                f"{self.length / self.sample_rate:.2f} s{reason}; what comes before is read"
            )


class _Region(io.RawIOBase):
    """A part of a file, as a file of its own."""

    def __init__(self, path: Path, start: int, size: int) -> None:
        self._file = path.open("rb")
        self._start, self._size, self._position = start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = max(0, base + offset)
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        left = max(0, self._size - self._position)
        self._file.seek(self._start + self._position)
        count = self._file.readinto(memoryview(buffer).cast("B")[:left])
        self._position += count
        return count

    def close(self) -> None:
        self._file.close()
        super().close()


class _FFmpegDecoder:
    """FFmpeg's demuxers and decoders, in one thread so that every pass gives the same samples."""

    def __init__(self, path: Path, warn: Warn) -> None:
        import av

        self._path = path
        self._error = av.error.FFmpegError
        try:
            # "file:" keeps FFmpeg from taking a name such as concat:... for something else
            self._container = av.open(
                f"file:{path}", options={"format_whitelist": DEMUXERS}, metadata_errors="replace"
            )
        except (av.error.FFmpegError, ValueError, OSError) as error:
            raise _UnknownContentError(getattr(error, "strerror", None) or "unknown content") from error
        try:
            self._open_stream(warn)
        except BaseException:
            self._container.close()
            raise

    def _open_stream(self, warn: Warn) -> None:
        """Choose a stream and decode its first frame, which alone tells rate and channels for certain."""
        stream = self._container.streams.best("audio")
        if stream is None or stream.codec_context is None:  # the latter where it has no decoder
            raise _UnknownContentError(f"no known sound in this {self._container.format.name} file")
        self._stream: Any = stream
        stream.codec_context.thread_count = 1
        self._n_bad = 0
        self._frames = self._decode()
        self._first = next(self._frames, None)
        if self._first is None:
            raise _UnknownContentError(f"nothing in this {self._container.format.name} file can be decoded")
        self.sample_rate: int = self._first.sample_rate
        self.channels: int = self._first.layout.nb_channels
        self.format: str = self._container.format.name.split(",")[0].upper()
        codec = stream.codec_context.name
        self.subtype: str = _subtype(self._first)
        self.length: int | None = None
        if stream.duration and stream.time_base:
            self.length = math.ceil(stream.duration * stream.time_base * self.sample_rate)
        container = self._container.format.name
        if codec.startswith(LIBSNDFILE_CODECS) and not container.startswith(VIDEO_CONTAINERS):
            warn(f"{self._path}: the file is damaged or cut off; what can be decoded is read")

    def __enter__(self) -> "_FFmpegDecoder":
        return self

    def __exit__(self, *exception: object) -> None:
        self._container.close()

    def skip(self, count: int) -> int:
        """Nothing: seeking in coded streams is inexact."""
        return 0

    def blocks(self, size: int, warn: Warn) -> Iterator[Samples]:
        """Yield blocks; packets that cannot be decoded are passed over with a warning."""
        n_read = 0
        while self._first is not None:
            frame, self._first = self._first, next(self._frames, None)
            if (frame.sample_rate, frame.layout.nb_channels) != (self.sample_rate, self.channels):
                raise SeparatorError(
                    f"{self._path} changes to {frame.sample_rate} Hz and "
                    f"{counted(frame.layout.nb_channels, 'channel')} at {n_read / self.sample_rate:.2f} s; "
                    "convert it to one rate and number of channels"
                )
            samples = _samples(frame)
            n_read += samples.shape[1]
            for start in range(0, samples.shape[1], size):
                yield samples[:, start : start + size]
        if self._n_bad:
            warn(f"{self._path}: {counted(self._n_bad, 'packet')} left out, which cannot be decoded")

    def _decode(self) -> Iterator[Any]:
        """Yield the frames that can be decoded."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets, None)
            except (self._error, ValueError, OSError):  # the container breaks off
                self._n_bad += 1
                with suppress(self._error):
                    yield from self._stream.decode(None)
                return
            if packet is None:
                return
            try:
                frames: list[Any] = list(packet.decode())
            except (self._error, ValueError):
                self._n_bad += 1
            else:
                yield from (frame for frame in frames if frame.samples)


def _reason(error: soundfile.LibsndfileError) -> str:
    """What libsndfile says, as part of a sentence."""
    return str(error.error_string).strip().rstrip(".") or f"error {error.code}"


def _samples(frame: Any) -> Samples:
    """A decoded frame as (channel, time)."""
    values: npt.NDArray[Any] = frame.to_ndarray()
    if not frame.format.is_planar:
        values = values.reshape(-1, frame.layout.nb_channels).T
    if values.dtype == np.uint8:
        values = (values ^ 0x80).view(np.int8)
    scale = 1.0
    if np.issubdtype(values.dtype, np.integer):
        scale = 2.0 ** (8 * values.dtype.itemsize - 1)
    return values.astype(np.float64) / scale


def _subtype(frame: Any) -> str:
    """libsndfile's name of the coding that holds the samples of a frame."""
    kind = frame.format.name.removesuffix("p")
    if kind == "s32" and not (frame.to_ndarray() & LOW_BYTE).any():
        return "PCM_24"  # FFmpeg keeps 24 bits in the upper ones of 32
    names = {"u8": "PCM_U8", "s16": "PCM_16", "s32": "PCM_32", "dbl": "DOUBLE"}
    return names.get(kind, "FLOAT")
