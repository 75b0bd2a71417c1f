"""One visitor's separation behind the page: limits first, then stems and a zip in a folder of its own.

It is `Separator.separate_file` with what a public page needs around it; errors are those of the command, with
the name of the file in place of its temporary path. Torch is imported when a job runs, so that the limits are
at hand without it.
"""

import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from separator.audio import inspect_audio
from separator.errors import SeparatorError
from separator.naming import StemNames
from separator.writing import Stem

if TYPE_CHECKING:
    from separator.results import FileSeparation
    from separator.separate import Separator


@dataclass(frozen=True)
class Limits:
    """What the page takes and how long it keeps it."""

    max_seconds: float = 600.0
    max_megabytes: float = 100.0
    keep_minutes: float = 60.0


@dataclass(frozen=True)
class Job:
    """What came out: ``files`` are the stems in the order of the table, then the picture."""

    result: "FileSeparation"
    files: tuple[Path, ...]
    archive: Path


def check_limits(path: Path, limits: Limits) -> None:
    """Refuse a file that is too large or lasts too long, before any work.

    Raises:
        SeparatorError: it is, it has been deleted, or it cannot be read.
    """
    if not path.is_file():
        raise SeparatorError(f"{path} has been deleted, its time was over; hand it over again")
    remedy = "shorten it, or use the command `separate`"
    megabytes = path.stat().st_size / 1e6
    if megabytes > limits.max_megabytes:
        raise SeparatorError(
            f"{path} has {megabytes:.1f} MB; this page takes up to {limits.max_megabytes:g} MB: {remedy}"
        )
    info = inspect_audio(path)
    seconds = info.length / info.sample_rate
    if seconds > limits.max_seconds:
        raise SeparatorError(
            f"{path} lasts {seconds:.1f} s; this page takes up to {limits.max_seconds:g} s: {remedy}"
        )


def run_job(
    separator: "Separator",
    path: Path,
    folder: Path,
    n_slots: int,
    progress: Callable[[float, str], None] = lambda share, step: None,
) -> Job:
    """Separate ``path`` into ``folder``, with the picture and a zip; ``progress`` gets share and step.

    The zip holds what the command writes with ``--plot``, byte for byte. A failure leaves no folder.

    Raises:
        SeparatorError: as `Separator.separate_file`.
    """
    from separator.plot import save_picture
    from separator.separate import ANALYSIS_SHARE

    def report(share: float) -> None:
        progress(share, "listening" if share < ANALYSIS_SHARE else "writing the stems")

    try:
        result = separator.separate_file(path, folder, n_slots, progress=report)
        picture = StemNames(path, folder).picture
        save_picture(result.overview, picture)
        files = (*(stem.file for stem in result.sources), result.residual.file, picture)
        archive = folder / f"{picture.parent.name}.zip"
        with zipfile.ZipFile(archive, "w") as target:  # stored: noise does not compress, and time counts
            for file in files:
                target.write(file, f"{picture.parent.name}/{file.name}")
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return Job(result, files, archive)


def one_line(error: SeparatorError, path: Path) -> str:
    """The command's line about ``path``, without the folder it has here."""
    return " ".join(str(error).replace(str(path), path.name).split())


def summarise(job: Job) -> dict[str, Any]:
    """Plain values for a program; the level of digital silence is None."""
    result = job.result
    return {
        "input": result.input.name,
        "sample_rate": result.sample_rate,
        "channels": result.channels,
        "seconds": result.seconds,
        "gain_db": round(result.gain_db, 4),
        "sources": [
            {**_stem(stem), "existence": round(existence, 4)}
            for stem, existence in zip(result.sources, result.existence, strict=True)
        ],
        "residual": _stem(result.residual),
    }


def _stem(stem: Stem) -> dict[str, Any]:
    """Name and level."""
    level_db = None if stem.level_db is None else round(stem.level_db, 2)
    return {"file": stem.file.name, "level_db": level_db}
