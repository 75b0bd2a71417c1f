"""Put a trained peer beside the product's network: write its stems, time both, and tell what either cost.

python recipes/fuss/compare.py --model DIR [--peer RECIPE.toml] [--data DIR] [--stems DIR] [--threads 1]

Both separate the same examples by turns. The stems, `STEMS/exampleNNNN/source1.wav ...`, are what
`evaluate.py --estimates STEMS` takes; sizes, times and training go to results/compare.json.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import soundfile
import torch

from separator import Separator
from separator.console import Counter
from separator.errors import SeparatorError
from separator.fuss import read_fuss_examples
from separator.network import NetworkConfig
from separator.peers import ConvTasNetConfig, n_parameters
from separator.run_folder import load_best
from separator.script import Parser, exit_status, positive
from separator.training import environment, new_state
from separator.training_recipe import TrainingConfig, read_recipe

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Parse the command line, separate, time and write."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of the product's network")
    parser.add_argument("--ours", type=Path, default=HERE / "separator_hour.toml", help="its recipe")
    parser.add_argument("--peer", type=Path, default=HERE / "conv_tasnet_hour.toml", help="the peer's recipe")
    parser.add_argument("--ours-run", type=Path, help="its run folder (default: runs/NAME beside the recipe)")
    parser.add_argument("--peer-run", type=Path, help="the peer's run folder, likewise")
    parser.add_argument("--data", type=Path, default=HERE.parents[1] / "data/fuss/ssdata")
    parser.add_argument("--split", default="eval")
    parser.add_argument("--limit", type=positive, help="separate about this many, every so-many-th example")
    parser.add_argument("--stems", type=Path, default=HERE / "stems/conv_tasnet", help="where the peer's go")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--threads", type=positive, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.results.mkdir(parents=True, exist_ok=True)
    trainings = {
        "separator": training_of(options.ours, NetworkConfig, options.ours_run),
        "conv_tasnet": training_of(options.peer, ConvTasNetConfig, options.peer_run),
    }
    separator = Separator.load(str(options.model), device="cpu")
    peer = new_state(TrainingConfig.from_dict(read_recipe(options.peer)[1])).average.eval()
    best = load_best(peer, options.peer_run or options.peer.parent / "runs" / options.peer.stem)
    examples = read_fuss_examples(options.data, options.split)
    if options.limit:
        examples = examples[:: max(1, len(examples) // options.limit)]
    factors: dict[str, list[float]] = {name: [] for name in trainings}
    counter = Counter("compare")
    for index, example in enumerate(examples):
        mixture = example.sources.sum(0)
        seconds = len(mixture) / example.sample_rate
        started = time.process_time()
        separator.separate(mixture[None], example.sample_rate)
        factors["separator"].append((time.process_time() - started) / seconds)
        started = time.process_time()
        with torch.no_grad():
            estimates = peer(mixture[None])[0]
        factors["conv_tasnet"].append((time.process_time() - started) / seconds)
        folder = options.stems / example.name
        folder.mkdir(parents=True, exist_ok=True)
        for k, estimate in enumerate(estimates, 1):
            soundfile.write(folder / f"source{k}.wav", estimate.numpy(), example.sample_rate, subtype="FLOAT")
        counter(index + 1, len(examples))
    networks = {"separator": separator.network, "conv_tasnet": peer}
    rows = {
        name: {
            "parameters": n_parameters(networks[name]),
            "real_time_factor": round(statistics.median(factors[name]), 4),
            **trainings[name],
        }
        for name in trainings
    }
    rows["conv_tasnet"]["best_step"] = best["step"]
    record = {
        "networks": rows,
        "n_examples": len(examples),
        "threads": options.threads,
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment(),
    }
    (options.results / "compare.json").write_text(json.dumps(record, indent=1) + "\n")


def training_of(recipe: Path, kind: type, run: Path | None) -> dict[str, Any]:
    """What the run of a recipe has cost and seen, from its log.

    Raises:
        SeparatorError: there is none, or the run or the recipe is of another network.
    """
    network = TrainingConfig.from_dict(read_recipe(recipe)[1]).network
    run = run or recipe.parent / "runs" / recipe.stem
    if not isinstance(network, kind):
        raise SeparatorError(f"{recipe} trains no network of {kind.__name__}; pass another recipe")
    if not (run / "log.jsonl").is_file() or not (run / "config.json").is_file():
        raise SeparatorError(
            f"no log.jsonl and config.json in {run}; pass the run folder that training wrote"
        )
    told = json.loads((run / "config.json").read_text())["network"]
    if told != json.loads(json.dumps(dataclasses.asdict(network))):
        raise SeparatorError(f"{run} was not trained by {recipe}: its config.json has another network")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "total" in line]
    waited = statistics.mean(line["waiting_share"] for line in steps)
    last = {key: steps[-1][key] for key in ("step", "examples", "processor_minutes")}
    return {**last, "waiting_share": round(waited, 4)}


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
