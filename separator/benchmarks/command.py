"""The command that runs an experiment: what has no record yet is run, and its record kept."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from separator.script import Parser, exit_status

HELP = """
Progress is written to stderr, the table of the records to stdout. It may be killed at any time: the same
command goes on where it was. `--epochs` and the like make records of another budget, kept apart.
"""


def run_command(
    script: Path,
    description: str | None,
    *,
    experiment: Path | None = None,
    arguments: Sequence[str] | None = None,
) -> int:
    """Parse a command line, run its experiment and return the exit status.

    Args:
        script: that the command runs; records go to ``results`` beside it, unless the command names another.
        description: what ``--help`` says first.
        experiment: what is run if the command names none.
        arguments: of the command line; by default those of the process.
    """
    options = _parse(description, script.parent / "results", experiment, arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))  # before torch reads it
    from separator.benchmarks.experiments import read_experiment
    from separator.benchmarks.kinds import KINDS
    from separator.benchmarks.running import run_experiment
    from separator.benchmarks.tables import summary_table

    overrides = {
        key: getattr(options, key) for key in ("epochs", "n_train", "n_test", "seeds", "tasks", "methods")
    }

    def work() -> None:
        chosen = read_experiment(options.experiment, KINDS, **overrides)
        records = run_experiment(
            chosen,
            KINDS[chosen.kind],
            options.results,
            jobs=options.jobs,
            scheduler=options.scheduler,
            threads=options.threads,
            stream=sys.stderr,
        )
        sys.stdout.write(summary_table(records) + "\n")

    return exit_status(work, script, resumes=True)


def _parse(
    description: str | None, results: Path, experiment: Path | None, arguments: Sequence[str] | None
) -> argparse.Namespace:
    parser = Parser(
        description=(description or "") + HELP, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "experiment",
        type=Path,
        nargs="?" if experiment is not None else None,
        default=experiment,
        metavar="EXPERIMENT.toml",
    )
    parser.add_argument("--jobs", type=_positive, default=1, help="cells at a time, each in its process")
    parser.add_argument("--scheduler", help="address of a Dask scheduler whose workers run the cells")
    parser.add_argument(
        "--threads", type=_positive, default=1, help="of torch, for each cell; compiled loops take one"
    )
    parser.add_argument("--results", type=Path, default=results, help="folder of the records")
    for name in ("epochs", "n-train", "n-test"):
        parser.add_argument(f"--{name}", type=_positive, help="instead of the experiment's")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the experiment's")
    for name in ("tasks", "methods"):
        parser.add_argument(f"--{name}", nargs="+", help="only these of the experiment's")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
