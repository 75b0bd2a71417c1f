"""Train the product's network or a peer on FUSS, resuming the run folder's state if it has one.

python recipes/fuss/train.py [RECIPE.toml] [--data DIR] [--run-folder DIR]
torchrun --nproc-per-node 2 --max-restarts 3 recipes/fuss/train.py [...]
"""

import sys
from pathlib import Path

from separator.training_command import train_by_recipe

HERE = Path(__file__).parent

if __name__ == "__main__":
    sys.exit(train_by_recipe(HERE / "separator.toml", HERE.parents[1] / "data/fuss/ssdata", __doc__))
