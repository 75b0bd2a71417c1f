"""Write the tables of this folder's README from results/.

python recipes/fuss/tables.py

paper_like.jsonl (paper.py), compare.json (compare.py), separator_hour.json and conv_tasnet.json
(evaluate.py), cost.json (cost.py); a table whose results are not there says so.
"""

import dataclasses
import json
import tomllib
from pathlib import Path
from typing import Any

from separator.benchmarks.experiments import read_experiment
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.records import read_records
from separator.benchmarks.tables import Results, comparison_table, mean_and_deviation, select
from separator.report import format_table, fuss_table, markdown_table, update_tables

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"
NOT_YET = "Not run yet."
PARAMETERS = ("dominant_frequency", "spectral_centroid", "level")
READOUTS = {
    "rank-1 readout": "rank1",
    "time readout": "time",
}
ORACLES = {
    "oracle, rank 1": "oracle_rank1",
    "oracle, time": "oracle_time",
    "ideal ratio mask": "oracle_irm",
    "ideal binary mask": "oracle_ibm",
}
NETWORKS = {"separator": "ours", "conv_tasnet": "Conv-TasNet"}
REPORTS = {"separator_hour": "ours", "conv_tasnet": "Conv-TasNet"}
# What the plan assumes, none of it measured here.
CORES = 16  # of a CPU machine, of which processes of one thread use four fifths
CORE_EFFICIENCY = 0.8
GPU_FLOPS = 5e12  # sustained by one GPU on this network: small convolutions and a loop over slots
GPUS = 8
GPU_EFFICIENCY = 0.9


def paper_results() -> Results:
    """The records of the paper's experiment on the set like FUSS."""
    kinds = {name: dataclasses.replace(kind, check=None) for name, kind in KINDS.items()}  # data not needed
    experiment = read_experiment(HERE / "paper_like.toml", kinds)
    return select(experiment, KINDS[experiment.kind], read_records(RESULTS / f"{experiment.records}.jsonl"))


def paper_tables() -> dict[str, str]:
    """Overlaps, parameters and separation by method."""
    found = paper_results()
    if not found.records:
        return dict.fromkeys(("overlap", "parameters", "readout", "paper-setting"), NOT_YET)
    methods = list(dict.fromkeys(record["method"] for record in found.records))
    published = tomllib.loads((HERE / "published.toml").read_text())["peak_overlap"]
    overlap = comparison_table(found, methods, ["fuss"], published=published).splitlines()
    more = [
        [mean_and_deviation(found.of(method=m), key) for key in ("cosine_overlap", "count_accuracy")]
        for m in methods
    ]
    heads = [overlap[0] + " cosine overlap | count right |", overlap[1] + "--:|--:|"]
    rows = [f"{line} {' | '.join(cells)} |" for line, cells in zip(overlap[2:], more, strict=True)]
    floor = [mean_and_deviation(found.records[:1], f"floor_mae_{name}", digits=3) for name in PARAMETERS]
    errors = [
        [m, *(mean_and_deviation(found.of(method=m), f"mae_{name}", digits=3) for name in PARAMETERS)]
        for m in methods
    ]
    scores = [
        [f"{m}, {label}", *_scores(found.of(method=m), key)]
        for m in methods
        for label, key in READOUTS.items()
    ]
    scores += [[label, *_scores(found.records[:1], key)] for label, key in ORACLES.items()]
    return {
        "overlap": "\n".join([*heads, *rows]),
        "parameters": format_table(
            ["mean absolute error", *(name.replace("_", " ") for name in PARAMETERS)],
            [*errors, ["the training mean", *floor]],
        ),
        "readout": format_table(["dB", "SI-SDR", "SI-SDRi"], scores),
        "paper-setting": found.caption(),
    }


def _scores(records: list[dict[str, Any]], key: str) -> list[str]:
    return [mean_and_deviation(records, f"{key}_{part}") for part in ("si_sdr", "si_sdri")]


def comparison_tables() -> dict[str, str]:
    """Ours and the peer: cost, and scores by number of sources."""
    compared = _load("compare")
    found = {label: report["reports"][name] for name, label in REPORTS.items() if (report := _load(name))}
    if compared is None or len(found) < len(REPORTS):
        return dict.fromkeys(("networks", "networks-setting", "peers", "peers-fuss"), NOT_YET)
    rows = []
    for name, label in NETWORKS.items():
        row = compared["networks"][name]
        trained = [f"{row['processor_minutes']:.0f}", f"{row['step']:,}", f"{row['examples']:,}"]
        rows.append([label, f"{row['parameters'] / 1e6:.2f} M", *trained, f"{row['real_time_factor']:.3f}"])
    heads = ["network", "parameters", "CPU minutes", "steps", "examples seen", "real-time factor"]
    where, when = compared["environment"], compared["date"]
    waited = max(row["waiting_share"] for row in compared["networks"].values())
    return {
        "networks": format_table(heads, rows),
        "networks-setting": (
            f"{where['processor']}, {compared['threads']} thread, torch {where['torch']}, {when}; the factor "
            "is processor time over the time of the sound, the median of "
            f"{compared['n_examples']} examples of 10 s. "
            f"Waiting for data took at most {100 * waited:.1f} % of a training step."
        ),
        "peers": markdown_table(found),
        "peers-fuss": fuss_table(found),
    }


def cost_table() -> str:
    """Hours of the full recipe on three machines, from the measured step."""
    cost = _load("cost")
    if cost is None:
        return NOT_YET
    cpu = sum(stage["steps"] * stage["seconds_per_step"] for stage in cost["stages"]) / 3600
    gpu = sum(stage["steps"] * stage["flops_per_step"] for stage in cost["stages"]) / GPU_FLOPS / 3600
    steps = sum(stage["steps"] for stage in cost["stages"])
    audio = sum(s["steps"] * s["batch_size"] * s["audio_seconds"] for s in cost["stages"]) / 3600
    rows = [
        ["one core, as measured", f"{cpu:,.0f}"],
        [f"one machine of {CORES} cores", f"{cpu / CORES / CORE_EFFICIENCY:,.0f}"],
        ["one GPU", f"{gpu:,.1f}"],
        [f"{GPUS} GPUs", f"{gpu / GPUS / GPU_EFFICIENCY:,.1f}"],
    ]
    return format_table([f"{cost['recipe']}: {steps:,} steps, {audio:,.0f} h of sound", "hours"], rows)


def _load(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def tables() -> dict[str, str]:
    """All tables of the README by name."""
    return {**paper_tables(), **comparison_tables(), "cost": cost_table()}


if __name__ == "__main__":
    update_tables(HERE / "README.md", tables())
