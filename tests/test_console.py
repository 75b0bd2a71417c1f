import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from separator.console import Console, Counter, Progress, as_json, as_table, summary
from separator.errors import SeparatorError
from separator.results import FileSeparation, Overview
from separator.script import duration
from separator.writing import Stem


def result(name: str = "mix.wav") -> FileSeparation:
    return FileSeparation(
        input=Path(name),
        sample_rate=8000,
        channels=1,
        seconds=1.0,
        gain_db=0.0,
        sources=(Stem(Path("out") / name, 3.0, -10.0),),
        existence=(0.75,),
        residual=Stem(Path("residual.wav"), 1.0, None),
        overview=Overview(np.zeros((0, 0), np.float32), np.zeros((0, 0, 0), np.float32), None, 1.0, 16_000),
    )


class Terminal(io.StringIO):
    """Stderr of the console; time passes as the test says."""

    now = 0.0

    def isatty(self) -> bool:
        return True

    @property
    def lines(self) -> list[str]:
        return self.getvalue().split("\r\033[K")[1:]


@pytest.fixture
def terminal(monkeypatch):
    """Stdout and stderr of the console are a terminal."""
    stream = Terminal()
    monkeypatch.setattr("separator.console.sys", SimpleNamespace(stdout=stream, stderr=stream))
    monkeypatch.setattr("builtins.print", functools.partial(print, file=stream))
    monkeypatch.setattr("time.monotonic", lambda: stream.now)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "60")
    return stream


@pytest.fixture
def files(tmp_path):
    """Files of 100, 300 and 600 bytes."""
    paths = [tmp_path / name for name in ("a.wav", "b.wav", "c.wav")]
    for path, size in zip(paths, (100, 300, 600), strict=True):
        path.write_bytes(bytes(size))
    return paths


def test_progress_says_which_file_how_much_and_how_long(terminal, files):
    progress = Progress(Console(), files)
    progress(0, 0.0)
    terminal.now = 5.0
    progress(0, 0.5)
    terminal.now = 10.0
    progress(0, 1.0)
    terminal.now = 40.0
    progress(1, 1.0)
    assert terminal.lines == [
        "file 1 of 3,   0 %  a.wav",
        "file 1 of 3,   5 %, 1 min 35 s left  a.wav",
        "file 2 of 3,  10 %, 1 min 30 s left  a.wav",
        "file 3 of 3,  40 %, 1 min 00 s left  b.wav",
    ]


def test_progress_of_one_file_counts_no_files(terminal, files):
    progress = Progress(Console(), files[:1])
    terminal.now = 3.0
    progress(0, 0.25)
    assert terminal.lines == [" 25 %, 9 s left  a.wav"]


def test_progress_fits_the_terminal_and_is_not_redrawn_too_often(terminal, files):
    console = Console()
    console.draw("x" * 100)
    console.draw("at once")
    terminal.now = 0.2
    console.draw("later")
    assert terminal.lines == ["x" * 59, "later"]


def test_progress_is_removed_before_anything_else_is_said(terminal, files):
    console = Console()
    terminal.now = 1.0
    console.draw("half")
    console.error("broken")
    console.draw("half", at_once=True)
    console.data("table")
    assert terminal.getvalue() == "\r\033[Khalf\r\033[Kseparate: error: broken\n\r\033[Khalf\r\033[Ktable\n"


@pytest.mark.parametrize("case", ["no terminal", "quiet", "dumb"])
def test_progress_is_silent_where_it_cannot_be_redrawn_or_is_not_wanted(
    terminal, files, capsys, monkeypatch, case
):
    if case == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    if case == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    progress = Progress(Console(quiet=case == "quiet"), files)
    for share in (0.0, 0.5, 1.0):
        terminal.now += 1
        progress(0, share)
    assert terminal.getvalue() == ""


def test_a_message_is_one_line_without_terminal_commands(capsys):
    Console().error(SeparatorError("a\nb \x1b[2J \udce9 é"))
    assert capsys.readouterr().err == "separate: error: a b \\x1b[2J \\udce9 é\n"


def test_json_is_ascii_and_keeps_any_name():
    name = "caf\u00e9 \udce9 \n {0}.wav"
    text = as_json(result(name))
    assert text.isascii()
    assert len(text.splitlines()) == 1
    assert json.loads(text)["input"] == name


def test_a_table_stays_a_table_whatever_the_name():
    text = as_table(result("a\nb.wav"))
    assert len(text.splitlines()) == 3
    assert text.splitlines()[1].startswith("out/a b.wav ")
    assert [line.split()[-2] for line in text.splitlines()[1:]] == ["75.0", "25.0"]


def test_durations_and_summaries_are_for_people():
    assert [duration(s) for s in (0, 59.4, 60, 3599, 3600, 7265)] == [
        *("0 s", "59 s", "1 min 00 s", "59 min 59 s", "1 h 00 min", "2 h 01 min"),
    ]
    assert summary(1, 0, {}) == "1 done, 0 failed, 0 skipped"
    assert summary(0, 2, {"hidden": 1, "no audio": 3}) == "0 done, 2 failed, 4 skipped (1 hidden, 3 no audio)"


def test_a_counter_says_now_and_then_how_much_is_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr("separator.console.time.monotonic", lambda: now[0])
    counter = Counter("examples")
    for done, seconds in ((0, 3), (1, 1), (2, 4), (3, 5), (4, 5.5)):
        now[0] = seconds
        counter(done, 4)
    assert capsys.readouterr().err.splitlines() == ["examples: 2/4, 4 s left", "examples: 4/4, 6 s"]
