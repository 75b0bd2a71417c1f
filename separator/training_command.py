"""The command line of the training recipes, alone or under ``torchrun``."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from separator.distributed import joined
from separator.training import train
from separator.training_recipe import TrainingConfig, read_recipe


def train_by_recipe(
    recipe: Path, data: Path, description: str | None, arguments: Sequence[str] | None = None
) -> None:
    """Parse the command line and train; runs go to ``runs/<recipe name>`` beside the recipe.

    Args:
        recipe: TOML file that is trained if the command names no other.
        data: folder of the mixtures, likewise.
        description: what ``--help`` says.
        arguments: of the command line; by default those of the process.

    Raises:
        SeparatorError: recipe, data or device cannot be used.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", type=Path, nargs="?", default=recipe)
    parser.add_argument("--mechanism", help="slot attention mechanism (default: the recipe's)")
    parser.add_argument("--data", type=Path, default=data, help="folder of the mixtures")
    parser.add_argument(
        "--run-folder", type=Path, help="run folder (default: runs/<recipe name> beside the recipe)"
    )
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    name, tables = read_recipe(options.recipe, options.mechanism)
    config = TrainingConfig.from_dict(tables)
    with joined(options.device) as world:
        train(config, options.data, options.run_folder or options.recipe.parent / "runs" / name, world)
