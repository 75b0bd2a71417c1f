"""Fit the existence head of a trained run and write the run's averaged weights as a model folder.

python recipes/soundscapes/release.py [--run-folder DIR ...] [--model DIR] [--bank DIR] [--mixtures DIR]
"""

import argparse
import json
import sys
from pathlib import Path

import torch

from separator.calibration import CalibrationConfig, release
from separator.datasets import Bank, fixed_mixtures
from separator.fuss import read_fuss_examples
from separator.run_folder import load_state
from separator.script import exit_status, positive
from separator.settings import settings_from
from separator.training import mean_weights, new_state
from separator.training_recipe import TrainingConfig, mixing_config, read_recipe

HERE = Path(__file__).parent


def main() -> None:
    """Parse the command line, calibrate and save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, nargs="?", default=HERE / "recipe.toml")
    parser.add_argument("--mechanism", help="slot attention mechanism (default: the recipe's)")
    parser.add_argument(
        "--run-folder",
        type=Path,
        nargs="+",
        help="run folder (default: runs/<recipe name> beside the recipe); of several the mean is taken",
    )
    parser.add_argument("--bank", type=Path, default=HERE.parents[1] / "data/soundscapes/bank")
    parser.add_argument("--mixtures", type=Path, default=HERE.parents[1] / "data/soundscapes/mixtures")
    parser.add_argument("--limit", type=positive, help="calibrate on about this many mixtures only")
    parser.add_argument("--model", type=Path, default=HERE.parents[1] / "models/soundscapes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, recipe = read_recipe(arguments.recipe, arguments.mechanism)
    states = []
    for folder in arguments.run_folder or [arguments.recipe.parent / "runs" / name]:
        states.append(new_state(TrainingConfig.from_dict(recipe)))
        load_state(states[-1], folder)
    settings = dict(recipe.get("calibration", {}))
    mixing = mixing_config(settings.pop("mixing", {}))
    calibration = settings_from(CalibrationConfig, settings, "calibration")
    heard = fixed_mixtures(Bank(arguments.bank, "train"), mixing, arguments.limit or calibration.n_mixtures)
    unheard = read_fuss_examples(arguments.mixtures, "validation")
    if arguments.limit:
        unheard = unheard[:: max(1, len(unheard) // arguments.limit)]
    network = states[-1].average
    network.load_state_dict(mean_weights([state.average.state_dict() for state in states]))
    sources = (example.sources for example in unheard)
    print(json.dumps(release(network, heard, sources, calibration, arguments.model, states[-1].step)))


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
