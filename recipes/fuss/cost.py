"""Measure what a training step costs here; tables.py plans from it what FUSS costs elsewhere.

python recipes/fuss/cost.py [RECIPE.toml] [--data DIR] [--steps 3]

Of every stage: processor seconds of a step in one process of one thread, and the floating-point operations
that torch counts (convolutions and matrix products, gradients included). Results go to results/cost.json.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from torch.utils.flop_counter import FlopCounterMode

from separator.distributed import World
from separator.fuss_mixing import FussMixtures
from separator.objectives import objective_of
from separator.script import Parser, exit_status, positive
from separator.training import Trainee, environment, new_state
from separator.training_recipe import TrainingConfig, read_recipe

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parse the command line, measure and write."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=HERE / "separator.toml")
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "data/fuss/ssdata")
    parser.add_argument("--steps", type=positive, default=3, help="that are timed a stage, after one more")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.results.mkdir(parents=True, exist_ok=True)
    config = TrainingConfig.from_dict(read_recipe(options.recipe)[1])
    mixtures = FussMixtures(options.data)
    stages = []
    begin = 0
    for stage in config.stages:
        sizes = {"batch_size": stage.batch_size, "n_batches": 1000, "seed": 0, "rows": slice(None)}
        drawn = mixtures.batches(stage.mixing, **sizes)
        trainee = Trainee(new_state(config), config, objective_of(config.network), World())
        with FlopCounterMode(display=False) as counter:
            trainee.step(stage, [drawn[0]])
        seconds = []
        for index in range(options.steps):
            batch = drawn[index + 1]
            started = time.process_time()
            trainee.step(stage, [batch])
            seconds.append(time.process_time() - started)
        stages.append(
            {
                "steps": stage.until - begin,
                "batch_size": stage.batch_size,
                "audio_seconds": stage.mixing.seconds,
                "seconds_per_step": round(statistics.median(seconds), 3),
                "flops_per_step": counter.get_total_flops(),
            }
        )
        begin = stage.until
    record = {
        "recipe": options.recipe.name,
        "stages": stages,
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
    }
    (options.results / "cost.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
