"""Reads recordings out of Debian packages and out of the containers that games keep their sounds in.

First step of `prepare.py bank`. A clip's path is `file` or `container!member`; containers are zip (`.pk3`,
`.zip`), OpenClonk groups (`.ocg`), Doom archives (`.wad`) and soundfonts (`.sf2`). Nothing is installed:
`dpkg-deb` streams a package, and only the files of the manifest are read.
"""

import hashlib
import io
import re
import shutil
import struct
import subprocess
import tarfile
import tempfile
import wave
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import soundfile

from separator.errors import SeparatorError

G722_SAMPLE_RATE = 16000
_GROUP_HEADER, _GROUP_ENTRY = 204, 316  # bytes, OpenClonk's C4GroupHeader and C4GroupEntryCore
_SAMPLE_HEADER = struct.Struct("<20sIIIIIBbHH")  # soundfont 2.04, section 7.10


@dataclass(frozen=True)
class Recording:
    """One decoded clip: waveform (channel, time) float32, or the reason why there is none."""

    path: str
    sha256: str  # of the file or member; of the 16-bit samples for a soundfont
    waveform: np.ndarray | None
    sample_rate: int
    error: str = ""


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_package(package: Path, paths: Sequence[str]) -> Iterator[Recording]:
    """Decode the clips at `paths` of one `.deb`, in the order of the archive; absent ones are not yielded."""
    wanted: dict[str, list[str]] = {}
    for path in paths:
        name, _, member = path.partition("!")
        wanted.setdefault(name, []).append(member)
    command = ["dpkg-deb", "--fsys-tarfile", str(package)]
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise SeparatorError(
            f"dpkg-deb, which reads {package}, is not installed; use Debian or Ubuntu"
        ) from error
    try:
        with tarfile.open(fileobj=process.stdout, mode="r|") as archive:
            for entry in archive:
                name = entry.name.removeprefix("./")
                file = archive.extractfile(entry) if name in wanted and entry.isfile() else None
                if file is not None:
                    yield from _read_file(name, file, wanted[name])
    except tarfile.TarError as error:
        raise SeparatorError(
            f"{package} is not a readable Debian package ({error}); fetch it again"
        ) from error
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def decode(path: str, content: bytes) -> Recording:
    """Decode the bytes of one sound file; `.g722` by FFmpeg, everything else by libsndfile."""
    sha256 = hashlib.sha256(content).hexdigest()
    if path.lower().endswith(".g722"):
        return Recording(path, sha256, _decode_g722(content), G722_SAMPLE_RATE)
    try:
        waveform, sample_rate = soundfile.read(io.BytesIO(content), dtype="float32", always_2d=True)
    except soundfile.LibsndfileError as error:
        return Recording(path, sha256, None, 0, error.error_string)
    return Recording(path, sha256, waveform.T, sample_rate)


def zip_members(file: IO[bytes], members: Sequence[str]) -> dict[str, bytes]:
    """The wanted members of a zip archive (`.zip`, `.pk3`)."""
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in set(members) & set(archive.namelist())}


def ocg_members(file: IO[bytes], members: Sequence[str]) -> dict[str, bytes]:
    """The wanted members of an OpenClonk group: a gzip stream with another magic, holding nested groups."""
    content = file.read()
    stream = zlib.decompressobj(wbits=31)
    data = stream.decompress(b"\x1f\x8b" + content[2:]) + stream.flush()
    found = dict(_group_entries(data, 0, ""))
    return {name: found[name] for name in members if name in found}


def wad_members(file: IO[bytes], members: Sequence[str]) -> dict[str, bytes]:
    """The wanted sounds (`dsname.wav`) of a Doom archive, as 8-bit wave files.

    A sound lump holds format 3, rate and length; its samples have 16 bytes of padding on either side.
    """
    data = file.read()
    count, directory = struct.unpack_from("<ii", data, 4)
    found: dict[str, bytes] = {}
    for index in range(count):
        start, size, raw_name = struct.unpack_from("<ii8s", data, directory + 16 * index)
        name = raw_name.split(b"\0")[0].decode("latin-1").lower() + ".wav"
        if name in members and size > 8 + 32:
            _, sample_rate, length = struct.unpack_from("<HHI", data, start)
            found[name] = _wave_file(data[start + 24 : start + 8 + length - 16], sample_rate)
    return found


