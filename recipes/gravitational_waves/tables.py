"""Write the tables of this folder's README from the records, and the P-P plot that is drawn from them.

python recipes/gravitational_waves/tables.py
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np

from separator.benchmarks.experiments import Experiment, read_experiment
from separator.benchmarks.gw_model import INFERRED
from separator.benchmarks.gw_scores import PP_LEVELS
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.records import read_records
from separator.benchmarks.tables import NONE, Results, mean_and_deviation, select, sweep_table
from separator.report import format_table, pyplot, update_tables
from separator.script import exit_status

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COLUMNS = {
    "separation": {
        "cosine overlap": "cosine_overlap",
        "peak overlap": "peak_overlap",
        "count right": "count_accuracy",
        "recovered": "recovered_share",
        "of the dominant": "recovered_share_dominant",
        "waveform overlap": "waveform_overlap",
        "residual power": "residual_power",
    },
    "posteriors": {
        "nats a source": "nats_a_source",
        "coverage at 50 %": "coverage_50",
        "coverage at 90 %": "coverage_90",
        "frequency error, bins": "frequency_error_bins",
        "of the dominant": "frequency_error_bins_dominant",
        "sky error, degrees": "sky_error_degrees",
        "training, minutes": "train_minutes",
    },
}
LONGER = {
    "cosine overlap": "cosine_overlap",
    "count right": "count_accuracy",
    "recovered": "recovered_share",
    "waveform overlap": "waveform_overlap",
    "nats a source": "nats_a_source",
    "frequency error, bins": "frequency_error_bins",
    "of the dominant": "frequency_error_bins_dominant",
    "sky error, degrees": "sky_error_degrees",
    "training, minutes": "train_minutes",
}


def experiment_of(name: str = "recipe") -> Experiment:
    """The experiment of a TOML file."""
    return read_experiment(HERE / f"{name}.toml", KINDS)


def results_of(name: str = "recipe", directory: Path = RESULTS) -> Results:
    """Its records."""
    experiment = experiment_of(name)
    found = select(
        experiment, KINDS[experiment.kind], read_records(directory / f"{experiment.records}.jsonl")
    )
    timed = [{**record, "train_minutes": record["train_seconds"] / 60} for record in found.records]
    return Results(timed, found.n_runs)


def tables(directory: Path = RESULTS) -> dict[str, str]:
    """Tables of the README by name."""
    results, longer = results_of("recipe", directory), results_of("longer", directory)
    texts = {name: sweep_table(results, methods_of("recipe"), columns) for name, columns in COLUMNS.items()}
    texts["longer"] = sweep_table(longer, methods_of("longer"), LONGER)
    texts |= {"setting": results.caption(), "longer-setting": longer.caption()}
    texts["calibration"] = calibration_table(results)
    texts["confusion"] = confusion_table(results)
    texts["generation"] = generation_table()
    return texts


def methods_of(name: str) -> list[tuple[str, dict[str, Any]]]:
    """The methods of an experiment as rows."""
    return [(method, {"method": method}) for method in experiment_of(name).methods]


def calibration_table(results: Results) -> str:
    """One row a parameter and method: coverages, and how far the P-P curve is from uniform."""
    rows = []
    for method in experiment_of().methods:
        found = results.of(method=method)
        for name in INFERRED:
            names = [f"coverage_50_{name}", f"coverage_90_{name}", f"pp_deviation_{name}"]
            cells = [mean_and_deviation(found, key, digits=3) for key in names]
            inside = sum(record[names[-1]] <= record["pp_band"] for record in found)
            band = mean_and_deviation(found[:1], "pp_band", digits=3)
            within = f"{inside} of {len(found)}" if found else NONE
            rows.append([f"{method}, {name.replace('_', ' ')}", *cells, band, within])
    heads = ["", "coverage at 50 %", "at 90 %", "P-P deviation", "95 % band", "seeds within"]
    return format_table(heads, rows)


def confusion_table(results: Results) -> str:
    """Of the seeds together: how often each true count (row) was called to be each (column), in per cent."""
    rows = []
    for method in experiment_of().methods:
        found = results.of(method=method)
        if not found:
            continue
        total = np.sum([record["count_confusion"] for record in found], axis=0)
        for true, row in enumerate(total, 1):
            shares = [f"{100 * value / max(row.sum(), 1):.0f}" for value in row]
            rows.append([f"{method}, {true}", *shares])
    width = len(rows[0]) - 1 if rows else 0
    return format_table(["method, true count \\ called", *map(str, range(width))], rows)


def generation_table() -> str:
    """Binaries and mixtures a second, after compilation."""
    path = RESULTS / "generation.json"
    if not path.is_file():
        return "Not run yet."
    found = json.loads(path.read_text())
    where = found["environment"]
    row = [f"{found['binaries_a_second']:,.0f}", f"{found['mixtures_a_second']:,.0f}"]
    setting = f"{where['processor']}, one process, {where['threads']} thread, {found['date']}"
    return format_table([setting, "binaries a second", "mixtures of three a second"], [["simulated", *row]])


def draw_pp(path: Path) -> None:
    """P-P curves by parameter and method, each minus the diagonal; grey is the 95 % band."""
    plt = pyplot()
    results = results_of()
    methods = [method for method in experiment_of().methods if results.of(method=method)]
    figure, axes = plt.subplots(1, len(INFERRED), figsize=(11, 2.6), sharey=True, layout="constrained")
    levels = np.array(PP_LEVELS)
    for axis, name in zip(axes, INFERRED, strict=True):
        for number, method in enumerate(methods):
            for record in results.of(method=method):
                axis.plot(levels, np.array(record["pp"][name]) - levels, f"C{number}", linewidth=1)
            axis.plot([], [], f"C{number}", label=method)
        band = max((record["pp_band"] for record in results.records), default=math.nan)
        axis.axhspan(-band, band, color="0.85", zorder=0)
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set_xlabel("credible level")
    axes[0].set_ylabel("share of truths below\nminus level")
    axes[-1].legend(fontsize=6)
    figure.savefig(path, dpi=80)


def main() -> None:
    """Write everything."""
    update_tables(HERE / "README.md", tables())
    draw_pp(RESULTS / "pp.png")


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
