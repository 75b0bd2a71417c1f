"""Write the tables of this folder's README from the records, and the pictures that are drawn from them.

python recipes/synthetic/tables.py
"""

import json
import sys
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from separator.benchmarks.experiments import Experiment, read_experiment
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.records import read_records
from separator.benchmarks.tables import (
    Results,
    comparison_table,
    geometry_table,
    latency_table,
    mean_and_deviation,
    select,
    sweep_table,
)
from separator.report import format_table, pyplot, update_tables
from separator.script import exit_status

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COMPARISONS = ("table1", "table2", "loss_baselines", "depletion_forms", "quick_check")
FORCED = {"free": "free", "wrong token": "wrong_peak", "all alike": "uniform"}


@cache
def experiment_of(name: str) -> Experiment:
    """The experiment of a TOML file."""
    return read_experiment(HERE / f"{name}.toml", KINDS)


def results_of(name: str, directory: Path = RESULTS) -> Results:
    """The records an experiment's tables are made of."""
    experiment = experiment_of(name)
    records = read_records(directory / f"{experiment.records}.jsonl")
    return select(experiment, KINDS[experiment.kind], records)


def tables(directory: Path = RESULTS) -> dict[str, str]:
    """Tables of the README by name, and under NAME-setting what each was measured with."""
    found = {path.stem: results_of(path.stem, directory) for path in experiment_paths()}
    published = tomllib.loads((HERE / "published.toml").read_text())
    texts = {f"{name}-setting": results.caption() for name, results in found.items()}
    for name in COMPARISONS:
        experiment = experiment_of(name)
        figures = published["quick_check" if name == "quick_check" else "peak_overlap"]
        texts[name] = comparison_table(found[name], experiment.methods, experiment.tasks, published=figures)
    first = experiment_of("cosine_overlap")
    texts["cosine_overlap"] = comparison_table(
        found["cosine_overlap"], first.methods, first.tasks, metric="cosine_overlap"
    )
    texts["count_accuracy"] = comparison_table(
        found["table1"], first.methods, first.tasks, metric="count_accuracy"
    )
    texts |= sweeps(found)
    latency, kind = experiment_of("latency"), KINDS["latency"]
    defaults = {name: argument.default for name, argument in kind.arguments.items()}
    texts["latency"] = latency_table(found["latency"], latency.cells(kind), defaults)
    texts["geometry"] = geometry_table(found["geometry"])
    return texts | reference_tables(found["table1"], directory)


def reference_tables(ours: Results, directory: Path) -> dict[str, str]:
    """Peak overlap by seed of the paper's package beside ours, and what it took."""
    path = directory / "reference.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    if not records:
        return dict.fromkeys(("reference", "reference-setting"), "Not run yet.")
    seeds = sorted({record["seed"] for record in records})
    rows = []
    for method in dict.fromkeys(record["method"] for record in records):
        theirs = [record for record in records if record["method"] == method]
        same = ours.of(task=theirs[0]["task"], method=method)
        for who, runs in ((f"{method}, here", same), (f"{method}, the package", theirs)):
            by_seed = {record["seed"]: f"{record['peak_overlap']:.2f}" for record in runs}
            mean = mean_and_deviation(runs, "peak_overlap")
            rows.append([who, *(by_seed.get(seed, "-") for seed in seeds), mean])
    first = records[0]
    minutes = sum(record["cpu_seconds"] for record in records) / 60
    setting = (
        f"{first['task']}, {first['epochs']} epochs, n_train {first['n_train']}, evidence-depletion "
        f"{first['environment']['evidence_depletion']}, torch {first['environment']['torch']}, "
        f"{first['environment']['processor']}, one thread, {minutes:.0f} CPU minutes, {first['date']}."
    )
    heads = ["peak overlap", *(f"seed {seed}" for seed in seeds), "mean"]
    return {"reference": format_table(heads, rows), "reference-setting": setting}


