"""Evaluate a model, or what it is compared with, on mixtures in FUSS layout; results go to results/NAME.json.

python recipes/soundscapes/evaluate.py [--model NAME|DIR] [--name NAME] [--mixtures DIR] [--split evaluation]
python recipes/soundscapes/evaluate.py --baselines
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from separator import Separator
from separator.console import Counter
from separator.evaluation import evaluate, evaluate_baselines
from separator.fuss import read_fuss_examples
from separator.outputs import ModelOutputs
from separator.report import write_report
from separator.script import Parser, exit_status, positive

HERE = Path(__file__).parent
SLOW_EXAMPLES = 120
BSSEVAL_EXAMPLES = 20


def main() -> None:
    """Parse the command line, evaluate and write the results."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="soundscapes", help="name or folder of a model")
    parser.add_argument("--name", help="of the result file (default: the model's name)")
    parser.add_argument("--mixtures", type=Path, default=HERE.parents[1] / "data/soundscapes/mixtures")
    parser.add_argument("--split", default="evaluation")
    parser.add_argument("--limit", type=positive, help="evaluate about this many, every so-many-th example")
    parser.add_argument("--baselines", action="store_true", help="evaluate the baselines instead of a model")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--threads", type=positive, default=1)
    parser.add_argument("--jobs", type=positive, default=1, help="processes that evaluate a model")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    examples = read_fuss_examples(arguments.mixtures, arguments.split)
    if arguments.limit:
        examples = examples[:: max(1, len(examples) // arguments.limit)]
    started = time.monotonic()
    if arguments.baselines:
        name = arguments.name or "baselines"
        limits = {"nmf": SLOW_EXAMPLES, "hpss": SLOW_EXAMPLES}
        counters = {}

        def progress(method: str, done: int, total: int) -> None:
            counters.setdefault(method, Counter(method))(done, total)

        reports = evaluate_baselines(examples, limits=limits, progress=progress)
    else:
        name = arguments.name or Path(arguments.model).resolve().name
        outputs = ModelOutputs(Separator.load(arguments.model, device="cpu"))
        report = evaluate(
            outputs,
            examples,
            bsseval_examples=BSSEVAL_EXAMPLES,
            n_jobs=arguments.jobs,
            progress=Counter(name),
        )
        reports = {name: report}
    path = arguments.results / f"{name}.json"
    write_report(path, reports, data={"split": arguments.split}, seconds=time.monotonic() - started)
    print(path)


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
