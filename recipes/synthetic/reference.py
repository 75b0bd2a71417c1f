"""Train the paper's own package on our data, at our seeds, and measure it by our metrics.

    python recipes/synthetic/reference.py [--methods METHOD ...] [--seeds N ...] [--jobs 1]

Mixtures and budget are those of Table 1; model, loss and trainer are the package's (`evidence-depletion`, in
the extra `dev`). A record is written when its run ends; runs that have one are not run again.
"""

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import evidence_depletion
import torch
from evidence_depletion.models import build_model
from evidence_depletion.training import fit
from joblib import Parallel, delayed
from torch.utils.data import DataLoader, TensorDataset

from separator.benchmarks import TASKS
from separator.benchmarks.evaluation import measure
from separator.benchmarks.tasks import TEST, TRAIN
from separator.benchmarks.trainer import Setting
from separator.script import Parser, exit_status, natural, positive
from separator.training import environment

RESULTS = Path(__file__).parent / "results/reference.jsonl"
DIVERSITY = 0.5  # the weight of the package's default loss
N_SLOTS = 5


def main() -> None:
    """Parse the command line and run what has no record."""
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=list(TASKS), default="sinusoids")
    parser.add_argument("--methods", nargs="+", default=["evidence_linear", "evidence_quadratic"])
    parser.add_argument("--seeds", nargs="+", type=natural, default=[0, 1, 2, 3, 4])
    parser.add_argument("--epochs", type=positive, default=200)
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, each in its process")
    parser.add_argument("--results", type=Path, default=RESULTS, help="file of the records")
    options = parser.parse_args()
    path = options.results
    known = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    done = {(record["task"], record["method"], record["seed"], record["epochs"]) for record in known}
    wanted = [(options.task, m, seed, options.epochs) for m in options.methods for seed in options.seeds]
    left = [run for run in wanted if run not in done]
    for record in Parallel(options.jobs, return_as="generator_unordered")(delayed(run)(*r) for r in left):
        with path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        print(record["method"], record["seed"], record["peak_overlap"], file=sys.stderr)


def run(name: str, method: str, seed: int, epochs: int) -> dict[str, Any]:
    """Train one model of the package and measure it as one of ours, which takes its weights."""
    torch.set_num_threads(1)
    task, setting = TASKS[name], Setting(epochs=epochs)
    train = setting.mixtures(task, setting.n_train, seed, TRAIN)
    dataset = TensorDataset(train.signals, train.params, train.counts)
    torch.manual_seed(seed)
    loader = DataLoader(dataset, batch_size=setting.batch_size, shuffle=True, drop_last=True)
    model = build_model(method, n_params=task.n_params, tokenizer_type=task.tokenizer_type)
    started = time.process_time()
    fit(model, loader, N_SLOTS, torch.device("cpu"), epochs=epochs, w_div=DIVERSITY)
    seconds = time.process_time() - started
    ours = setting.model(task, method, seed)
    ours.load_state_dict(model.state_dict())
    found = measure(ours.eval(), task, setting.mixtures(task, setting.n_test, seed, TEST), seed)
    return {
        "task": name,
        "method": method,
        "seed": seed,
        "epochs": epochs,
        "n_train": setting.n_train,
        **found,
        "cpu_seconds": round(seconds, 1),
        "date": time.strftime("%Y-%m-%d"),
        "environment": environment() | {"evidence_depletion": evidence_depletion.__version__},
    }


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
