"""Which files the command takes: files, folders, patterns and lists; and which of them can be written.

In a folder the content decides what is audio. Text, hidden files and stems of an earlier run are left out and
counted; a file that has the extension of audio and cannot be read is a failure. The order is the natural one
(2 before 10), a file is taken once, and no two inputs ever write one stem.
"""

import glob
import os
import re
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

from separator.errors import SeparatorError
from separator.naming import FORMATS, TEMPLATE, StemNames

AUDIO_EXTENSIONS = {
    *(f".{name}" for name in FORMATS),
    *(".wave", ".bwf", ".w64", ".rf64", ".aif", ".aiff", ".aifc", ".au", ".snd", ".caf", ".oga", ".opus"),
    *(".mp2", ".m4a", ".m4b", ".aac", ".ac3", ".wma", ".wv", ".amr", ".g722", ".ape", ".tta", ".voc", ".mka"),
}
NO_AUDIO, HIDDEN, STEMS, EXISTING = "no audio", "hidden", "of an earlier run", "done already"
SNIFFED_BYTES = 1024
# templates that may tell two inputs apart
APART = (
    "{name}/{source}",
    "{parent}/{stem}/{source}",
    "{parent}/{name}/{source}",
    "{folder}/{name}/{source}",
)

_STEM = re.compile(rf"(?:source[1-9][0-9]*|residual)\.(?:{'|'.join(FORMATS)})")
_RESIDUAL = re.compile(rf"residual\.(?:{'|'.join(FORMATS)})")


@dataclass(frozen=True)
class Input:
    """A file to be separated."""

    path: Path
    folder: str = ""
    """Its folder, relative to the folder argument it was found in."""
    overwrite: bool = False
    """Whether stems that are there already may be replaced."""


@dataclass
class Selection:
    """Inputs, what failed before it could become one, and how many were left out for which reason."""

    inputs: list[Input] = field(default_factory=list)
    errors: list[SeparatorError] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)


def find_inputs(
    arguments: Sequence[str],
    *,
    check: Callable[[Path], object],
    recursive: bool = False,
    output_dir: str | Path = "separated",
    filename: str = TEMPLATE,
    stdin: BinaryIO | None = None,
) -> Selection:
    """Find the audio files that ``arguments`` name.

    An argument is a file, a folder (its own files, or with ``recursive`` all below it; links to folders are
    not followed), a pattern such as ``music/*.wav``, or ``-`` for paths on ``stdin``, one a line. ``check``
    raises `SeparatorError` for a file that cannot be separated.
    """
    selection = Selection()
    seen: set[Path] = set()
    waiting = deque(arguments)
    while waiting:
        argument = waiting.popleft()
        try:
            if argument == "-":
                waiting.extendleft(reversed(_listed(stdin)))
                continue
            named, candidates = _candidates(
                argument, recursive, Path(output_dir), filename, selection.left_out
            )
            outcomes = [_consider(item, named, seen, check, selection) for item in candidates]
            if not any(outcomes):
                remedy = "pass another folder" if recursive else "pass another folder, or --recursive"
                raise SeparatorError(f"{argument} is a folder without audio; {remedy}")
        except (ValueError, OSError) as error:
            selection.errors.append(_as_line(error, argument))
    return selection


def choose(
    inputs: Iterable[Input],
    *,
    output_dir: str | Path,
    filename: str = TEMPLATE,
    extension: str = ".wav",
    overwrite: bool = False,
    skip_existing: bool = False,
    check: Callable[[StemNames], object] = lambda names: None,
) -> Selection:
    """Select the inputs whose stems can be written without harm to other files.

    With ``skip_existing`` those whose stems are complete are left out; stems without a residual are those of
    a run that was killed, and are replaced. ``check`` raises `SeparatorError` for what must not be.
    """
    inputs = list(inputs)
    selection = Selection()
    originals = {item.path.resolve(): item.path for item in inputs}
    taken: dict[Path, Input] = {}
    for item in inputs:
        try:
            names = StemNames(item.path, Path(output_dir), filename, extension, item.folder)
            if (other := taken.setdefault(names.residual, item)) is not item:
                raise SeparatorError(_same_names(item, other, names.residual))
            present = names.present()
            if skip_existing and names.are_complete(present):
                selection.left_out[EXISTING] += 1
                continue
            for file in present:
                if (victim := originals.get(file.resolve(), item.path)) != item.path:
                    raise SeparatorError(
                        f"stems of {item.path} would replace the input {victim}; "
                        "pass another --output or --filename"
                    )
            names.check(overwrite or skip_existing)
            check(names)
        except (ValueError, OSError) as error:
            selection.errors.append(_as_line(error, item.path))
        else:
            selection.inputs.append(replace(item, overwrite=overwrite or bool(present)))
    return selection


def natural_key(path: Path) -> tuple[object, ...]:
    """Sort key that counts.

    >>> [path.name for path in sorted(map(Path, ["take 10", "b", "Take 2"]), key=natural_key)]
    ['b', 'Take 2', 'take 10']
    """
    parts = (re.split(r"([0-9]+)", part.casefold()) for part in path.parts)
    counted = tuple(tuple(int(p) if k % 2 else p for k, p in enumerate(part)) for part in parts)
    return counted, str(path)


