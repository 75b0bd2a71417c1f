"""Fetching a large public archive: resumed, checked, and unpacked without harm.

Used by the preparation of data sets. A download grows as ``NAME.part`` and takes its name only when its size
and MD5 are right, an archive is unpacked beside its place and moved there only when it was whole. So what has
its name is complete, and a run that stopped goes on. Nothing but the standard library is needed.
"""

import errno
import gzip
import hashlib
import http
import http.client
import json
import re
import shutil
import sys
import tarfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from separator.errors import SeparatorError
from separator.script import counted

BLOCK_BYTES = 1 << 20
TIMEOUT_SECONDS = 60.0
PAUSES_SECONDS = (1.0, 5.0, 20.0, 60.0)  # before the attempts that follow one without a single byte
RETRIED_STATUS = (408, 425, 429, 500, 502, 503, 504)

Progress = Callable[[int, int], None]
"""Called with the bytes done and the bytes in all."""


@dataclass(frozen=True)
class RemoteFile:
    """A file as its publisher's record describes it."""

    name: str
    url: str
    size: int
    """Bytes."""
    md5: str


def read_zenodo_record(url: str, names: Sequence[str]) -> list[RemoteFile]:
    """Read the files ``names`` of a Zenodo record, as ``https://zenodo.org/api/records/ID`` gives it.

    Raises:
        SeparatorError: the record cannot be read or lacks a file, its size, MD5 or link.
    """
    try:
        with _open(url, 0) as response:
            record = json.loads(response.read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise SeparatorError(
            f"the record {url} cannot be read ({_reason(error)}); try again later"
        ) from error
    files = record.get("files", {}) if isinstance(record, dict) else {}
    entries = list(files.get("entries", {}).values()) if isinstance(files, dict) else files
    by_name = {entry.get("key"): entry for entry in entries if isinstance(entry, dict)}
    missing = [name for name in names if name not in by_name]
    if missing:
        raise SeparatorError(
            f"the record {url} has the files {sorted(map(str, by_name))}, not {', '.join(missing)}"
        )
    return [_remote_file(name, by_name[name]) for name in names]


def check_space(directory: Path, needed: int) -> None:
    """Refuse when the disk of ``directory`` has fewer than ``needed`` bytes free.

    Raises:
        SeparatorError: it has.
    """
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    if free < needed:
        raise SeparatorError(
            f"{directory} has {_gigabytes(free)} free, {_gigabytes(needed)} are needed; "
            "free some space or pass a folder on a larger disk"
        )


def bytes_to_fetch(file: RemoteFile, directory: Path) -> int:
    """What is still to be downloaded of a file, going by what lies in ``directory``."""
    path = directory / file.name
    return 0 if path.exists() else max(0, file.size - _size(_part(path)))


def fetch(
    file: RemoteFile,
    directory: Path,
    *,
    progress: Progress | None = None,
    pauses_seconds: Sequence[float] = PAUSES_SECONDS,
) -> Path:
    """Download a file into ``directory``, going on where an earlier run or a broken connection stopped.

    The connection is opened again after it broke; as many attempts in a row as ``pauses_seconds`` has
    entries may fail to bring anything. A file that is there already is checked, not fetched.

    Raises:
        SeparatorError: the server refuses, the connection stays broken, the disk is full, or the file is
        not what the record says (it is then removed).
    """
    directory.mkdir(parents=True, exist_ok=True)
    path, part = directory / file.name, _part(directory / file.name)
    if path.exists():
        _check(file, path)
        return path
    failures, most = 0, _size(part)
    while _size(part) < file.size:
        reason = _fetch_some(file, part, progress)
        if reason is None:
            continue
        failures = 0 if _size(part) > most else failures + 1  # starting over is no progress
        most = max(most, _size(part))
        if failures > len(pauses_seconds):
            raise SeparatorError(
                f"{file.name} cannot be fetched ({reason}); {_gigabytes(_size(part))} of "
                f"{_gigabytes(file.size)} are kept, run it again to go on"
            )
        time.sleep(pauses_seconds[max(0, failures - 1)] if pauses_seconds else 0.0)
    _check(file, part)
    part.replace(path)
    return path


def unpack(archive: Path, folder: str, directory: Path, *, progress: Progress | None = None) -> Path:
    """Unpack a tar archive whose only top folder is ``folder`` into ``directory``; return the new folder.

    Members may be files and folders inside ``folder``: absolute names, ``..``, links and devices are refused,
    and then nothing of the archive is kept.

    Raises:
        SeparatorError: the archive is broken or unsafe, the disk is full, or ``folder`` is there already.
    """
    if not hasattr(tarfile, "data_filter"):
        raise SeparatorError(f"Python {sys.version.split()[0]} cannot unpack safely; use 3.11.4 or later")
    target = directory / folder
    if target.exists():
        raise SeparatorError(f"{target} is there already; remove it to unpack {archive.name} again")
    scratch = directory / f".{folder}.unpacking"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        _unpack_into(scratch, archive, folder, progress)
        (scratch / folder).replace(target)
    except (tarfile.TarError, zlib.error, gzip.BadGzipFile, EOFError) as error:
        raise SeparatorError(f"{archive} is broken ({error}); remove it and fetch it again") from error
    except OSError as error:
        raise _disk_error(error, directory) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _remote_file(name: str, entry: Mapping[str, Any]) -> RemoteFile:
    links = entry.get("links") or {}
    url = links.get("content") or links.get("self")
    checksum, size = str(entry.get("checksum", "")), entry.get("size")
    if not re.fullmatch(r"md5:[0-9a-f]{32}", checksum) or not isinstance(size, int) or size < 1 or not url:
        raise SeparatorError(f"the record's entry of {name} lacks size, MD5 or link: {dict(entry)}")
    return RemoteFile(name, str(url), size, checksum.removeprefix("md5:"))


def _open(url: str, start: int) -> Any:
    headers = {"User-Agent": "separator", "Accept": "*/*"}
    if start:
        headers["Range"] = f"bytes={start}-"
    try:
        request = urllib.request.Request(url, headers=headers)
    except ValueError as error:
        raise SeparatorError(f"{url!r} is no address; pass one that begins with https://") from error
    return urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)


