"""Train three kinds of attention on sums of sinusoids, briefly, and see which slots collapse.

python recipes/synthetic/quickstart.py
"""

import argparse
import sys
import time

import torch

from separator.benchmarks import train_synthetic
from separator.script import Parser, exit_status

METHODS = ("vanilla", "sequential", "evidence_linear")


def main() -> None:
    """Train, and print how often two slots look at the same place."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--n-train", type=int, default=5000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for method in METHODS:
        start = time.perf_counter()
        budget = {"epochs": options.epochs, "n_train": options.n_train}
        (record,) = train_synthetic("sinusoids", method, seeds=[0], **budget)
        seconds = time.perf_counter() - start
        print(f"{method:16} peak overlap {record['peak_overlap']:.2f}  ({seconds:.0f} s)", flush=True)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
