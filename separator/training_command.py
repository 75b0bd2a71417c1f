"""The command line of the training recipes, alone or under ``torchrun``."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from separator.distributed import joined
from separator.script import Parser, exit_status, positive
from separator.training import train
from separator.training_recipe import TrainingConfig, read_recipe


def train_by_recipe(
    recipe: Path, data: Path, description: str | None, arguments: Sequence[str] | None = None
) -> int:
    """Parse the command line, train and return the exit status.

    Runs go to ``runs/<recipe name>`` beside the recipe.

    Args:
        recipe: TOML file that is trained if the command names no other.
        data: folder of the mixtures, likewise.
        description: what ``--help`` says.
        arguments: of the command line; by default those of the process.

    What cannot be used of recipe, data or device is one line on stderr, and the status 1.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=recipe)
    parser.add_argument("--mechanism", help="slot attention mechanism (default: the recipe's)")
    parser.add_argument("--data", type=Path, default=data, help="folder of the mixtures")
    parser.add_argument(
        "--run-folder", type=Path, help="run folder (default: runs/<recipe name> beside the recipe)"
    )
    parser.add_argument(
        "--start-from", metavar="MODEL", help="name or folder of a model whose weights a new run starts from"
    )
    parser.add_argument("--threads", type=positive, default=1, help="of each process")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)

    def work() -> None:
        name, tables = read_recipe(options.recipe, options.mechanism)
        config = TrainingConfig.from_dict(tables)
        with joined(options.device) as world:
            folder = options.run_folder or options.recipe.parent / "runs" / name
            train(config, options.data, folder, world, options.start_from, _tell)

    return exit_status(work, parser.prog, resumes=True)


def _tell(line: str) -> None:
    sys.stderr.write(line + "\n")
