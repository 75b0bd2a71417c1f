import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from separator.benchmarks.records import FORMAT, add_records, identity, read_records
from separator.errors import SeparatorError


def record(seed: int = 0, epochs: float = 3, **more: Any) -> dict[str, Any]:
    run = {"kind": "training", "task": "sinusoids", "method": "vanilla", "seed": seed, "settings": {}}
    return {**run, "budget": {"epochs": epochs}, **more}


def test_records_come_back_as_they_were_added(tmp_path: Path) -> None:
    path = tmp_path / "deep/er/table.jsonl"
    assert read_records(path) == []
    add_records(path, [record(0, value=0.1), record(1, value=None)])
    add_records(path, [record(2)])
    assert [r["seed"] for r in read_records(path)] == [0, 1, 2]
    assert read_records(path)[0] == {"format": FORMAT, **record(0, value=0.1)}
    assert [p.name for p in path.parent.iterdir()] == ["table.jsonl"]


def test_the_same_run_replaces_and_another_budget_stands_beside(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    add_records(path, [record(value=1)])
    add_records(path, [record(value=2), record(epochs=200, value=3)])
    add_records(path, [record(epochs=3.0, value=4)])
    assert [(r["budget"]["epochs"], r["value"]) for r in read_records(path)] == [(3.0, 4), (200, 3)]


def test_every_part_of_the_identity_tells_runs_apart() -> None:
    base = record(settings={"gamma": 1.0, "evaluations": ["a"]})
    others = [
        {**base, "kind": "latency"},
        {**base, "task": "multiscale"},
        {**base, "method": "sequential"},
        {**base, "seed": 1},
        {**base, "budget": {"epochs": 4}},
        {**base, "settings": {"gamma": 3.0, "evaluations": ["a"]}},
        {**base, "settings": {"gamma": 1.0}},
    ]
    assert len({identity(r) for r in (base, *others)}) == 8
    assert identity(base) == identity({**base, "settings": {"evaluations": ("a",), "gamma": 1}})


GOOD = json.dumps({"format": FORMAT, **record()})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'{"task": "sinusoids"', "line 1 is not JSON"),
        (f"{GOOD}\n{GOOD[:30]}".encode(), "line 2 is not JSON"),
        (b'{"task": "sinusoids"}\n', "has format None, not"),
        (b"[1, 2]\n", "has format [1, 2], not"),
        (GOOD.replace(FORMAT, "something else").encode(), "has format 'something else', not"),
        (GOOD.replace('"seed": 0', '"seed": "0"').encode(), "has seed='0', not a whole number"),
        (GOOD.replace('"settings": {}', '"setting": {}').encode(), "has settings=None, not a table"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "cannot be read as records"),
        (b"\n", "line 1 is not JSON"),
    ],
)
def test_a_broken_or_foreign_file_is_refused_in_one_line_and_left_alone(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "table.jsonl"
    path.write_bytes(content)
    for touch in (lambda: read_records(path), lambda: add_records(path, [record(5)])):
        with pytest.raises(SeparatorError) as caught:
            touch()
        assert said in str(caught.value)
        assert "was left as it is: move it away" in str(caught.value)
        assert "\n" not in str(caught.value)
    assert path.read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["table.jsonl"]


def test_a_record_that_is_none_is_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    add_records(path, [record()])
    before = path.read_bytes()
    for bad in (record(value=float("nan")), record(value=Path()), {"task": "sinusoids"}):
        with pytest.raises(SeparatorError):
            add_records(path, [record(7), bad])
    assert path.read_bytes() == before


def test_a_file_that_cannot_be_written_is_an_error_of_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SeparatorError, match=r"cannot be written .* pass a folder that can be"):
        add_records(tmp_path / "file/table.jsonl", [record()])


WRITER = """
import sys
from separator.benchmarks.records import add_records
first = int(sys.argv[2])
for seed in range(first, first + 100000):
    run = {"kind": "training", "task": "t", "method": "m", "seed": seed, "settings": {}, "budget": {}}
    add_records(sys.argv[1], [{**run, "text": "x" * 2000}])
    print(seed, flush=True)
"""


def test_two_writers_killed_while_they_write_lose_nothing_they_finished(tmp_path: Path) -> None:
    path = tmp_path / "table.jsonl"
    command = [sys.executable, "-c", WRITER, str(path)]
    for _ in range(3):
        first = 1 + max((r["seed"] for r in read_records(path)), default=0)
        starts = (first, first + 1_000_000)
        writers = [
            subprocess.Popen([*command, str(start)], stdout=subprocess.PIPE, text=True) for start in starts
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(0.2)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
        said = {
            start + k
            for start, writer in zip(starts, writers, strict=True)
            for k in range(1 + len(writer.communicate()[0].splitlines()))
        }
        assert said <= {r["seed"] for r in read_records(path)}
