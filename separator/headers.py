"""Sizes in the headers of WAV, RF64, W64 and AIFF files, which programs often leave wrong.

A program that writes to a pipe, or is killed, leaves a size of 0, of all ones or of a moment long past; a
file over 4 GB may hold its size modulo 2^32; a cut download holds less than it says. `find_samples` tells
where the samples are and where the file really ends, so that all of them can be read.

References: Microsoft, "Multimedia Programming Interface", 1991; EBU Tech 3306 (RF64); Apple, "AIFF-C", 1991.
"""

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

UNKNOWN = 0xFFFFFFFF  # a size that a streaming program did not know, or one kept in RF64's ds64 chunk
W64_TAIL = bytes.fromhex("f3acd3118cd100c04f8edb8a")  # of the GUIDs of W64's chunks, after four letters
W64_RIFF = b"riff" + bytes.fromhex("2e91cf11a5d628db04c10000")
TAGS = (b"TAG", b"ID3", b"APETAGEX", b"LYRICS")  # that other programs append
PADDING = 4096  # fewer zeros than this at the end of a file fill a block of some disk
OGG_PAGE = 1 << 16  # bytes, the most a page can have
MAX_CHUNKS = 10_000  # a file with more is no recording


@dataclass(frozen=True)
class SampleRegion:
    """Where the samples of a file are, in bytes."""

    start: int
    stated: int
    """Bytes of samples, as the header says."""
    present: int
    """Bytes of samples that are there."""


def find_samples(path: Path) -> SampleRegion | None:
    """Find the samples of a file; None if it is of another kind or its chunks lead nowhere."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        for name, start, stated in _chunks(file, end):
            if name == b"data":
                return SampleRegion(start, stated, _present(file, start, stated, end))
            if name == b"SSND":  # begins with an offset and a block size
                offset = int.from_bytes(_read_at(file, start, 4), "big") + 8
                stated = max(0, stated - offset)
                return SampleRegion(start + offset, stated, _present(file, start + offset, stated, end))
    return None


def ogg_breaks_off(path: Path) -> bool:
    """Whether the last page of an Ogg file is not marked as the last of its stream (RFC 3533)."""
    with path.open("rb") as file:
        end = os.fstat(file.fileno()).st_size
        tail = _read_at(file, max(0, end - 2 * OGG_PAGE), 2 * OGG_PAGE)
    last = tail.rfind(b"OggS")
    return last >= 0 and not int.from_bytes(tail[last + 5 : last + 6]) & 4


def _chunks(file: BinaryIO, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Name, place and stated size of the chunks."""
    head = _read_at(file, 0, 40)
    wide = head[:16] == W64_RIFF
    if wide:
        position, order = 40, "<"
    elif head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        position, order = 12, "<"
    elif head[:4] in (b"FORM", b"RIFX") and head[8:12] in (b"AIFF", b"AIFC", b"WAVE"):
        position, order = 12, ">"
    else:
        return
    large = None  # size of the samples from the ds64 chunk
    for _ in range(MAX_CHUNKS):
        header = _read_at(file, position, 24 if wide else 8)
        if len(header) < (24 if wide else 8) or position >= end:
            return
        if wide:
            name, size = header[:4], struct.unpack("<Q", header[16:])[0] - 24
        else:
            name, size = header[:4], struct.unpack(f"{order}I", header[4:])[0]
        start = position + len(header)
        if name == b"ds64":
            large = struct.unpack("<8xQ", _read_at(file, start, 16).ljust(16, b"\0"))[0]
        if name == b"data" and size == UNKNOWN and large is not None:
            size = large
        yield name, start, max(0, size)
        grain = 8 if wide else 2
        position = start + -(-max(0, size) // grain) * grain


def _present(file: BinaryIO, start: int, stated: int, end: int) -> int:
    """Bytes of samples from ``start`` on: to the stated end if chunks or nothing follow, else to the end."""
    rest = end - start - stated
    if rest > 0 and _looks_like_chunks(_read_at(file, start + stated, PADDING), rest):
        return stated
    return max(0, end - start)


def _looks_like_chunks(head: bytes, rest: int) -> bool:
    """Whether what follows the samples is another chunk, a tag or padding, not more samples."""
    if rest < 8 or head.startswith(TAGS) or (rest < PADDING and not any(head)):
        return True
    for shift in (0, 1):  # a chunk may come after a byte of padding
        name, size = head[shift : shift + 4], head[shift + 4 : shift + 8]
        smaller = min(int.from_bytes(size, "little"), int.from_bytes(size, "big"))
        if name.isascii() and name.decode("ascii").isprintable() and smaller <= rest:
            return True
    return False


def _read_at(file: BinaryIO, position: int, size: int) -> bytes:
    file.seek(position)
    return file.read(size)
