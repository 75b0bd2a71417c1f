"""Fit the existence head of a trained run and write the run's averaged weights as a model folder.

    python recipes/soundscapes/release.py [--run-folder DIR ...] [--counter-run-folder DIR] [--model DIR]

Where the recipe's table ``calibration`` names the recipe of a ``counter``, that one's weights go into the
model too.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from separator.calibration import CalibrationConfig, release
from separator.counting import SourceCounter
from separator.datasets import Bank, fixed_mixtures
from separator.errors import SeparatorError
from separator.fuss import read_fuss_examples
from separator.network import NetworkConfig, SeparationNetwork
from separator.run_folder import TrainingState, load_state, take_weights
from separator.script import Parser, exit_status, positive
from separator.settings import plain, settings_from
from separator.training import mean_weights, new_state
from separator.training_recipe import TrainingConfig, mixing_config, read_recipe

HERE = Path(__file__).parent


def main() -> None:
    """Parse the command line, calibrate and save."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=HERE / "recipe.toml")
    parser.add_argument("--mechanism", help="slot attention mechanism (default: the recipe's)")
    parser.add_argument(
        "--run-folder",
        type=Path,
        nargs="+",
        help="run folder (default: runs/<recipe name> beside the recipe); of several the mean is taken",
    )
    parser.add_argument("--counter-run-folder", type=Path, help="the counter's (default: likewise)")
    parser.add_argument("--bank", type=Path, default=HERE.parents[1] / "data/soundscapes/bank")
    parser.add_argument("--mixtures", type=Path, default=HERE.parents[1] / "data/soundscapes/mixtures")
    parser.add_argument("--limit", type=positive, help="calibrate on about this many mixtures only")
    parser.add_argument("--model", type=Path, default=HERE.parents[1] / "models/soundscapes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, recipe = read_recipe(arguments.recipe, arguments.mechanism)
    settings = dict(recipe.get("calibration", {}))
    mixing = mixing_config(settings.pop("mixing", {}))
    counter_recipe = settings.pop("counter", None)
    calibration = settings_from(CalibrationConfig, settings, "calibration")
    runs = arguments.recipe.parent / "runs"
    states = read_states(recipe, arguments.run_folder or [runs / name])
    network = states[-1].average
    if not isinstance(network, SeparationNetwork):
        raise SeparatorError(f"{arguments.recipe} trains no network that separates; name one that does")
    network.load_state_dict(mean_weights([state.average.state_dict() for state in states]))
    if counter_recipe is not None:
        counter_name, tables = read_recipe(arguments.recipe.parent / counter_recipe)
        (state,) = read_states(tables, [arguments.counter_run_folder or runs / counter_name])
        if not isinstance(state.average, SourceCounter):
            raise SeparatorError(f"calibration setting counter = {counter_recipe!r} trains no counter")
        network = with_counter(network, state.average)
    heard = fixed_mixtures(Bank(arguments.bank, "train"), mixing, arguments.limit or calibration.n_mixtures)
    unheard = read_fuss_examples(arguments.mixtures, "validation")
    if arguments.limit:
        unheard = unheard[:: max(1, len(unheard) // arguments.limit)]
    sources = (example.sources for example in unheard)
    print(json.dumps(release(network, heard, sources, calibration, arguments.model, states[-1].step)))


def read_states(recipe: Mapping[str, Any], folders: Sequence[Path]) -> list[TrainingState]:
    """The states of a recipe's runs."""
    states = []
    for folder in folders:
        states.append(new_state(TrainingConfig.from_dict(recipe)))
        load_state(states[-1], folder)
    return states


def with_counter(network: SeparationNetwork, counter: SourceCounter) -> SeparationNetwork:
    """A network of the same weights that has a counter, too."""
    settings = {**network.config.to_dict(), "counter": plain(dataclasses.asdict(counter.config))}
    both = SeparationNetwork(NetworkConfig.from_dict(settings))
    weights = {f"counter.{name}": value for name, value in counter.state_dict().items()}
    take_weights(both, {**network.state_dict(), **weights}, "the counter's run")
    return both.eval()


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
