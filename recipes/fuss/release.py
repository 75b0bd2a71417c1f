"""Fit the existence head of a run on FUSS and write its best weights as a model folder.

python recipes/fuss/release.py --model DIR [RECIPE.toml] [--run-folder DIR] [--data DIR]
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from separator.calibration import CalibrationConfig, release
from separator.errors import SeparatorError
from separator.fuss import read_fuss_examples
from separator.network import NetworkConfig
from separator.run_folder import load_best
from separator.script import Parser, exit_status, positive
from separator.settings import settings_from
from separator.training import new_state
from separator.training_recipe import TrainingConfig, read_recipe

HERE = Path(__file__).parent


def main() -> None:
    """Parse the command line, calibrate and save."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=HERE / "separator.toml")
    parser.add_argument(
        "--run-folder", type=Path, help="run folder (default: runs/<recipe name> beside the recipe)"
    )
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "data/fuss/ssdata")
    parser.add_argument("--limit", type=positive, help="calibrate on this many mixtures only")
    parser.add_argument("--model", type=Path, required=True, help="folder that is written")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, recipe = read_recipe(arguments.recipe)
    training = TrainingConfig.from_dict(recipe)
    if not isinstance(training.network, NetworkConfig):
        raise SeparatorError(f"{arguments.recipe} trains a peer; a model folder holds the separator network")
    network = new_state(training).average
    best = load_best(network, arguments.run_folder or arguments.recipe.parent / "runs" / name)
    config = settings_from(CalibrationConfig, recipe.get("calibration", {}), "calibration")
    n_heard = arguments.limit or config.n_mixtures
    heard, unheard = (
        (e.sources for e in read_fuss_examples(arguments.data, split)[:limit] if len(e.sources))
        for split, limit in (("train", n_heard), ("validation", arguments.limit))
    )
    print(json.dumps(release(network, heard, unheard, config, arguments.model, best["step"])))


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
