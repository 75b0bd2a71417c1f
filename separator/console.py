"""What the command says: data on stdout, everything else on stderr, one line a message.

A table or JSON lines are data. Errors, warnings, the summary and, on a terminal, the progress are not.
``--quiet`` leaves errors, warnings and JSON lines.
"""

import json
import math
import os
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from separator.errors import SeparatorError
from separator.script import duration, one_line

if TYPE_CHECKING:
    from separator.jobs import Outcome
    from separator.results import FileSeparation

ERASE = "\r\033[K"
REDRAW_SECONDS = 0.1
COUNT_SECONDS = 2.0  # between two lines of a counter
LEAST_SHARE = 0.01  # of the work, from which on the time left can be told


class Console:
    """Where the command's messages go."""

    def __init__(self, *, as_json: bool = False, quiet: bool = False, verbose: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        self.verbose = verbose
        self._drawn = False
        self._drawn_at = -math.inf
        self._active = not quiet and _is_terminal(sys.stderr)
        for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show must not stop a run
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="backslashreplace")

    def error(self, message: object) -> None:
        """Say what went wrong."""
        self._say(f"separate: error: {one_line(message)}")

    def warning(self, message: object) -> None:
        """Say what was done otherwise than expected."""
        self._say(f"separate: warning: {one_line(message)}")

    def note(self, message: object) -> None:
        """Say something by the way."""
        if not self.quiet:
            self._say(f"separate: {one_line(message)}")

    def detail(self, message: object) -> None:
        """Say something that is asked for by ``--verbose``; it may have more than one line."""
        if self.verbose:
            self._say(str(message).rstrip("\n"))

    def data(self, text: str) -> None:
        """Print data.

        Raises:
            BrokenPipeError: nobody reads any more.
            SeparatorError: it cannot be written.
        """
        self.clear()
        try:
            print(text, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise SeparatorError(f"results cannot be written to stdout ({error.strerror})") from error

    def result(self, outcome: "Outcome") -> None:
        """Print the result of one input, and warn of a gain."""
        if outcome.result is None:
            return
        if outcome.result.gain_db:
            self.warning(gain_warning(outcome.result))
        if self.quiet and not self.as_json:
            return
        form = as_json if self.as_json else as_table
        self.data(form(outcome.result, outcome.picture))

    def draw(self, line: str, *, at_once: bool = False) -> None:
        """Show a line of progress, in place of the one before."""
        now = time.monotonic()
        if self._active and (at_once or now - self._drawn_at >= REDRAW_SECONDS):
            self._drawn, self._drawn_at = True, now
            width = shutil.get_terminal_size().columns - 1
            print(f"{ERASE}{one_line(line)[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line of progress."""
        if self._drawn:
            self._drawn = False
            print(ERASE, end="", file=sys.stderr, flush=True)

    def _say(self, line: str) -> None:
        self.clear()
        print(line, file=sys.stderr, flush=True)


class Progress:
    """How far the command is with all its files, and how long it will still take."""

    def __init__(self, console: Console, paths: Sequence[Path]) -> None:
        self.console = console
        self.paths = paths
        self._sizes = [max(1, os.stat(path).st_size) for path in paths]
        self._shares = [0.0] * len(paths)
        self._started = time.monotonic()

    def __call__(self, index: int, share: float) -> None:
        """Note that ``share`` of the input at ``index`` is done."""
        self._shares[index] = share
        self.console.draw(self._line(index), at_once=share == 0)

    def _line(self, index: int) -> str:
        done = sum(share * size for share, size in zip(self._shares, self._sizes, strict=True))
        share = done / sum(self._sizes)
        seconds = time.monotonic() - self._started
        left = f", {duration(seconds / share - seconds)} left" if share >= LEAST_SHARE else ""
        n_done = sum(share >= 1 for share in self._shares)
        n_files = len(self.paths)
        which = f"file {min(n_done + 1, n_files)} of {n_files}, " if n_files > 1 else ""
        return f"{which}{100 * share:3.0f} %{left}  {self.paths[index].name}"


class Counter:
    """Progress of long work in a script: now and then a line on stderr with the count and the time left."""

    def __init__(self, label: str) -> None:
        self.label = label
        self._started = self._said_at = time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        """Note that ``done`` of ``total`` are done."""
        now = time.monotonic()
        if done < total and (done == 0 or now - self._said_at < COUNT_SECONDS):
            return
        self._said_at = now
        seconds = now - self._started
        tail = (
            f"{duration(seconds)}" if done >= total else f"{duration(seconds / done * (total - done))} left"
        )
        print(f"{self.label}: {done}/{total}, {tail}", file=sys.stderr, flush=True)


def summary(n_done: int, n_failed: int, left_out: Mapping[str, int]) -> str:
    """How many inputs were done, failed and skipped, and why.

    >>> summary(3, 1, {"no audio": 2, "hidden": 0})
    '3 done, 1 failed, 2 skipped (2 no audio)'
    """
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
    n_skipped = sum(left_out.values())
    return f"{n_done} done, {n_failed} failed, {n_skipped} skipped" + (f" ({reasons})" if reasons else "")


def as_json(result: "FileSeparation", picture: Path | None = None) -> str:
    """One line of ASCII; the level of digital silence is null."""
    value: dict[str, Any] = {
        "input": str(result.input),
        "sample_rate": result.sample_rate,
        "channels": result.channels,
        "seconds": result.seconds,
        "gain_db": round(result.gain_db, 4),
        "sources": [
            {"file": str(stem.file), "existence": round(existence, 4), "level_db": _rounded(stem.level_db)}
            for stem, existence in zip(result.sources, result.existence, strict=True)
        ],
        "residual": {"file": str(result.residual.file), "level_db": _rounded(result.residual.level_db)},
    }
    if picture is not None:
        value["picture"] = str(picture)
    return json.dumps(value, allow_nan=False)


def as_table(result: "FileSeparation", picture: Path | None = None) -> str:
    """Rows of file, existence, level and share of the stems' energy."""
    stems = [*result.sources, result.residual]
    names = [one_line(stem.file) for stem in stems]
    existence = [f"{p:.2f}" for p in result.existence] + [""]
    total = sum(stem.energy for stem in stems)
    width = max(map(len, names))
    lines = [f"{'file':{width}}  existence    level  share of energy"]
    for stem, name, probability in zip(stems, names, existence, strict=True):
        share = f"{100 * stem.energy / total:.1f} %" if total > 0 else "-"
        level = "silent" if stem.level_db is None else f"{stem.level_db:.1f} dB"
        lines.append(f"{name:{width}}  {probability:>9}  {level:>7}  {share:>15}")
    if picture is not None:
        lines.append(f"picture {one_line(picture)}")
    return "\n".join(lines)


def gain_warning(result: "FileSeparation") -> str:
    """What to say where the stems add up to less than the input."""
    return (
        f"{result.input}: all stems are {-result.gain_db:.2f} dB quieter than the input, so that none clips "
        "and they still add up"
    )


def silence_streams() -> None:
    """Send what is still unwritten to nowhere: its reader has gone."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            os.dup2(nowhere, stream.fileno())


def _is_terminal(stream: TextIO | None) -> bool:
    """Whether a line on it can be redrawn."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def _rounded(level_db: float | None) -> float | None:
    """Hundredths of a dB."""
    return None if level_db is None else round(level_db, 2)
