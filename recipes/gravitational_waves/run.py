"""Run the experiment of this folder: banks that are not there are made, runs without a record are run.

    python recipes/gravitational_waves/run.py

`--seeds 0` runs one seed of every method.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from separator.benchmarks.command import run_command

SCRIPT = Path(__file__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; tell the exit status."""
    return run_command(SCRIPT, __doc__, experiment=SCRIPT.parent / "recipe.toml", arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
