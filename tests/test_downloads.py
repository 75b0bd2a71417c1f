"""Downloads against a server of our own on this machine, archives made here."""

import errno
import hashlib
import http.server
import io
import json
import re
import shutil
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from separator import downloads
from separator.downloads import (
    RemoteFile,
    bytes_to_fetch,
    check_space,
    fetch,
    read_zenodo_record,
    unpack,
)
from separator.errors import SeparatorError

CONTENT = bytes(range(256)) * 1000
QUICK = (0.0, 0.0)


@dataclass
class Server:
    """What the server holds, how it misbehaves and what it was asked."""

    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    breaks: list[int] = field(default_factory=list)
    """Bytes after which each of the coming answers breaks."""
    statuses: list[int] = field(default_factory=list)
    """Statuses of the coming answers."""
    ranges: bool = True
    shift: int = 0
    """By how much it misses the range asked for."""
    asked: list[str] = field(default_factory=list)

    def remote(self, name: str) -> RemoteFile:
        content = self.files[name]
        return RemoteFile(name, f"{self.url}/{name}", len(content), hashlib.md5(content).hexdigest())


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.asked.append(self.headers.get("Range", "all"))
            status = state.statuses.pop(0) if state.statuses else 200
            content = state.files.get(self.path[1:])
            if status != 200 or content is None:
                self.send_error(status if status != 200 else 404)
                return
            start = int(re.findall(r"\d+", self.headers.get("Range", "0"))[0]) if state.ranges else 0
            if start >= len(content):
                self.send_error(416)
                return
            start += state.shift if start else 0
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(content) - start))
            if start:
                self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
            self.end_headers()
            self.wfile.write(content[start:][: state.breaks.pop(0) if state.breaks else None])

        def log_message(self, *arguments: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        threading.Thread(target=listening.serve_forever, daemon=True).start()
        state.url = f"http://127.0.0.1:{listening.server_port}"
        state.files["data.bin"] = CONTENT
        yield state
        listening.shutdown()


# ---- fetching


def test_a_file_is_fetched_and_its_progress_told(server: Server, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    path = fetch(server.remote("data.bin"), tmp_path / "new", progress=lambda *state: told.append(state))
    assert path.read_bytes() == CONTENT
    assert told[-1] == (len(CONTENT), len(CONTENT))
    assert [entry.name for entry in path.parent.iterdir()] == ["data.bin"]


def test_a_broken_connection_is_resumed_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.breaks = [100_000, 50_000]
    path = fetch(server.remote("data.bin"), tmp_path, pauses_seconds=QUICK)
    assert path.read_bytes() == CONTENT
    assert server.asked == ["all", "bytes=100000-", "bytes=150000-"]


def test_a_stopped_run_is_resumed_by_the_next(server: Server, tmp_path: Path) -> None:
    server.breaks = [70_000]

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server.remote("data.bin"), tmp_path, progress=stop)
    (part,) = tmp_path.iterdir()
    kept = part.stat().st_size
    assert part.name == "data.bin.part" and kept > 0
    assert bytes_to_fetch(server.remote("data.bin"), tmp_path) == len(CONTENT) - kept
    assert fetch(server.remote("data.bin"), tmp_path).read_bytes() == CONTENT
    assert server.asked == ["all", f"bytes={kept}-"]


def test_a_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    server.breaks = [100_000]
    assert fetch(server.remote("data.bin"), tmp_path, pauses_seconds=QUICK).read_bytes() == CONTENT
    assert server.asked == ["all", "bytes=100000-"]


def test_a_range_that_was_not_asked_for_is_not_appended(server: Server, tmp_path: Path) -> None:
    server.breaks, server.shift = [100_000], 7
    assert fetch(server.remote("data.bin"), tmp_path, pauses_seconds=QUICK).read_bytes() == CONTENT
    assert server.asked == ["all", "bytes=100000-", "all"]


def test_a_complete_part_is_only_checked(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").write_bytes(CONTENT)
    assert fetch(server.remote("data.bin"), tmp_path).read_bytes() == CONTENT
    assert fetch(server.remote("data.bin"), tmp_path).read_bytes() == CONTENT
    assert server.asked == []
    assert bytes_to_fetch(server.remote("data.bin"), tmp_path) == 0


def test_a_file_shorter_than_the_record_says_ends(server: Server, tmp_path: Path) -> None:
    """Such a server answers 416 to the rest of it: the file is tried anew, but not for ever."""
    wanted = server.remote("data.bin")
    server.files["data.bin"] = CONTENT[:1000]
    (tmp_path / "data.bin.part").write_bytes(CONTENT[:1000])
    with pytest.raises(SeparatorError, match=r"data\.bin cannot be fetched"):
        fetch(wanted, tmp_path, pauses_seconds=(0.0,))
    assert server.asked[:2] == ["bytes=1000-", "all"]


@pytest.mark.parametrize("where", ["on the way", "on the disk", "longer"])
def test_a_corrupted_file_is_refused_and_removed(server: Server, tmp_path: Path, where: str) -> None:
    wanted = server.remote("data.bin")
    if where == "on the disk":
        (tmp_path / "data.bin").write_bytes(b"!" + CONTENT[1:])
    else:
        server.files["data.bin"] = b"!" + CONTENT[1:] if where == "on the way" else CONTENT + b"!"
    with pytest.raises(SeparatorError, match=rf"data\.bin has 25600[01] bytes and MD5 .*{wanted.md5}"):
        fetch(wanted, tmp_path)
    assert list(tmp_path.iterdir()) == []
    server.files["data.bin"] = CONTENT
    assert fetch(wanted, tmp_path).read_bytes() == CONTENT


def test_a_server_that_is_busy_is_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [503, 429]
    assert fetch(server.remote("data.bin"), tmp_path, pauses_seconds=QUICK).read_bytes() == CONTENT
    assert len(server.asked) == 3


def test_a_server_that_refuses_is_not_asked_again(server: Server, tmp_path: Path) -> None:
    server.statuses = [403]
    with pytest.raises(SeparatorError, match=r"data\.bin answers 403"):
        fetch(server.remote("data.bin"), tmp_path)
    assert len(server.asked) == 1


def test_a_connection_that_stays_broken_ends_and_keeps_what_came(server: Server, tmp_path: Path) -> None:
    server.breaks = [100_000, 0, 0, 0, 0]
    with pytest.raises(SeparatorError, match=r"data\.bin cannot be fetched .* run it again to go on"):
        fetch(server.remote("data.bin"), tmp_path, pauses_seconds=QUICK)
    assert len(server.asked) == 4  # one that brought something, then three in vain
    assert (tmp_path / "data.bin.part").stat().st_size == 100_000


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    file = RemoteFile("data.bin", "http://127.0.0.1:1/data.bin", 5, "0" * 32)
    with pytest.raises(SeparatorError, match=r"data\.bin cannot be fetched .*refused"):
        fetch(file, tmp_path, pauses_seconds=())


def test_no_address_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match=r"'zenodo' is no address"):
        fetch(RemoteFile("data.bin", "zenodo", 5, "0" * 32), tmp_path)


def fill_disk(monkeypatch: pytest.MonkeyPatch, after: int, code: int = errno.ENOSPC) -> None:
    """From byte ``after`` of any file that is opened for writing, writing fails."""
    real = Path.open

    def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        file = real(path, mode, *arguments, **options)
        if mode in ("r+b", "w+b"):
            return FullDisk(file, after, code)
        return file

    monkeypatch.setattr(Path, "open", opened)


class FullDisk:
    """A file on a disk that takes no more."""

    def __init__(self, file: Any, after: int, code: int) -> None:
        self.file, self.after, self.code = file, after, code

    def write(self, block: bytes) -> int:
        if self.file.tell() + len(block) > self.after:
            self.file.write(block[: self.after - self.file.tell()])
            raise OSError(self.code, "it is full")
        return int(self.file.write(block))

    def __enter__(self) -> "FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def test_a_disk_that_fills_in_mid_write_stops_at_once_and_keeps_what_came(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(downloads, "BLOCK_BYTES", 10_000)
    with monkeypatch.context() as patch:
        fill_disk(patch, 123_456)
        with pytest.raises(SeparatorError, match=r"the disk of .* is full; free some space"):
            fetch(server.remote("data.bin"), tmp_path)
    assert (tmp_path / "data.bin.part").stat().st_size == 123_456
    assert len(server.asked) == 1
    assert fetch(server.remote("data.bin"), tmp_path).read_bytes() == CONTENT
    assert server.asked[1] == "bytes=123456-"


def test_a_folder_that_cannot_be_written_to_is_named(server: Server, tmp_path: Path) -> None:
    (tmp_path / "data.bin.part").mkdir()
    with pytest.raises(SeparatorError, match=r"cannot be written to \(Is a directory\)"):
        fetch(server.remote("data.bin"), tmp_path)


def test_too_small_a_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5_000_000_000))
    check_space(tmp_path / "not/there/yet", 5_000_000_000)
    with pytest.raises(SeparatorError, match=r"has 5\.00 GB free, 6\.00 GB are needed"):
        check_space(tmp_path / "not/there/yet", 6_000_000_000)


