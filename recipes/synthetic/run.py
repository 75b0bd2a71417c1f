"""Run an experiment of this folder.

python recipes/synthetic/run.py recipes/synthetic/table1.toml --jobs 2
python recipes/synthetic/run.py recipes/synthetic/table1.toml --scheduler tcp://host:8786
"""

import sys
from pathlib import Path

from separator.benchmarks.command import run_command

if __name__ == "__main__":
    sys.exit(run_command(__doc__, Path(__file__).parent / "results"))