def _listed(stdin: BinaryIO | None) -> list[str]:
    """Paths on ``stdin``, one a line.

    Raises:
        SeparatorError: there are none.
    """
    lines = [] if stdin is None else [line.rstrip(b"\r") for line in stdin.read().split(b"\n")]
    if not any(lines):
        raise SeparatorError("- finds no paths on standard input; pass them there, one a line")
    return [os.fsdecode(line) for line in lines if line]


def _candidates(
    argument: str, recursive: bool, output_dir: Path, filename: str, left_out: Counter[str]
) -> tuple[bool, list[Input]]:
    """Whether an argument names files itself, and the files it stands for.

    Raises:
        SeparatorError: it stands for none.
    """
    if not argument:
        raise SeparatorError("'' is no path; pass a file or a folder")
    path = Path(argument)
    if path.is_dir():
        return False, _in_folder(path, recursive, output_dir, filename, left_out)
    if os.path.lexists(path) or not glob.has_magic(argument):
        return True, [Input(path)]
    matches = sorted(map(Path, glob.glob(argument, recursive=True)), key=natural_key)
    files = [Input(match) for match in matches if not match.is_dir()]
    if not files:
        raise SeparatorError(f"{argument} matches no file; check the pattern")
    return True, files


def _consider(
    item: Input, named: bool, seen: set[Path], check: Callable[[Path], object], selection: Selection
) -> bool:
    """Put a file where it belongs; whether it is an input or fails as one."""
    key = item.path.parent.resolve() / item.path.name
    if key in seen:
        return True
    try:
        if named or _may_be_audio(item.path):
            check(item.path)
            selection.inputs.append(item)
            seen.add(key)
            return True
    except (ValueError, OSError) as error:
        if named or _has_audio_extension(item.path):
            selection.errors.append(_as_line(error, item.path))
            seen.add(key)
            return True
    selection.left_out[NO_AUDIO] += 1
    return False


def _in_folder(
    top: Path, recursive: bool, output_dir: Path, filename: str, left_out: Counter[str]
) -> list[Input]:
    """Files below a folder that may be audio."""
    output = output_dir.resolve()
    found = []
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        with os.scandir(folder) as scan:
            entries = list(scan)
        # an earlier run with another output folder left stems here
        is_result = folder != top and any(_RESIDUAL.fullmatch(entry.name) for entry in entries)
        for entry in entries:
            path = folder / entry.name
            if entry.name.startswith("."):
                left_out[HIDDEN] += 1
            elif entry.is_dir(follow_symlinks=False):
                if recursive and path.resolve() == output:
                    left_out[STEMS] += sum(len(files) for _, _, files in os.walk(path))
                elif recursive:
                    waiting.append(path)
            elif is_result and _STEM.fullmatch(entry.name):
                left_out[STEMS] += 1
            elif entry.is_file() or (entry.is_symlink() and not entry.is_dir()):
                relative = path.parent.relative_to(top).as_posix()
                found.append(Input(path, "" if relative == "." else relative))
    if top.resolve().is_relative_to(output):
        stems = {stem.resolve() for item in found for stem in _stems(item, output_dir, filename)}
        kept = [item for item in found if item.path.resolve() not in stems]
        left_out[STEMS] += len(found) - len(kept)
        found = kept
    return sorted(found, key=lambda item: natural_key(item.path))


def _stems(item: Input, output_dir: Path, filename: str) -> list[Path]:
    """Stems of an input that are there already."""
    return StemNames(item.path, output_dir, filename, folder=item.folder).present()


def _may_be_audio(path: Path) -> bool:
    """Whether it is worth a look by a decoder: text is not, unless it says that it is audio."""
    if _has_audio_extension(path):
        return True
    with path.open("rb") as file:
        head = file.read(SNIFFED_BYTES)
    try:
        text = head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # not merely a character that the end cuts
            return True
        text = head[: error.start].decode("utf-8")
    return not all(character.isprintable() or character in "\t\n\r\f" for character in text)


def _has_audio_extension(path: Path) -> bool:
    return path.suffix.lower() in AUDIO_EXTENSIONS


def _as_line(error: Exception, subject: object) -> SeparatorError:
    """The error itself, or what the system says of a path."""
    if isinstance(error, SeparatorError):
        return error
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return SeparatorError(f"{subject} cannot be read ({reason}); check the path and its permissions")


def _same_names(item: Input, other: Input, file: Path) -> str:
    """What to say of two inputs with the same stems."""

    def residual(of: Input, template: str) -> Path:
        return StemNames(of.path, Path(), template, folder=of.folder).residual

    for template in APART:
        if residual(item, template) != residual(other, template):
            remedy = f"--filename '{template}'"
            break
    else:
        remedy = "another --output"
    return (
        f"{item.path} and {other.path} would both be written to {file.parent}; "
        f"separate {item.path} in a call of its own, or pass {remedy}"
    )
