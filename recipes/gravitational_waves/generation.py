"""Measure how fast binaries are simulated, after compilation; results go to results/generation.json.

python recipes/gravitational_waves/generation.py [--repeats 3] [--results DIR]
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch

from separator.benchmarks.gw_data import make_part
from separator.benchmarks.gw_waveforms import Band
from separator.script import Parser, exit_status, positive
from separator.training import environment

N_BINARIES = 2048
N_SOURCES = 3  # of a mixture of one to five, in the mean


def main() -> None:
    """Parse the command line, simulate and write."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--results", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    band, seconds = Band(), []
    for index in range(options.repeats + 1):
        started = time.perf_counter()
        make_part(band, N_BINARIES, (0, index))
        seconds.append(time.perf_counter() - started)
    rate = N_BINARIES / statistics.median(seconds[1:])  # the first one compiles
    record = {
        "binaries_a_second": round(rate),
        "mixtures_a_second": round(rate / N_SOURCES),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
    }
    (options.results / "generation.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