# ---- the record


def entry(**changes: object) -> dict[str, Any]:
    return {
        "key": "data.bin",
        "size": 5,
        "checksum": f"md5:{'a' * 32}",
        "links": {"self": "http://x/content"},
    } | changes


@pytest.mark.parametrize("form", ["list", "entries"])
def test_a_record_is_read_in_both_forms(server: Server, form: str) -> None:
    files = [entry(), entry(key="other")]
    if form == "entries":
        files = {"entries": {file["key"]: file for file in files}}  # type: ignore[assignment]
    server.files["record"] = json.dumps({"files": files}).encode()
    (file,) = read_zenodo_record(f"{server.url}/record", ["data.bin"])
    assert file == RemoteFile("data.bin", "http://x/content", 5, "a" * 32)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"files": [entry(key="other")]}, r"has the files \['other'\], not data.bin"),
        ({"message": "gone"}, r"has the files \[\], not data.bin"),
        ([1], r"has the files \[\]"),
        ({"files": [entry(checksum="sha1:00")]}, "lacks size, MD5 or link"),
        ({"files": [entry(size=0)]}, "lacks size, MD5 or link"),
        ({"files": [entry(links={})]}, "lacks size, MD5 or link"),
        ("no json", "cannot be read"),
        (404, "cannot be read"),
    ],
)
def test_an_unusable_record_is_refused(server: Server, record: Any, message: str) -> None:
    if record == 404:
        server.statuses = [404]
    server.files["record"] = b"{" if record == "no json" else json.dumps(record).encode()
    with pytest.raises(SeparatorError, match=message):
        read_zenodo_record(f"{server.url}/record", ["data.bin"])


