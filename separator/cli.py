"""The command ``separate``: files in, one folder of stems a file out.

Everything that can be refused without a model is refused before torch is even imported. Data goes to stdout,
progress and errors to stderr; the exit status is 0 when all inputs are done, 1 when one failed, 2 for a wrong
call.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from separator import __version__
from separator.errors import SeparatorError

if TYPE_CHECKING:
    from separator.separate import FileSeparation
    from separator.stems import Stem


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command; those that the API has carry its names and defaults."""
    parser = argparse.ArgumentParser(
        prog="separate",
        description="Separate recordings into their sounds: OUTPUT/<name>/source1.wav ... residual.wav.",
        epilog="Exit status: 0 all done, 1 an input failed (the others are done), 2 wrong call.",
    )
    parser.add_argument(
        "inputs", metavar="INPUT", nargs="+", type=Path, help="audio file (wav, flac, ogg, mp3, ...)"
    )
    parser.add_argument(
        "--slots",
        dest="n_slots",
        type=_positive,
        default=4,
        metavar="N",
        help="largest number of sources to look for (default: %(default)s)",
    )
    parser.add_argument(
        "--min-existence",
        type=_probability,
        metavar="P",
        help="probability from which a slot is a source; 0 keeps every slot (default: the model's own)",
    )
    parser.add_argument(
        "--model",
        dest="name_or_dir",
        default="soundscapes",
        metavar="NAME|DIR",
        help="shipped model or the folder of one (default: %(default)s)",
    )
    parser.add_argument(
        "--output",
        dest="output_dir",
        default="separated",
        metavar="DIR",
        help="folder for the results (default: %(default)s)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per input instead of a table"
    )
    parser.add_argument(
        "--plot", action="store_true", help="save a picture, separation.png, beside the stems"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: %(default)s)")
    parser.add_argument("--overwrite", action="store_true", help="replace the stems of an earlier run")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    arguments = build_parser().parse_args(argv)
    ready = _ready_inputs(arguments)
    n_failed = len(arguments.inputs) - len(ready)
    if ready:
        try:
            n_failed += _separate(ready, arguments)
        except SeparatorError as error:  # of the output folder or the model: nothing can be done
            _complain(error)
            return 1
    return 1 if n_failed else 0


def _ready_inputs(arguments: argparse.Namespace) -> list[Path]:
    """Inputs that can be separated; the others are complained about."""
    from separator.audio import inspect_audio
    from separator.stems import stem_folder

    ready: dict[Path, Path] = {}  # folder of the stems, input
    for path in arguments.inputs:
        try:
            inspect_audio(path)
            folder = stem_folder(path, arguments.output_dir, overwrite=arguments.overwrite)
            if folder in ready:
                raise SeparatorError(
                    f"{path} has the same name as {ready[folder]}, both would go to {folder}; "
                    "separate it in a call of its own with another --output"
                )
        except SeparatorError as error:
            _complain(error)
        else:
            ready[folder] = path
    return list(ready.values())


def _separate(paths: list[Path], arguments: argparse.Namespace) -> int:
    """Separate files that have been checked; return how many failed.

    Raises:
        SeparatorError: the output folder or the model cannot be used.
    """
    from separator.checkpoint import check_model
    from separator.stems import check_writable

    check_writable(arguments.output_dir)
    check_model(arguments.name_or_dir)
    # threads that wait for work must not spin: on a busy machine that makes a run ten times slower
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from separator.separate import Separator

    separator = Separator.load(arguments.name_or_dir, arguments.device)
    n_failed = 0
    for path in paths:
        progress = _Progress(path)
        try:
            result = separator.separate_file(
                path,
                arguments.output_dir,
                arguments.n_slots,
                arguments.min_existence,
                overwrite=arguments.overwrite,
                progress=progress,
            )
            picture = _save_picture(result) if arguments.plot else None
        except SeparatorError as error:
            progress.clear()
            _complain(error)
            n_failed += 1
        else:
            progress.clear()
            print(_as_json(result, picture) if arguments.json else _as_table(result, picture), flush=True)
    return n_failed


def _save_picture(result: "FileSeparation") -> Path:
    """Save the picture beside the stems."""
    from separator.plot import save_picture
    from separator.stems import PICTURE

    path = result.residual.file.with_name(PICTURE)
    save_picture(result.overview, path)
    return path


def _as_json(result: "FileSeparation", picture: Path | None) -> str:
    """One line; the level of digital silence is null."""
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
    return json.dumps(value, ensure_ascii=False)


def _as_table(result: "FileSeparation", picture: Path | None) -> str:
    """Rows of file, existence, level and share of the stems' energy."""
    stems = [*result.sources, result.residual]
    existence = [f"{p:.2f}" for p in result.existence] + [""]
    total = sum(stem.energy for stem in stems)
    width = max(len(str(stem.file)) for stem in stems)
    lines = [f"{'file':{width}}  existence    level  share of energy"]
    for stem, probability in zip(stems, existence, strict=True):
        share = f"{100 * stem.energy / total:.1f} %" if total > 0 else "-"
        lines.append(f"{stem.file!s:{width}}  {probability:>9}  {_level(stem):>7}  {share:>15}")
    if result.gain_db:
        lines.append(f"gain of all stems {result.gain_db:.2f} dB, so that none clips and they still add up")
    if picture is not None:
        lines.append(f"picture {picture}")
    return "\n".join(lines)


def _level(stem: "Stem") -> str:
    """Level in dB re full scale."""
    return "silent" if stem.level_db is None else f"{stem.level_db:.1f} dB"


def _rounded(level_db: float | None) -> float | None:
    """Hundredths of a dB."""
    return None if level_db is None else round(level_db, 2)


class _Progress:
    """A line on stderr that says how far a file is; silent unless stderr is a terminal."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.shown = -1
        self.active = sys.stderr.isatty()

    def __call__(self, share: float) -> None:
        percent = int(100 * share)
        if self.active and percent != self.shown:
            self.shown = percent
            print(f"\r\033[K{self.path.name} {percent:3d} %", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self.active and self.shown >= 0:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _complain(error: SeparatorError) -> None:
    """One line on stderr."""
    message = " ".join(str(error).split())
    print(f"separate: error: {message}", file=sys.stderr)


def _positive(text: str) -> int:
    """Parse a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _probability(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