def soundfont_samples(file: IO[bytes], members: Sequence[str]) -> dict[str, tuple[np.ndarray, int]]:
    """The wanted samples (`shdr[index] name`) of a soundfont: int16 (time,) and the sample rate.

    A left sample comes alone: its right half is another header, and the mono bank needs one.
    """
    data = file.read()
    chunks = {
        name: (start, size)
        for _, outer, outer_size in _riff_chunks(data, 12, len(data))
        for name, start, size in _riff_chunks(data, outer + 4, outer + outer_size)
    }
    (samples, _), (headers, size) = chunks[b"smpl"], chunks[b"shdr"]
    found: dict[str, tuple[np.ndarray, int]] = {}
    for member in members:
        match = re.match(r"shdr\[(\d+)\] ?(.*)", member)
        index = int(match.group(1)) if match else size
        if match is None or (index + 1) * _SAMPLE_HEADER.size > size:
            continue
        header = _SAMPLE_HEADER.unpack_from(data, headers + index * _SAMPLE_HEADER.size)
        name, start, end, _, _, rate, *_ = header
        if name.split(b"\0")[0].decode("latin-1").strip() == match.group(2).strip():
            found[member] = (np.frombuffer(data, "<i2", end - start, samples + 2 * start), rate)
    return found


_CONTAINERS = {".zip": zip_members, ".pk3": zip_members, ".ocg": ocg_members, ".wad": wad_members}


def _read_file(name: str, file: IO[bytes], members: Sequence[str]) -> Iterator[Recording]:
    if "" in members:
        yield decode(name, file.read())
        return
    with tempfile.TemporaryFile() as copy:  # containers need seeking, which the package's stream has not
        shutil.copyfileobj(file, copy)
        copy.seek(0)
        suffix = Path(name).suffix.lower()
        if suffix == ".sf2":
            for member, (samples, sample_rate) in soundfont_samples(copy, members).items():
                digest = hashlib.sha256(samples.tobytes()).hexdigest()
                waveform = samples[None].astype(np.float32) / 32768
                yield Recording(f"{name}!{member}", digest, waveform, sample_rate)
            return
        if suffix not in _CONTAINERS:
            raise SeparatorError(f"{name} is no container; known are {sorted(_CONTAINERS)} and .sf2")
        contents: Mapping[str, bytes] = _CONTAINERS[suffix](copy, members)
    for member, content in contents.items():
        yield decode(f"{name}!{member}", content)


def _decode_g722(content: bytes) -> np.ndarray:
    import av  # FFmpeg is needed for this one format

    decoder = av.CodecContext.create("g722", "r")
    decoder.sample_rate = G722_SAMPLE_RATE
    decoder.layout = "mono"
    frames = [frame.to_ndarray() for frame in decoder.decode(av.Packet(content))]
    return np.concatenate(frames, axis=-1).astype(np.float32).reshape(1, -1) / 32768


def _group_entries(data: bytes, offset: int, prefix: str) -> Iterator[tuple[str, bytes]]:
    header = bytearray(byte ^ 237 for byte in data[offset : offset + _GROUP_HEADER])
    for i in range(0, _GROUP_HEADER - 2, 3):
        header[i], header[i + 2] = header[i + 2], header[i]
    (count,) = struct.unpack_from("<i", header, 36)
    base = offset + _GROUP_HEADER + _GROUP_ENTRY * count
    for index in range(count):
        raw_name, _, is_group, size, _, start = struct.unpack_from(
            "<260s5i", data, offset + _GROUP_HEADER + _GROUP_ENTRY * index
        )
        name = prefix + raw_name.split(b"\0")[0].decode("latin-1")
        if is_group:
            yield from _group_entries(data, base + start, name + "/")
        else:
            yield name, data[base + start : base + start + size]


def _riff_chunks(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    while start + 8 <= end:
        name, size = struct.unpack_from("<4sI", data, start)
        yield name, start + 8, size
        start += 8 + size + size % 2


def _wave_file(samples: bytes, sample_rate: int) -> bytes:
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(sample_rate)
        file.writeframes(samples)
    return buffer.getvalue()
