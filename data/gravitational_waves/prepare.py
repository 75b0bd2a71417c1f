"""Make the banks of binaries that the recipe of gravitational waves trains and tests on.

    python data/gravitational_waves/prepare.py recipes/gravitational_waves/recipe.toml

Progress is written to stderr. It may be stopped: the same command goes on where it was. The files stay in
$SEPARATOR_CACHE, by default the user's cache. With `--sample FILE` it writes the sample of the tests instead.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from separator.benchmarks.gw_data import make_part, write_part
from separator.benchmarks.gw_waveforms import Band
from separator.script import Parser, exit_status

SAMPLE_BAND = Band(n_bins=128)
N_SAMPLE = 64


def main(arguments: Sequence[str] | None = None) -> int:
    """Make what is asked for; tell the exit status."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", type=Path, nargs="?", metavar="EXPERIMENT.toml")
    parser.add_argument("--sample", type=Path, metavar="FILE", help="write the sample of the tests")
    options = parser.parse_args(arguments)
    if (options.experiment is None) == (options.sample is None):
        parser.error("pass an experiment, or --sample FILE")
    return exit_status(lambda: _prepare(options), __file__, resumes=True)


def _prepare(options: argparse.Namespace) -> None:
    """Make the sample or the banks."""
    if options.sample is not None:
        write_part(options.sample, *make_part(SAMPLE_BAND, N_SAMPLE, (0, 0)))
    else:
        make_banks(options.experiment)


def make_banks(path: Path) -> None:
    """Make the banks of all cells of an experiment."""
    from separator.benchmarks.experiments import call_of, read_experiment
    from separator.benchmarks.gw_runs import setting_of
    from separator.benchmarks.kinds import KINDS

    experiment = read_experiment(path, KINDS)
    kind = KINDS[experiment.kind]
    settings = [setting_of(**call_of(cell, kind)) for cell in experiment.cells(kind)]
    for setting in {(s.population, s.n_waveforms): s for s in settings}.values():
        start = time.monotonic()

        def tell(share: float, start: float = start) -> None:
            left = (time.monotonic() - start) * (1 - share) / share
            print(f"{100 * share:.0f} % of the banks, {left:.0f} s left", file=sys.stderr)

        setting.banks(tell)


if __name__ == "__main__":
    sys.exit(main())