# ---- unpacking


def make_archive(path: Path, members: list[tuple[str, bytes | dict[str, Any]]]) -> Path:
    """A .tar.gz of files (bytes) and other members (fields of their header)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            if isinstance(content, bytes):
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
            else:
                for key, value in content.items():
                    setattr(info, key, value)
                tar.addfile(info)
    return path


def test_an_archive_is_unpacked(tmp_path: Path) -> None:
    folder = {"type": tarfile.DIRTYPE, "mode": 0o755}
    members = [("./", folder), ("./ssdata", folder), ("./ssdata/a.txt", b"one"), ("ssdata/b/c.txt", b"two")]
    told: list[tuple[int, int]] = []
    archive = make_archive(tmp_path / "a.tar.gz", members)
    out = unpack(archive, "ssdata", tmp_path / "out", progress=lambda *state: told.append(state))
    assert (out / "a.txt").read_bytes() == b"one" and (out / "b/c.txt").read_bytes() == b"two"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["ssdata"]
    assert told[-1] == (archive.stat().st_size, archive.stat().st_size)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("../evil.txt", b"!", r"would write '\.\./evil\.txt', outside of ssdata/"),
        ("ssdata/../../evil.txt", b"!", "outside of ssdata/"),
        ("ssdata/b/../../../evil.txt", b"!", "outside of ssdata/"),
        ("/tmp/evil.txt", b"!", "outside of ssdata/"),
        ("other/evil.txt", b"!", "outside of ssdata/"),
        ("ssdata/link", {"type": tarfile.SYMTYPE, "linkname": "/etc/passwd"}, "holds a link, 'ssdata/link'"),
        ("ssdata/link", {"type": tarfile.SYMTYPE, "linkname": "a.txt"}, "holds a link"),
        ("ssdata/link", {"type": tarfile.LNKTYPE, "linkname": "ssdata/a.txt"}, "holds a link"),
        ("ssdata/null", {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}, "holds a device"),
        ("ssdata/pipe", {"type": tarfile.FIFOTYPE}, "holds a device"),
    ],
)
def test_an_unsafe_archive_is_refused_and_leaves_nothing(
    tmp_path: Path, name: str, content: bytes | dict[str, Any], message: str
) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", [("ssdata/a.txt", b"one"), (name, content)])
    with pytest.raises(SeparatorError, match=message):
        unpack(archive, "ssdata", tmp_path / "deep/out")
    assert list((tmp_path / "deep/out").iterdir()) == []
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["a.tar.gz", "deep", "out"]


def test_what_pythons_own_filter_refuses_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(member: tarfile.TarInfo, path: str) -> None:
        raise tarfile.OutsideDestinationError(member, path)

    archive = make_archive(tmp_path / "a.tar.gz", [("ssdata/a.txt", b"one")])
    monkeypatch.setattr(tarfile, "data_filter", refuse)
    with pytest.raises(SeparatorError, match="is not safe to unpack"):
        unpack(archive, "ssdata", tmp_path / "out")


def test_a_python_without_the_filter_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tarfile, "data_filter")
    with pytest.raises(SeparatorError, match=r"use 3\.11\.4 or later"):
        unpack(tmp_path / "a.tar.gz", "ssdata", tmp_path / "out")


@pytest.mark.parametrize("damage", ["cut", "no archive", "flipped"])
def test_a_broken_archive_is_refused_and_leaves_nothing(tmp_path: Path, damage: str) -> None:
    content = hashlib.sha512(b"noise").digest() * 2000
    archive = make_archive(tmp_path / "a.tar.gz", [(f"ssdata/{k}.txt", content) for k in range(20)])
    packed = bytearray(archive.read_bytes())
    if damage == "cut":
        del packed[len(packed) // 2 :]
    elif damage == "flipped":
        packed[len(packed) // 2] ^= 0xFF
    archive.write_bytes(b"nothing of the kind" if damage == "no archive" else packed)
    with pytest.raises(SeparatorError, match=r"a\.tar\.gz is broken"):
        unpack(archive, "ssdata", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_archive_of_something_else_is_refused(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", [])
    with pytest.raises(SeparatorError, match="holds no folder ssdata"):
        unpack(archive, "ssdata", tmp_path / "out")


def test_nothing_is_unpacked_over_what_is_there(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", [("ssdata/a.txt", b"one")])
    unpack(archive, "ssdata", tmp_path)
    with pytest.raises(SeparatorError, match="ssdata is there already"):
        unpack(archive, "ssdata", tmp_path)


def test_a_stopped_unpacking_starts_over(tmp_path: Path) -> None:
    archive = make_archive(tmp_path / "a.tar.gz", [("ssdata/a.txt", b"one")])
    (tmp_path / ".ssdata.unpacking/ssdata").mkdir(parents=True)
    (tmp_path / ".ssdata.unpacking/ssdata/half.txt").write_text("left by a kill")
    assert [path.name for path in unpack(archive, "ssdata", tmp_path).iterdir()] == ["a.txt"]


def test_a_disk_that_fills_while_unpacking_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "it is full")

    archive = make_archive(tmp_path / "a.tar.gz", [("ssdata/a.txt", b"one")])
    monkeypatch.setattr(tarfile, "copyfileobj", copy)
    with pytest.raises(SeparatorError, match=r"the disk of .*out is full"):
        unpack(archive, "ssdata", tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
