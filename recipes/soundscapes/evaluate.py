"""Evaluate a model, or what it is compared with, on mixtures in FUSS layout; results go to results/NAME.json.

python recipes/soundscapes/evaluate.py [--model NAME|DIR] [--name NAME] [--mixtures DIR] [--split evaluation]
python recipes/soundscapes/evaluate.py --baselines
"""

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import numpy as np
import torch

from separator import Separator
from separator.evaluation import SlotOutputs, evaluate, evaluate_baselines
from separator.fuss import read_fuss_examples
from separator.training import environment

HERE = Path(__file__).parent
SLOW_EXAMPLES = 120
BSSEVAL_EXAMPLES = 20


def main() -> None:
    """Parse the command line, evaluate and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="soundscapes", help="name or folder of a model")
    parser.add_argument("--name", help="of the result file (default: the model's name)")
    parser.add_argument("--mixtures", type=Path, default=HERE.parents[1] / "data/soundscapes/mixtures")
    parser.add_argument("--split", default="evaluation")
    parser.add_argument("--limit", type=int, help="evaluate every so-many-th example, about this many in all")
    parser.add_argument("--baselines", action="store_true", help="evaluate the baselines instead of a model")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    examples = read_fuss_examples(arguments.mixtures, arguments.split)
    if arguments.limit:
        examples = examples[:: max(1, len(examples) // arguments.limit)]
    started = time.monotonic()
    if arguments.baselines:
        name = arguments.name or "baselines"
        limits = {"nmf": SLOW_EXAMPLES, "hpss": SLOW_EXAMPLES}
        reports = evaluate_baselines(examples, limits=limits, progress=show)
    else:
        name = arguments.name or Path(arguments.model).name
        separate = model_function(Separator.load(arguments.model, device="cpu"))
        report = evaluate(
            separate, examples, bsseval_examples=BSSEVAL_EXAMPLES, progress=lambda *state: show(name, *state)
        )
        reports = {name: report}
    record = {
        "split": arguments.split,
        "seconds": round(time.monotonic() - started),
        "date": time.strftime("%Y-%m-%d"),
        "environment": {**environment(), "numpy": np.__version__, "system": platform.system()},
        "reports": reports,
    }
    arguments.results.mkdir(exist_ok=True)
    path = arguments.results / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(path)


def model_function(separator: Separator):
    """The model as the evaluation calls it: every slot's output, and the model's own threshold."""

    def separate(mixture: np.ndarray, sample_rate: int) -> SlotOutputs:
        out = separator.separate(mixture[None], sample_rate, min_existence=0.0)
        return SlotOutputs(
            out.estimates[:, 0],
            out.existence,
            separator.network.config.min_existence,
            residual=out.residual[0],
            masks=out.masks,
        )

    return separate


def show(name: str, done: int, total: int) -> None:
    """Progress on stderr, now and then."""
    if done % 50 == 0 or done == total:
        print(f"{name}: {done}/{total}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
