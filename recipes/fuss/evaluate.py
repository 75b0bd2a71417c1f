"""Score a model, or anybody's stems, on FUSS: by the data set's protocol and by ours.

    python recipes/fuss/evaluate.py --model soundscapes                  a model on the eval split
    python recipes/fuss/evaluate.py --estimates DIR                      DIR/exampleNNNN/*.wav for that split
    python recipes/fuss/evaluate.py --references DIR --estimates DIR     any two folders of folders
    python recipes/fuss/evaluate.py --baseline irm                       an oracle or a simple method

Writes RESULTS/NAME.json (summary), NAME.csv (one row an example) and NAME.png, and prints tables. README.md
beside this file says what the numbers are.
"""

import argparse
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from separator import Separator
from separator.console import Counter
from separator.evaluation import make_report, score_examples
from separator.fuss import FussExamples, read_fuss_examples, read_source_folders
from separator.metrics import LEVEL_FLOOR_DB
from separator.outputs import BASELINES, BaselineOutputs, FolderOutputs, ModelOutputs, OutputsFunction
from separator.report import (
    confusion_table,
    fuss_table,
    markdown_table,
    save_scores_picture,
    write_report,
    write_scores,
)
from separator.script import Parser, exit_status, natural, number, positive

HERE = Path(__file__).resolve().parent


def read_examples(arguments: argparse.Namespace) -> FussExamples:
    """The examples that the command line asks for."""
    if arguments.references is not None:
        examples = read_source_folders(arguments.references)
    else:
        examples = read_fuss_examples(arguments.data, arguments.split)
    if arguments.limit:
        examples = examples[:: max(1, len(examples) // arguments.limit)]
    return examples


def read_outputs(arguments: argparse.Namespace) -> tuple[str, OutputsFunction]:
    """What is scored, and its name."""
    if arguments.model is not None:
        separator = Separator.load(arguments.model, device=arguments.device)
        return Path(arguments.model).resolve().name, ModelOutputs(separator)
    if arguments.estimates is not None:
        return arguments.estimates.resolve().name, FolderOutputs(arguments.estimates, arguments.min_level)
    return arguments.baseline, BaselineOutputs(arguments.baseline)


def evaluate(arguments: argparse.Namespace) -> None:
    """Score, write the files and print the tables."""
    started = time.monotonic()
    examples = read_examples(arguments)
    name, outputs = read_outputs(arguments)
    name = arguments.name or name
    arguments.results.mkdir(parents=True, exist_ok=True)
    scores = score_examples(
        outputs,
        examples,
        zero_mean=arguments.zero_mean,
        bsseval_examples=arguments.bsseval,
        n_jobs=arguments.jobs,
        progress=Counter(name),
    )
    reports = {name: make_report(scores, zero_mean=arguments.zero_mean)}
    data = (
        {"references": arguments.references.resolve().name}
        if arguments.references is not None
        else {"data": arguments.data.resolve().name, "split": arguments.split}
    )
    if arguments.estimates is not None:
        data["min_level_db"] = arguments.min_level
    seconds = time.monotonic() - started
    write_report(arguments.results / f"{name}.json", reports, data=data, seconds=seconds)
    write_scores(arguments.results / f"{name}.csv", scores)
    save_scores_picture(arguments.results / f"{name}.png", scores, name)
    tables = (markdown_table(reports), fuss_table(reports), confusion_table(reports[name]))
    print("\n\n".join(tables))


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; 0 when the results are written, 1 with one line on stderr when they are not."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    scored = parser.add_mutually_exclusive_group()
    scored.add_argument("--model", help="name or folder of a model")
    scored.add_argument("--baseline", choices=list(BASELINES))
    scored.add_argument("--estimates", type=Path, metavar="DIR", help="a folder of outputs an example")
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "data/fuss/ssdata", metavar="DIR")
    parser.add_argument("--split", default="eval")
    parser.add_argument("--references", type=Path, metavar="DIR", help="a folder of sources an example")
    parser.add_argument("--limit", type=positive, help="evaluate about this many, every so-many-th example")
    parser.add_argument(
        "--min-level",
        type=_level,
        default=LEVEL_FLOOR_DB,
        metavar="DB",
        help="re the mixture: a file of estimates below it is not called a source (default: all that sound)",
    )
    parser.add_argument("--zero-mean", action="store_true", help="SI-SDR without means, as in the paper")
    parser.add_argument("--bsseval", type=natural, default=0, metavar="N", help="examples with BSSEval v4")
    parser.add_argument("--name", type=_file_name, help="of the result files")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--device", default="cpu", help="of the model")
    parser.add_argument("--jobs", type=positive, default=1, help="processes")
    options = parser.parse_args(arguments)
    if options.model is None and options.baseline is None and options.estimates is None:
        parser.error("pass --model, --estimates or --baseline")
    torch.set_num_threads(1)
    return exit_status(lambda: evaluate(options), __file__)


def _level(text: str) -> float:
    """Parse a level in dB."""
    value = number(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no level in dB")
    return value


def _file_name(text: str) -> str:
    """Parse the name of files in one folder."""
    if Path(text).name != text:
        raise argparse.ArgumentTypeError(f"{text} is no name of a file; the folder is --results")
    return text


if __name__ == "__main__":
    sys.exit(main())
