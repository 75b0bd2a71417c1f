"""What command lines have in common: their numbers, their one line of error, their exit status."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from separator.errors import SeparatorError


class Parser(argparse.ArgumentParser):
    """A parser that says in one line what is wrong with a call, and ends with the status 2."""

    _arguments: tuple[str, ...] = ()

    def parse_known_args(
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse ``args``, by default those of the process."""
        self._arguments = tuple(sys.argv[1:] if args is None else args)
        return super().parse_known_args(self._arguments, namespace)

    def error(self, message: str) -> NoReturn:
        """Say what is wrong, how to name a file that looks like an option, and where options are told."""
        files = [name for name in self._arguments if self._hides_a_file(name)]
        remedy = f"; write ./{files[0]} for the file of that name" if files else ""
        self.exit(2, f"{self.prog}: error: {one_line(message + remedy)}; see {self.prog} --help\n")

    def _hides_a_file(self, argument: str) -> bool:
        """Whether an argument that is no option of this parser would be a file's name but for its dash."""
        known = argument in self._option_string_actions
        return argument.startswith("-") and not known and os.path.lexists(argument)


def exit_status(work: Callable[[], int | None], script: str | Path, *, resumes: bool = False) -> int:
    """Do the ``work`` of a script and return its exit status: the work's own, or 0 if it says none.

    What the work cannot use, of its input or the disk, is one line on stderr, and the status 1. So is an
    interrupt, and 130; the line says whether the same command ``resumes``.
    """
    try:
        return work() or 0
    except (SeparatorError, OSError) as error:
        said, status = f"error: {one_line(error)}", 1
    except KeyboardInterrupt:
        said, status = "stopped" + ("; the same command goes on from here" if resumes else ""), 130
    sys.stderr.write(f"{Path(script).name}: {said}\n")
    return status


def positive(text: str) -> int:
    """Parse a whole number from 1, of a command line."""
    return whole(text, 1)


def natural(text: str) -> int:
    """Parse a whole number from 0, of a command line."""
    return whole(text, 0)


def number(text: str) -> float:
    """Parse a number, of a command line."""
    try:
        return float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error


def whole(text: str, least: int, most: int | None = None) -> int:
    """Parse a whole number from ``least``, and up to ``most`` if there is one, of a command line."""
    try:
        value = int(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from error
    if value < least or (most is not None and value > most):
        accepted = f"{least} or more" if most is None else f"from {least} to {most}"
        raise argparse.ArgumentTypeError(f"{text} is not {accepted}")
    return value


def counted(count: int, noun: str) -> str:
    """A count and what is counted.

    >>> [counted(n, "sample") for n in (0, 1, 2)]
    ['0 samples', '1 sample', '2 samples']
    """
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """A time for people.

    >>> [duration(s) for s in (0.4, 59.6, 3661, 90_000)]
    ['0 s', '1 min 00 s', '1 h 01 min', '25 h 00 min']
    """
    minutes, rest = divmod(round(seconds), 60)
    if minutes >= 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def one_line(message: object) -> str:
    """A message without line breaks, and without what a terminal would obey.

    >>> one_line("a\\nb\\x1b[2J")
    'a b\\\\x1b[2J'
    """
    text = " ".join(str(message).splitlines())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
