"""Where the stems of an input go: a template such as ``{folder}/{stem}/{source}`` below the output folder.

Placeholders are ``{stem}`` (the input's name without its extension), ``{name}`` (with it), ``{parent}`` (the
name of its folder), ``{folder}`` (its folder relative to the folder argument it was found in, nothing for a
file that was named itself) and ``{source}`` (source1, source2, ... or residual; it must occur). ``{{`` and
``}}`` are braces. What a placeholder stands for is inserted as it is, whatever characters it holds; no name
leaves the output folder.
"""

import os
import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from separator.errors import SeparatorError

FORMATS = ("wav", "flac", "mp3", "ogg")
TEMPLATE = "{folder}/{stem}/{source}"
PLACEHOLDERS = ("stem", "name", "parent", "folder", "source")
MAX_SLOTS = 64  # that an input may be taken apart into; each takes time and memory
LONGEST_SOURCE = "source999"
NAME_BYTES, PATH_BYTES = 255, 4096  # limits of the usual file systems, where the system does not tell its own


def check_template(filename: str) -> str:
    """Return a template that can be used.

    >>> check_template("{stem}-{source}")
    '{stem}-{source}'

    Raises:
        SeparatorError: it has no ``{source}``, an unknown placeholder, or leaves the output folder.
    """
    remedy = f"use {', '.join(f'{{{name}}}' for name in PLACEHOLDERS)}, such as {TEMPLATE}"
    try:
        fields = list(string.Formatter().parse(filename))
    except ValueError as error:
        raise SeparatorError(f"{filename=} is no template ({error}); {remedy}") from error
    for _, name, form, conversion in fields:
        if name is not None and (name not in PLACEHOLDERS or form or conversion):
            raise SeparatorError(f"{filename=} has a placeholder {name!r} that is not known; {remedy}")
    if "source" not in [name for _, name, _, _ in fields]:
        raise SeparatorError(f"{filename=} has no {{source}}, so all stems would have one name; {remedy}")
    parts = filename.split("/")
    if parts[0] == "" or ".." in parts or "\0" in filename:
        raise SeparatorError(f"{filename=} leaves the output folder; pass a path below it, without '..'")
    if parts[-1] == "":
        raise SeparatorError(f"{filename=} ends in a folder; end it in the name of a stem")
    return filename


