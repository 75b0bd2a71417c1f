"""Time epochs of our trainer and of the paper's package `evidence-depletion` by turns, on one core.

    python recipes/synthetic_speed/run.py [RECIPE.toml] [--results FILE.json] [--readme FILE] [--table-only]

Processor time counts, so that other work on the machine takes little from either.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import evidence_depletion
import torch
from evidence_depletion.models import build_model
from evidence_depletion.training import fit
from torch.utils.data import DataLoader, TensorDataset

from separator.benchmarks import TASKS, draw_mixtures, train_models
from separator.benchmarks.blas import blas_kernels
from separator.benchmarks.trainer import Setting
from separator.report import format_table, measure_recipe
from separator.script import exit_status
from separator.training import environment

HERE = Path(__file__).parent
N_SLOTS = 5
DIVERSITY = 0.5


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure (or read) the results, write them, and write the README's table from them."""
    measure_recipe(HERE, __doc__, measure, tables, arguments)


def measure(recipe: dict[str, Any]) -> dict[str, Any]:
    """Time every method of the recipe."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    load = [os.getloadavg()[0]]
    rows = []
    for method in recipe["methods"]:
        times: dict[str, list[float]] = {"reference": [], "single": [], "cell": []}
        for _ in range(recipe["repeats"]):
            times["reference"] += time_reference(recipe, method)
            times["single"] += time_ours(recipe, method, 1)
            times["cell"] += time_ours(recipe, method, recipe["seeds"])
        medians = {f"{name}_ms": round(1000 * statistics.median(t), 2) for name, t in times.items()}
        rows.append({"method": method, **medians})
        load.append(os.getloadavg()[0])
        print(json.dumps(rows[-1]), file=sys.stderr)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(time.perf_counter() - started, 1),
        "recipe": recipe,
        "load_average": [round(min(load), 1), round(max(load), 1)],
        "environment": environment()
        | {"evidence_depletion": evidence_depletion.__version__, "openblas": blas_kernels()},
        "rows": rows,
    }


def time_ours(recipe: dict[str, Any], method: str, n_seeds: int) -> list[float]:
    """Processor seconds of a step and seed in the epoch after the first."""
    setting = Setting(epochs=2, n_train=128 * recipe["steps"])
    clock: list[float] = []
    seeds = range(n_seeds)
    progress = lambda share: clock.append(time.process_time())  # noqa: E731
    train_models(recipe["task"], method, seeds=seeds, setting=setting, progress=progress)
    return [(clock[1] - clock[0]) / recipe["steps"] / n_seeds]


def time_reference(recipe: dict[str, Any], method: str) -> list[float]:
    """Processor seconds of a step in the reference's epoch after the first, its loader included."""
    task = TASKS[recipe["task"]]
    data = draw_mixtures(task, 128 * recipe["steps"], seed=0)
    dataset = TensorDataset(data.signals, data.params, data.counts)
    loader = DataLoader(dataset, batch_size=128, shuffle=True, drop_last=True)
    torch.manual_seed(0)
    model = build_model(method, n_params=task.n_params, tokenizer_type=task.tokenizer_type)
    clock: list[float] = []
    record = lambda epoch: clock.append(time.process_time())  # noqa: E731
    fit(model, loader, N_SLOTS, torch.device("cpu"), epochs=2, epoch_callback=record, w_div=DIVERSITY)
    return [(clock[1] - clock[0]) / recipe["steps"]]


def tables(results: dict[str, Any]) -> dict[str, str]:
    """The README's tables: times a step and seed, and what they were measured on."""
    columns = ["method", "reference, ms", "one seed, ms", "times faster", "of five seeds, ms", "times faster"]
    rows = []
    for row in results["rows"]:
        reference, single, cell = (row[f"{name}_ms"] for name in ("reference", "single", "cell"))
        ratios = [f"**{reference / ours:.1f}**" for ours in (single, cell)]
        times = [f"{reference:.1f}", f"{single:.1f}", ratios[0], f"{cell:.1f}", ratios[1]]
        rows.append([row["method"], *times])
    where, recipe = results["environment"], results["recipe"]
    setting = (
        f"{where['processor']}, one thread, torch {where['torch']}, OpenBLAS for {where['openblas']}, "
        f"evidence-depletion {where['evidence_depletion']}, {results['date']}; medians of "
        f"{recipe['repeats']} epochs of {recipe['steps']} steps on {recipe['task']}, "
        f"{results['seconds']:.0f} s in all; the machine's load average was {results['load_average'][0]} to "
        f"{results['load_average'][1]}."
    )
    return {"speed": format_table(columns, rows), "setting": setting}


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
