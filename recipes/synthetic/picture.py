"""Draw where the slots of vanilla attention and of evidence depletion look, on one mixture.

    python recipes/synthetic/picture.py

Trains both on the budget of quick_check.toml, one seed, and writes results/attention.png.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from separator.benchmarks import TASKS, draw_mixtures, train_models
from separator.benchmarks.evaluation import predict
from separator.benchmarks.experiments import read_experiment
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.tasks import TEST_OFFSET
from separator.benchmarks.trainer import Setting, TrainedModel
from separator.report import pyplot
from separator.script import Parser, exit_status

HERE = Path(__file__).parent
SEED = 0
N_SOURCES = 3


def main() -> None:
    """Train, pick the first test mixture of three sources, draw."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("epochs", "n-train"):
        parser.add_argument(f"--{name}", type=int, help="instead of the quick check's")
    parser.add_argument("--output", type=Path, default=HERE / "results/attention.png")
    options = vars(parser.parse_args())
    output = options.pop("output")
    torch.set_num_threads(1)
    experiment = read_experiment(HERE / "quick_check.toml", KINDS, **options)
    (task,) = experiment.tasks
    trained = {}
    for method in experiment.methods:
        print(f"training {method}", file=sys.stderr)
        (trained[method],) = train_models(task, method, seeds=[SEED], setting=Setting(**experiment.budget))
    draw(task, trained, output)


def draw(task: str, trained: dict[str, TrainedModel], path: Path) -> None:
    """The mixture and its sources on top; below, for each method, attention by slot and evidence by step."""
    plt = pyplot()

    test = draw_mixtures(TASKS[task], 100, seed=SEED + TEST_OFFSET)
    index = int((test.counts == N_SOURCES).nonzero()[0])
    figure, axes = plt.subplots(3, 2, figsize=(9, 6), layout="constrained", height_ratios=[2, 2, 2])
    axes[0, 0].plot(test.signals[index], linewidth=0.8)
    axes[0, 0].set_title("mixture", fontsize=9)
    for component in test.components[index, :N_SOURCES]:
        axes[0, 1].plot(component, linewidth=0.8)
    axes[0, 1].set_title("its sources", fontsize=9)
    for column, (method, result) in enumerate(trained.items()):
        found = predict(result.model, test.signals[index : index + 1], seed=SEED)
        attn = found.attn[0] / found.attn[0].sum(1, keepdim=True)
        image(figure, axes[1, column], attn, f"{method}: attention over tokens", "slot")
        if found.evidence is None:
            axes[2, column].axis("off")
        else:
            evidence = torch.cat(found.evidence)
            image(figure, axes[2, column], evidence, f"{method}: evidence left", "slots done")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def image(figure: Any, axis: Any, values: torch.Tensor, title: str, label: str) -> None:
    """One matrix [rows, tokens]."""
    shown = axis.imshow(values, aspect="auto", cmap="viridis", vmin=0)
    axis.set_title(title, fontsize=9)
    axis.set(xlabel="token", ylabel=label)
    axis.set_yticks(range(len(values)))
    figure.colorbar(shown, ax=axis)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
