"""The command ``separate``: files in, stems out.

Everything that can be refused without a model is refused before torch is even imported. Data goes to stdout,
progress and messages to stderr; the exit status is 0 when all inputs are done, 1 when one failed, 2 for a
wrong call, 130 after an interrupt.
"""

import argparse
import math
import os
import re
import signal
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from separator import __version__
from separator.console import Console, Progress, silence_streams, summary
from separator.errors import SeparatorError
from separator.naming import FORMATS, MAX_SLOTS, PLACEHOLDERS, TEMPLATE, check_template
from separator.script import Parser, counted, number, one_line, positive, whole

if TYPE_CHECKING:
    from separator.audio import AudioInfo
    from separator.inputs import Input
    from separator.jobs import Outcome

OPTIONS = (  # of `Separator.separate_file`
    *("output_dir", "n_slots", "min_existence", "filename", "format", "subtype", "start", "duration"),
    "repair",
)
INTERRUPTED, TERMINATED = 128 + signal.SIGINT, 128 + signal.SIGTERM


def build_parser() -> argparse.ArgumentParser:
    """Arguments of the command; those that the API has carry its names and defaults."""
    parser = Parser(
        prog="separate",
        description="Separate recordings into their sounds: OUTPUT/<name>/source1.wav ... residual.wav.",
        epilog="Exit status: 0 all done, 1 an input failed (others are done), 2 wrong call, 130 interrupted.",
        allow_abbrev=False,
    )
    _add_inputs(parser.add_argument_group("what is separated"))
    _add_model(parser.add_argument_group("how"))
    _add_outputs(parser.add_argument_group("what is written"))
    _add_talk(parser.add_argument_group("what is said"))
    return parser


def _add_inputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "inputs",
        metavar="INPUT",
        nargs="*",
        help="sound or video file, folder, pattern, or - for a list of paths on stdin, one a line",
    )
    group.add_argument("-r", "--recursive", action="store_true", help="take folders with all below them")
    group.add_argument(
        "--start", type=_seconds, default=0.0, metavar="S", help="second to start from (default: %(default)s)"
    )
    group.add_argument(
        "--duration", type=_positive_seconds, metavar="S", help="seconds to take (default: all)"
    )
    group.add_argument(
        "--repair", action="store_true", help="take samples that are no finite numbers as 0, with a warning"
    )


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--slots",
        dest="n_slots",
        type=_slots,
        default=4,
        metavar="N",
        help=f"largest number of sources to look for, up to {MAX_SLOTS} (default: %(default)s)",
    )
    group.add_argument(
        "--min-existence",
        type=_probability,
        metavar="P",
        help="probability from which a slot is a source; 0 keeps every slot (default: the model's own)",
    )
    group.add_argument(
        "--model",
        dest="name_or_dir",
        default="soundscapes",
        metavar="NAME|DIR",
        help="shipped model or the folder of one (default: %(default)s)",
    )
    group.add_argument("--device", default="auto", help="cpu, cuda, ... (default: %(default)s)")
    where = group.add_mutually_exclusive_group()
    where.add_argument(
        "--jobs",
        dest="n_jobs",
        type=positive,
        default=1,
        metavar="N",
        help="files that are separated at a time, each by a process with one thread (default: %(default)s)",
    )
    where.add_argument(
        "--scheduler", type=_address, metavar="tcp://HOST:PORT", help="Dask cluster to use instead"
    )


def _add_outputs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--output",
        dest="output_dir",
        type=_folder,
        default="separated",
        metavar="DIR",
        help="folder for the results (default: %(default)s)",
    )
    names = ", ".join(f"{{{name}}}" for name in PLACEHOLDERS)
    group.add_argument(
        "--filename",
        type=_template,
        default=TEMPLATE,
        metavar="TEMPLATE",
        help=f"where a stem goes in that folder, without extension, of {names} (default: %(default)s)",
    )
    group.add_argument("--format", choices=FORMATS, default="wav", help="of the stems (default: %(default)s)")
    group.add_argument(
        "--subtype",
        type=str.upper,
        metavar="NAME",
        help="coding, as PCM_24 (default: the input's own, or nearest)",
    )
    existing = group.add_mutually_exclusive_group()
    existing.add_argument("--overwrite", action="store_true", help="replace the stems of an earlier run")
    existing.add_argument(
        "--skip-existing",
        action="store_true",
        help="leave out inputs that have stems already; those without a residual are made again",
    )
    group.add_argument("--plot", action="store_true", help="save a picture, separation.png, beside the stems")


