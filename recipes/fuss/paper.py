"""Run the paper's experiment on FUSS.

python recipes/fuss/paper.py [recipes/fuss/paper_like.toml]
"""

import sys
from pathlib import Path

from separator.benchmarks.command import run_command

HERE = Path(__file__).parent

if __name__ == "__main__":
    sys.exit(run_command(Path(__file__), __doc__, experiment=HERE / "paper.toml"))
