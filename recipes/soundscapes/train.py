"""Train the separation network of a recipe, resuming the run folder's state if it has one.

python recipes/soundscapes/train.py [RECIPE.toml] [--mechanism NAME] [--bank DIR] [--run DIR]
"""

import argparse
from pathlib import Path

import torch

from separator.training import train
from separator.training_recipe import TrainingConfig, read_recipe

HERE = Path(__file__).parent


def main() -> None:
    """Parse the command line and train."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, nargs="?", default=HERE / "recipe.toml")
    parser.add_argument("--mechanism", help="slot attention mechanism (default: the recipe's)")
    parser.add_argument("--bank", type=Path, default=HERE.parents[1] / "data/soundscapes/bank")
    parser.add_argument("--run", type=Path, help="run folder (default: runs/<recipe name> beside the recipe)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    name, recipe = read_recipe(arguments.recipe, arguments.mechanism)
    train(TrainingConfig.from_dict(recipe), arguments.bank, arguments.run or HERE / "runs" / name)


if __name__ == "__main__":
    main()
