"""Run the experiment of this folder: banks that are not there are made, runs without a record are run.

    python recipes/gravitational_waves/run.py

Progress is written to stderr, the table of the records to stdout. It may be killed at any time: the same
command goes on where it was. `--seeds 0` runs one seed of every method; `--epochs` and the like make records
of another budget, kept apart.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; tell the exit status."""
    options = parse(arguments)
    os.environ.setdefault("OMP_NUM_THREADS", str(options.threads))  # before torch reads it
    from separator.benchmarks.experiments import read_experiment
    from separator.benchmarks.kinds import KINDS
    from separator.benchmarks.running import run_experiment
    from separator.benchmarks.tables import summary_table
    from separator.errors import SeparatorError

    overrides = {key: getattr(options, key) for key in ("epochs", "n_train", "n_test", "seeds", "methods")}
    try:
        experiment = read_experiment(options.experiment, KINDS, **overrides)
        records = run_experiment(
            experiment,
            KINDS[experiment.kind],
            options.results,
            jobs=options.jobs,
            threads=options.threads,
            stream=sys.stderr,
        )
        print(summary_table(records))
    except SeparatorError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("run.py: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = HERE / "recipe.toml"
    parser.add_argument("experiment", type=Path, nargs="?", default=default, metavar="EXPERIMENT.toml")
    parser.add_argument("--jobs", type=_positive, default=1, help="methods at a time, each in its process")
    parser.add_argument("--threads", type=_positive, default=1, help="of torch, for each method")
    parser.add_argument("--results", type=Path, default=HERE / "results", help="folder of the records")
    for name in ("epochs", "n-train", "n-test"):
        parser.add_argument(f"--{name}", type=_positive, help="instead of the experiment's")
    parser.add_argument("--seeds", type=int, nargs="+", help="instead of the experiment's")
    parser.add_argument("--methods", nargs="+", help="only these of the experiment's")
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
