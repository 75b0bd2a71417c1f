"""Run an experiment of this folder.

python recipes/synthetic/run.py recipes/synthetic/table1.toml --jobs 2
python recipes/synthetic/run.py recipes/synthetic/table1.toml --scheduler tcp://host:8786
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from separator.benchmarks.command import run_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the experiment; tell the exit status."""
    return run_command(Path(__file__), __doc__, arguments=arguments)


if __name__ == "__main__":
    sys.exit(main())