def sweeps(found: dict[str, Results]) -> dict[str, str]:
    """Tables of one experiment each whose rows and columns are settings or extra measures."""
    by_method = {name: methods(name) for name in found}
    return {
        "gamma_tau": sweep_table(
            found["gamma_tau"],
            across("gamma_tau", "gamma"),
            {f"tau {t}": w for t, w in values("gamma_tau", "tau")},
        ),
        "amplitude_ratio": sweep_table(
            found["amplitude_ratio"],
            by_method["amplitude_ratio"],
            dict(across("amplitude_ratio", "amp_ratio")),
        ),
        "slot_counts": sweep_table(
            found["slot_and_token_counts"],
            by_method["slot_and_token_counts"],
            {label: {**w, "n_tokens": None} for label, w in across("slot_and_token_counts", "n_slots")},
        ),
        "token_counts": sweep_table(
            found["slot_and_token_counts"],
            by_method["slot_and_token_counts"],
            {label: {**w, "n_slots": None} for label, w in across("slot_and_token_counts", "n_tokens")},
        ),
        "over_provisioning": sweep_table(
            found["over_provisioning"],
            [
                (f"{method}, {label}", {**wanted, **slots})
                for method, wanted in by_method["over_provisioning"]
                for label, slots in across("over_provisioning", "n_slots")
            ],
            {
                "peak overlap": "peak_overlap",
                "evidence of a matched slot": "depleted_mass_matched",
                "of an unmatched slot": "depleted_mass_unmatched",
            },
        ),
        "slot_order": sweep_table(
            found["slot_order"],
            by_method["slot_order"],
            {
                "order 0 to S-1": "peak_overlap",
                "ten random orders": "random_order_peak_overlap_mean",
                "the best": "random_order_peak_overlap_min",
                "the worst": "random_order_peak_overlap_max",
                "by evidence": "greedy_order_peak_overlap",
            },
        ),
        "forced_error": sweep_table(
            found["forced_error"],
            by_method["forced_error"],
            {f"recovered, {label}": f"{key}_source_recovery" for label, key in FORCED.items()}
            | {f"peak overlap, {label}": f"{key}_peak_overlap" for label, key in FORCED.items()},
        ),
        "dynamics": sweep_table(
            found["dynamics"],
            by_method["dynamics"],
            {"peak overlap": "peak_overlap", "cosine overlap": "cosine_overlap", "of slots": "slot_cosine"},
        ),
    }


def experiment_paths() -> list[Path]:
    """All experiments of this folder."""
    return sorted(path for path in HERE.glob("*.toml") if path.stem != "published")


def methods(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The methods of an experiment as rows."""
    return [(method, {"method": method}) for method in experiment_of(name).methods]


def values(name: str, key: str) -> list[tuple[Any, dict[str, Any]]]:
    """The values a setting takes in an experiment's grids; a default is not among a record's settings."""
    experiment = experiment_of(name)
    argument = KINDS[experiment.kind].arguments.get(key)
    found = dict.fromkeys(value for grid in experiment.grid for value in grid.get(key, []))
    return [(v, {key: None if argument is not None and v == argument.default else v}) for v in found]


def across(name: str, key: str) -> list[tuple[str, dict[str, Any]]]:
    """The values of a setting as labelled rows or columns."""
    return [(f"{key} {value}", wanted) for value, wanted in values(name, key)]


def draw_collapse(path: Path) -> None:
    """Peak overlap of the paper's methods on each task; a dash is the published mean."""
    plt = pyplot()
    experiment, results = experiment_of("table1"), results_of("table1")
    published = tomllib.loads((HERE / "published.toml").read_text())["peak_overlap"]
    figure, axes = plt.subplots(1, len(experiment.tasks), figsize=(9, 2.8), sharey=True, layout="constrained")
    for axis, task in zip(axes, experiment.tasks, strict=True):
        for place, method in enumerate(experiment.methods):
            overlaps = [record["peak_overlap"] for record in results.of(task=task, method=method)]
            if overlaps:
                axis.bar(place, np.mean(overlaps), color=f"C{place}", alpha=0.5)
                axis.plot([place] * len(overlaps), overlaps, "k.", markersize=3)
            if (figures := published.get(method, {}).get(task)) is not None:
                axis.plot([place - 0.4, place + 0.4], [figures[0]] * 2, "k-", linewidth=1)
        names = [method.replace("_", "\n") for method in experiment.methods]
        axis.set_xticks(range(len(names)), names, fontsize=7)
        axis.set_title(task, fontsize=9)
    axes[0].set_ylabel("peak overlap")
    figure.savefig(path, dpi=80)


def draw_dynamics(path: Path) -> None:
    """Three measures of collapse by epoch, mean and range over the seeds."""
    plt = pyplot()
    results = results_of("dynamics")
    measures = {
        "peak_overlap": "peak overlap",
        "cosine_overlap": "cosine overlap",
        "slot_cosine": "cosine of slots",
    }
    figure, axes = plt.subplots(1, len(measures), figsize=(9, 2.8), layout="constrained")
    for axis, (key, label) in zip(axes, measures.items(), strict=True):
        for method in experiment_of("dynamics").methods:
            runs = [record["dynamics"] for record in results.of(method=method)]
            if runs:
                epochs = [point["epoch"] for point in runs[0]]
                curves = np.array([[point[key] for point in run] for run in runs])
                axis.plot(epochs, curves.mean(0), label=method)
                axis.fill_between(epochs, curves.min(0), curves.max(0), alpha=0.2)
        axis.set(xlabel="epoch", title=label)
        if axis.lines:
            axis.legend(fontsize=7)
    figure.savefig(path, dpi=80)


def main() -> None:
    """Write everything."""
    update_tables(HERE / "README.md", tables())
    draw_collapse(RESULTS / "collapse.png")
    draw_dynamics(RESULTS / "dynamics.png")


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