def _fetch_some(file: RemoteFile, part: Path, progress: Progress | None) -> str | None:
    """Fetch until the end or until the connection breaks; return why it broke.

    Raises:
        SeparatorError: trying again would not help.
    """
    try:
        output = part.open("r+b" if part.exists() else "w+b")
    except OSError as error:
        raise _disk_error(error, part.parent) from error
    with output:
        have = output.seek(0, 2)
        try:
            with _open(file.url, have) as response:
                start = _start_of(response)
                output.truncate(start if start in (0, have) else 0)
                if output.seek(0, 2) != start:
                    return f"the server sent another range, {response.headers.get('Content-Range')!r}"
                _copy(response, output, file, progress)
        except urllib.error.HTTPError as error:
            if error.code == 416:  # what is there does not fit the server's file
                output.truncate(0)
            elif error.code not in RETRIED_STATUS:
                raise SeparatorError(f"{file.url} answers {error.code} {error.reason}") from error
            return f"{error.code} {error.reason}"
        except (OSError, http.client.HTTPException) as error:
            return _reason(error)
        return None if output.tell() >= file.size else "the connection was closed before the end"


def _copy(response: Any, output: BinaryIO, file: RemoteFile, progress: Progress | None) -> None:
    while block := response.read(BLOCK_BYTES):
        try:
            output.write(block)
            output.flush()
        except OSError as error:
            raise _disk_error(error, Path(output.name).parent) from error
        if progress:
            progress(output.tell(), file.size)
        if output.tell() > file.size:
            return  # the check of the whole will name it


def _start_of(response: Any) -> int:
    """The first byte of what a server sends: one that does not know ranges begins at 0."""
    if response.status != http.HTTPStatus.PARTIAL_CONTENT:
        return 0
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range") or "")
    return int(found[1]) if found else -1


def _check(file: RemoteFile, path: Path) -> None:
    """Refuse and remove a file whose size or MD5 is not that of the record."""
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as content:
        while block := content.read(BLOCK_BYTES):
            digest.update(block)
    size = path.stat().st_size
    if (size, digest.hexdigest()) != (file.size, file.md5):
        path.unlink()
        raise SeparatorError(
            f"{file.name} has {counted(size, 'byte')} and MD5 {digest.hexdigest()}, the record says "
            f"{file.size} and {file.md5}; it was removed, fetch it again"
        )


def _unpack_into(scratch: Path, archive: Path, folder: str, progress: Progress | None) -> None:
    total = archive.stat().st_size
    with archive.open("rb") as packed, tarfile.open(fileobj=packed, mode="r:*") as tar:
        for member in tar:
            _check_member(member, archive, folder, scratch)
            tar.extract(member, scratch, filter="data")
            if progress:
                progress(packed.tell(), total)
        while tar.fileobj and tar.fileobj.read(BLOCK_BYTES):
            pass  # the checksum of the whole is at the end, behind the last member
    if not (scratch / folder).is_dir():
        raise SeparatorError(f"{archive} holds no folder {folder}; it is another archive")


def _check_member(member: tarfile.TarInfo, archive: Path, folder: str, scratch: Path) -> None:
    parts = [part for part in member.name.split("/") if part != "."]  # an absolute name begins with ""
    if not (member.isfile() or member.isdir()):
        kind = "a link" if member.issym() or member.islnk() else "a device or the like"
        raise SeparatorError(f"{archive} holds {kind}, {member.name!r}; nothing of it was kept")
    if ".." in parts or (parts and parts[0] != folder):
        raise SeparatorError(
            f"{archive} would write {member.name!r}, outside of {folder}/; nothing of it was kept"
        )
    try:
        tarfile.data_filter(member, str(scratch))
    except tarfile.FilterError as error:
        raise SeparatorError(f"{archive} is not safe to unpack ({error}); nothing of it was kept") from error


def _disk_error(error: OSError, directory: Path) -> SeparatorError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SeparatorError(f"the disk of {directory} is full; free some space and run it again to go on")
    return SeparatorError(
        f"{directory} cannot be written to ({error.strerror or error}); pass another folder"
    )


def _part(path: Path) -> Path:
    return path.with_name(path.name + ".part")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _reason(error: BaseException) -> str:
    cause = getattr(error, "reason", None) or error
    return str(cause) or type(cause).__name__


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
