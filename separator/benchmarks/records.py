"""Records of benchmark runs: JSON Lines, one run (a seed of a table cell) a line.

A file is rewritten whole under a lock of its folder, so that a kill at any moment leaves the old file or
the new one. Two records are of the same run when all of `IDENTITY` agree; the budget is part of it, so a
run made with another budget stands beside and is never taken for this one.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from separator.errors import SeparatorError

FORMAT = "separator benchmark 1"
IDENTITY: dict[str, type] = {
    "kind": str,
    "task": str,
    "method": str,
    "seed": int,
    "settings": dict,
    "budget": dict,
}

_WORDS = {str: "a text", int: "a whole number", dict: "a table"}

Record = dict[str, Any]


def read_records(path: str | Path) -> list[Record]:
    """The records of a file, none if there is no such file.

    Raises:
        SeparatorError: it cannot be read, or a line is not a record.
    """
    path = Path(path)
    if not path.exists():
        return []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SeparatorError(f"{path} cannot be read as records ({error}); {_remedy(path)}") from error
    return [_parse(line, f"{path}, line {number}", path) for number, line in enumerate(lines, 1)]


def add_records(path: str | Path, new: Iterable[Mapping[str, Any]]) -> None:
    """Put records into a file; one of the same run is replaced, all others stay.

    Raises:
        SeparatorError: the file holds something else, which stays as it is, or cannot be written; or a new
            record lacks a part of its identity or has a value that is not JSON.
    """
    path = Path(path)
    lines = {}
    for record in new:
        line = _dump({"format": FORMAT, **record})
        lines[identity(_parse(line, "the new record", path))] = line
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.parent):
            kept = {identity(record): _dump(record) for record in read_records(path)}
            temporary = path.with_name(f".{path.name}.tmp")
            with temporary.open("w", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in {**kept, **lines}.values())
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
    except OSError as error:
        raise SeparatorError(
            f"{path} cannot be written ({error.strerror}); pass a folder that can be"
        ) from error


def identity(record: Mapping[str, Any], *, without: Sequence[str] = ()) -> str:
    """What makes two records one and the same run; numbers count by value, 3 and 3.0 are one.

    >>> run = {"kind": "training", "task": "sinusoids", "method": "vanilla", "seed": 0, "settings": {}}
    >>> identity({**run, "budget": {"epochs": 3}}) == identity({**run, "budget": {"epochs": 3.0}})
    True
    """
    return json.dumps({key: _by_value(record[key]) for key in IDENTITY if key not in without}, sort_keys=True)


def _parse(line: str, place: str, path: Path) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise SeparatorError(f"{place} is not JSON ({error}); {_remedy(path)}") from error
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        found = repr(record.get("format") if isinstance(record, dict) else record)
        raise SeparatorError(f"{place} has format {found[:60]}, not {FORMAT!r}; {_remedy(path)}")
    for key, kind in IDENTITY.items():
        if not isinstance(record.get(key), kind):
            found = repr(record.get(key))
            raise SeparatorError(f"{place} has {key}={found[:60]}, not {_WORDS[kind]}; {_remedy(path)}")
    return record


def _remedy(path: Path) -> str:
    return f"{path.name} was left as it is: move it away, or pass another --results folder"


def _dump(record: Mapping[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise SeparatorError(
            f"a record of {record.get('method')!r} is not JSON ({error}); return plain finite values"
        ) from error


def _by_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _by_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_by_value(item) for item in value]
    return float(value) if isinstance(value, int) and not isinstance(value, bool) else value


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process that holds it, however it ends."""
    import fcntl  # only POSIX has it; reading records needs none

    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
