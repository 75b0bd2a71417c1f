"""Check an installation: does evidence depletion collapse less than half as often as vanilla attention?

    python recipes/synthetic/quick_check.py

Runs quick_check.toml afresh on one thread and keeps no record. The exit status is 0 if it does, else 1.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from separator.benchmarks.experiments import read_experiment
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.running import run_experiment
from separator.benchmarks.tables import summary_table
from separator.script import Parser, exit_status

HERE = Path(__file__).parent
FACTOR = 0.5


def main() -> int:
    """Train both, print both, compare."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("epochs", "n-train"):
        parser.add_argument(f"--{name}", type=int, help="instead of the experiment's")
    options = parser.parse_args()
    experiment = read_experiment(HERE / "quick_check.toml", KINDS, **vars(options))
    with tempfile.TemporaryDirectory() as directory:
        records = run_experiment(experiment, KINDS[experiment.kind], directory, stream=sys.stderr)
    print(summary_table(records))
    vanilla, evidence = (
        np.mean([record["peak_overlap"] for record in records if record["method"] == method])
        for method in experiment.methods
    )
    passed = bool(evidence < FACTOR * vanilla)
    print(f"{'passed' if passed else 'failed'}: {evidence:.2f} should be below {FACTOR} x {vanilla:.2f}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