def _add_talk(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--json", action="store_true", help="print one JSON object per input instead of a table"
    )
    loudness = group.add_mutually_exclusive_group()
    loudness.add_argument(
        "-q", "--quiet", action="store_true", help="say warnings and errors only (--json is still printed)"
    )
    loudness.add_argument(
        "-v", "--verbose", action="store_true", help="say what was read and how long it took"
    )
    group.add_argument("--list-models", action="store_true", help="print the names of the shipped models")
    group.add_argument("--version", action="version", version=f"%(prog)s {__version__}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    if not arguments.inputs and not arguments.list_models:
        parser.error("the following arguments are required: INPUT")
    if complaint := _misfit(arguments):
        parser.error(complaint)
    console = Console(as_json=arguments.json, quiet=arguments.quiet, verbose=arguments.verbose)
    try:
        with _termination_as_exit(), warnings.catch_warnings():
            if not arguments.verbose:
                warnings.simplefilter("ignore")  # of libraries; ours are lines of their own
            return _list_models(console) if arguments.list_models else _run(arguments, console)
    except BrokenPipeError:  # nobody reads stdout or stderr any more
        silence_streams()
        return 1
    except KeyboardInterrupt:
        console.error("interrupted; what was not finished has left no stems")
        return INTERRUPTED
    except SeparatorError as error:  # of the output folder, the model or the cluster: nothing can be done
        console.error(error)
    except Exception as error:
        from separator.jobs import unforeseen

        console.error(unforeseen(error))
        console.detail(traceback.format_exc())
    silence_streams()
    return 1


def _misfit(arguments: argparse.Namespace) -> str:
    """What is wrong with arguments that are right each for itself."""
    if arguments.subtype is None:
        return ""
    from separator.formats import CODINGS

    known = CODINGS[arguments.format]
    if arguments.subtype in known:
        return ""
    return (
        f"argument --subtype: {arguments.subtype} is no coding of {arguments.format}; pass {', '.join(known)}"
    )


def _list_models(console: Console) -> int:
    from separator.checkpoint import available_models

    console.data("\n".join(available_models()))
    return 0


def _run(arguments: argparse.Namespace, console: Console) -> int:
    """Separate what can be separated; return the exit status."""
    from separator.audio import inspect_audio
    from separator.formats import choose_coding
    from separator.inputs import choose, find_inputs
    from separator.stems import check_replaceable

    infos: dict[Path, AudioInfo] = {}

    def check(path: Path) -> None:
        infos[path] = inspect_audio(
            path, start=arguments.start, duration=arguments.duration, repair=arguments.repair
        )

    found = find_inputs(
        arguments.inputs,
        check=check,
        recursive=arguments.recursive,
        output_dir=arguments.output_dir,
        filename=arguments.filename,
        stdin=None if sys.stdin is None else sys.stdin.buffer,
    )
    writable: list[Input] = []
    for item in found.inputs:
        try:
            choose_coding(infos[item.path], arguments.format, arguments.subtype)
            writable.append(item)
        except SeparatorError as misfit:
            found.errors.append(misfit)
    chosen = choose(
        writable,
        output_dir=arguments.output_dir,
        filename=arguments.filename,
        extension=f".{arguments.format}",
        overwrite=arguments.overwrite,
        skip_existing=arguments.skip_existing,
        check=lambda names: check_replaceable(names, arguments.n_slots, picture=arguments.plot),
    )
    left_out: Counter[str] = found.left_out + chosen.left_out
    errors = [*found.errors, *chosen.errors]
    for error in errors:
        console.error(error)
    for item in chosen.inputs:
        if item.overwrite and not arguments.overwrite:
            console.warning(
                f"{item.path} has stems without a residual, as a run broken off leaves them; made again"
            )
    n_done, n_failed = 0, len(errors)
    if chosen.inputs:
        with closing(_outcomes(chosen.inputs, arguments, console)) as outcomes:
            for item, outcome in zip(chosen.inputs, outcomes, strict=True):
                _tell(outcome, infos[item.path], console)
                n_done += outcome.result is not None
                n_failed += outcome.result is None
    if n_done + n_failed + left_out.total() > 1:
        console.note(summary(n_done, n_failed, left_out))
    return 1 if n_failed else 0


def _outcomes(
    inputs: list["Input"], arguments: argparse.Namespace, console: Console
) -> Generator["Outcome", None, None]:
    """Separate inputs that have been checked.

    Raises:
        SeparatorError: the output folder, the model or the cluster cannot be used.
    """
    from separator.checkpoint import available_models, check_model
    from separator.jobs import Task, separate_files
    from separator.stems import check_writable

    check_writable(arguments.output_dir)
    check_model(arguments.name_or_dir)
    options = {name: getattr(arguments, name) for name in OPTIONS}
    model = arguments.name_or_dir
    if arguments.scheduler:  # its workers have a working folder of their own
        inputs = [replace(item, path=Path(os.path.abspath(item.path))) for item in inputs]
        options["output_dir"] = os.path.abspath(options["output_dir"])
        model = model if model in available_models() else os.path.abspath(model)
    task = Task(model, arguments.device, options, plot=arguments.plot)
    progress = Progress(console, [item.path for item in inputs])
    yield from separate_files(
        inputs, task, n_jobs=arguments.n_jobs, scheduler=arguments.scheduler, progress=progress
    )


def _tell(outcome: "Outcome", info: "AudioInfo", console: Console) -> None:
    """Say what became of one input."""
    for message in outcome.warnings:
        console.warning(message)
    if outcome.result is None:
        console.error(outcome.error)
        console.detail(outcome.trace)
        return
    if console.verbose:
        console.detail(_details(outcome, info))
    console.result(outcome)


def _details(outcome: "Outcome", info: "AudioInfo") -> str:
    """What was read and how long it took; this imports torch."""
    from separator.segments import OVERLAP_SECONDS, SEGMENT_SECONDS

    seconds = info.length / info.sample_rate
    n_segments = max(1, math.ceil((seconds - OVERLAP_SECONDS) / (SEGMENT_SECONDS - OVERLAP_SECONDS)))
    return (
        f"separate: {one_line(info.path)}: {info.format} {info.subtype}, {info.sample_rate} Hz, "
        f"{counted(info.channels, 'channel')}, {seconds:.3f} s, {counted(n_segments, 'segment')}; "
        f"took {outcome.seconds:.2f} s"
    )


@contextmanager
def _termination_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack, so that unfinished files are taken away."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(TERMINATED)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _slots(text: str) -> int:
    """Parse a number of slots."""
    return whole(text, 1, MAX_SLOTS)


def _probability(text: str) -> float:
    """Parse a number from 0 to 1."""
    value = number(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is not from 0 to 1")
    return value


def _folder(text: str) -> str:
    """Parse the name of a folder: an empty one, such as a variable that is not set, is none."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no folder")
    return text


def _seconds(text: str) -> float:
    """Parse a time from 0."""
    value = number(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds from 0")
    return value


def _positive_seconds(text: str) -> float:
    """Parse a time above 0."""
    value = _seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 seconds")
    return value


def _template(text: str) -> str:
    """Parse a template for the names of stems."""
    try:
        return check_template(text)
    except SeparatorError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _address(text: str) -> str:
    """Parse the address of a scheduler."""
    if not re.fullmatch(r"[a-z]+://.+", text):
        raise argparse.ArgumentTypeError(f"{text} is not an address such as tcp://host:8786")
    return text


if __name__ == "__main__":
    sys.exit(main())
