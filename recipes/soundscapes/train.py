"""Train the separation network of a recipe, resuming the run folder's state if it has one.

python recipes/soundscapes/train.py [RECIPE.toml] [--mechanism NAME] [--data DIR] [--run-folder DIR]
torchrun --nproc-per-node 2 recipes/soundscapes/train.py [...]
"""

import sys
from pathlib import Path

from separator.training_command import train_by_recipe

HERE = Path(__file__).parent

if __name__ == "__main__":
    sys.exit(train_by_recipe(HERE / "recipe.toml", HERE.parents[1] / "data/soundscapes/bank", __doc__))