@dataclass(frozen=True)
class StemNames:
    """Names of the files that one input is taken apart into.

    Raises:
        SeparatorError: the template cannot be used, or ``folder`` leaves the output folder.
    """

    path: Path
    """The input."""
    output_dir: Path
    filename: str = TEMPLATE
    extension: str = ".wav"
    folder: str = ""

    def __post_init__(self) -> None:
        check_template(self.filename)
        object.__setattr__(self, "path", Path(self.path))
        object.__setattr__(self, "output_dir", Path(self.output_dir))
        parts = self._parts("residual")
        if Path(self.folder).is_absolute() or ".." in parts:
            raise SeparatorError(
                f"{self.filename} with folder {self.folder!r} makes {'/'.join(parts)}, which leaves the "
                "output folder; pass names without '..'"
            )

    def source(self, index: int) -> Path:
        """File of the source that comes ``index``-th, from 0."""
        return self._file(f"source{index + 1}", self.extension)

    @property
    def residual(self) -> Path:
        """File of the residual."""
        return self._file("residual", self.extension)

    @property
    def picture(self) -> Path:
        """File of the picture, named as a stem is."""
        return self._file("separation", ".png")

    def present(self) -> list[Path]:
        """Files of an earlier run that this template names: stems of any format and the picture.

        Raises:
            SeparatorError: a folder of theirs cannot be listed.
        """
        found = [(self.output_dir, "")]
        *folders, last = self._parts("\0")
        for part in folders:
            found = [pair for folder, source in found for pair in _matches(folder, part, source)]
        stems = "|".join(FORMATS)
        files = [
            file
            for folder, source in found
            for file, word in _matches(folder, last, source, rf"(?:\.(?P<format>{stems})|\.png)")
            if (word == "separation") == (file.suffix == ".png")
        ]
        return sorted(files)

    def check(self, overwrite: bool) -> None:
        """Refuse names that must not be written, before anything is.

        Raises:
            SeparatorError: there are stems already (unless ``overwrite``), one is the input itself, the names
                leave the output folder through a link, a file stands in the way, or a name is too long.
        """
        self._check_lengths()
        top = self.output_dir.resolve()
        for file in (self.source(0), self.residual):
            if not file.parent.resolve().is_relative_to(top):
                raise SeparatorError(
                    f"{file.parent} leads out of {self.output_dir} through a link; "
                    "remove it or pass another output folder"
                )
            for folder in file.parents[: len(file.parts) - len(self.output_dir.parts) - 1]:
                if folder.exists() and not folder.is_dir():
                    raise SeparatorError(
                        f"{folder} is a file where the folder of stems would be; "
                        "remove it, or pass another --output or --filename"
                    )
        present = self.present()
        for file in present:
            if self.path.exists() and file.exists() and file.samefile(self.path):
                raise SeparatorError(
                    f"stems of {self.path} would replace it; pass another --output or --filename"
                )
            if file.is_dir():
                raise SeparatorError(f"{file} is a folder where a stem would be; remove it")
        if present and not overwrite:
            names = ", ".join(file.name for file in present)
            keep = ", --skip-existing to keep them" if self.are_complete(present) else ""
            raise SeparatorError(
                f"{present[0].parent} holds {names}; pass --overwrite to replace{keep}, or another --output"
            )

    def are_complete(self, present: Iterable[Path]) -> bool:
        """Tell whether files that are there have the residual, which is written last, among them."""
        return any(file.with_suffix("") == self.residual.with_suffix("") for file in present)

    def _parts(self, source: str) -> list[str]:
        """Names from the output folder down, without an extension."""
        path = self.path
        values = {
            # "..wav" has the stem ".", which is no name
            "stem": path.stem if path.stem.strip(".") else path.name,
            "name": path.name,
            "parent": Path(os.path.abspath(path)).parent.name,
            "folder": self.folder,
            "source": source,
        }
        parts = self.filename.format(**values).split("/")
        return [part for part in parts if part not in ("", ".")]

    def _file(self, source: str, extension: str) -> Path:
        *folders, last = self._parts(source)
        return self.output_dir.joinpath(*folders, last + extension)

    def _check_lengths(self) -> None:
        """Refuse names that no usual file system holds."""
        path = self._file(LONGEST_SOURCE, max(self.extension, ".flac", key=len))
        longest = max(path.relative_to(self.output_dir).parts, key=lambda part: len(os.fsencode(part)))
        for text, limit in ((longest, NAME_BYTES), (str(path.absolute()), PATH_BYTES - 1)):
            size = len(os.fsencode(text))
            if size > limit:
                raise SeparatorError(
                    f"{text[:40]}... has {size} bytes, more than the {limit} of a file system; "
                    "pass a shorter --filename or --output"
                )


def _matches(folder: Path, part: str, source: str, extension: str = "") -> Iterator[tuple[Path, str]]:
    """Entries of a folder whose name is ``part``, with what its ``{source}`` (a NUL) is; all must agree."""
    if "\0" not in part and not extension:
        if (folder / part).is_dir():
            yield folder / part, source
        return
    word = re.escape(source) if source else r"source[1-9][0-9]*|residual|separation"
    first, *others = map(re.escape, part.split("\0"))
    pattern = first + "".join(
        (f"(?P<source>{word})" if k == 0 else "(?P=source)") + other for k, other in enumerate(others)
    )
    try:
        names = sorted(os.listdir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise SeparatorError(
            f"{folder} cannot be listed ({error.strerror}); pass another output folder"
        ) from error
    for name in names:
        if match := re.fullmatch(pattern + extension, name, re.DOTALL):
            yield folder / name, match["source"] if others else source
