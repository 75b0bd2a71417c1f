"""Write the tables of this folder's README and of the model card, and the pictures of the training curves.

    python recipes/soundscapes/tables.py

Everything comes from results/: evaluation.json and baselines.json (evaluate.py), ablation_*.json (evaluate.py
on the ablations' models), log.jsonl and counter_log.jsonl (the logs of the shipped run and of its counter).
"""

import csv
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from separator.report import confusion_table, format_table, fuss_table, markdown_table, pyplot, update_tables
from separator.script import exit_status

HERE = Path(__file__).parent
RESULTS = HERE / "results"
README = HERE.parents[1] / "README.md"
PACKAGES = HERE.parents[1] / "data/soundscapes/packages.tsv"
CARD = HERE.parents[1] / "models/soundscapes/README.md"
LABELS = {
    "mixture": "mixture as it is",
    "hpss": "HPSS",
    "nmf": "NMF, oracle grouping",
    "irm": "ideal ratio mask",
    "ibm": "ideal binary mask",
}
MECHANISMS = {
    "vanilla": "vanilla, parallel",
    "evidence_quadratic": "evidence, the paper's depletion",
    "evidence_claim": "evidence, claim depletion",
}


def load(name: str) -> dict[str, Any]:
    """A result file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def reports() -> dict[str, Any]:
    """The model's report and those of what it is compared with, by label."""
    baselines = load("baselines")["reports"]
    model = load("evaluation")["reports"]["evaluation"]
    return {"**this model**": model, **{label: baselines[key] for key, label in LABELS.items()}}


def ablation_table() -> str:
    """Same encoder, data, loss and steps; the mechanism differs."""
    rows = []
    for mechanism, label in MECHANISMS.items():
        report = load(f"ablation_{mechanism}")["reports"][f"ablation_{mechanism}"]["all"]
        scores = [f"{report['by_count'][k]['known_count']['mean']:.1f}" for k in ("1", "2", "3", "4")]
        overlap = report["overlap"]
        peak = overlap["mask_peak_known_count"]["mean"]
        cosine = overlap["mask_cosine_known_count"]["mean"]
        rows.append([label, *scores, f"{peak:.2f}", f"{cosine:.2f}"])
    columns = ["mechanism", "1, SI-SDR", "2, SI-SDRi", "3", "4", "peak overlap", "cosine overlap"]
    return format_table(columns, rows)


def tables() -> dict[str, str]:
    """Tables of the recipe's README by name."""
    methods = reports()
    model = {"**this model**": methods["**this model**"]}
    return {
        "all": markdown_table(methods),
        "heldout": markdown_table(methods, part="package_heldout"),
        "fuss": fuss_table(methods, which="fuss_called"),
        "confusion": confusion_table(methods["**this model**"]),
        "facts": facts_table(model["**this model**"]["all"]),
        "ablation": ablation_table(),
    }


def card_tables() -> dict[str, str]:
    """Tables of the model card by name."""
    methods = reports()
    model = {"this model": methods["**this model**"]}
    return {
        "all": markdown_table(model),
        "heldout": markdown_table(model, part="package_heldout"),
        "packages": packages_table(),
    }


def packages_table() -> str:
    """The packages whose clips were trained on or scored, and their licences."""
    with PACKAGES.open(newline="") as file:
        rows = [
            (row["package"], row["version"], row["licences"]) for row in csv.DictReader(file, delimiter="\t")
        ]
    return format_table(["package", "version", "licences"], rows)


def facts_table(report: Mapping[str, Any]) -> str:
    """Levels and overlaps of the model's outputs."""
    names = {
        "residual_db": "residual, dB re the mixture",
        "inactive_db": "outputs not called sources, dB re the mixture",
        "sum_error_db": "sources + residual - mixture, dB re the mixture",
    }
    rows = [[label, f"{report[name]['mean']:.1f}"] for name, label in names.items()]
    for name, label in (("mask_peak_called", "peak"), ("mask_cosine_called", "cosine")):
        rows.append(
            [f"{label} overlap of the masks of called sources", f"{report['overlap'][name]['mean']:.3f}"]
        )
    bsseval = report["bsseval"]
    for name in ("sdr", "sir", "sar"):
        rows.append(
            [
                f"BSSEval v4 {name.upper()}, dB ({bsseval['n_examples']} inputs)",
                f"{bsseval[name]['mean']:.1f}",
            ]
        )
    dropped = f"{bsseval['n_dropped_frames']} of {bsseval['n_frames'] + bsseval['n_dropped_frames']}"
    rows.append(["BSSEval frames dropped (a silent signal in them)", dropped])
    return format_table(["mean over the evaluation inputs", ""], rows)


def draw_curve(path: Path) -> None:
    """Training loss and validation by step."""
    plt = pyplot()

    lines = [json.loads(line) for line in (RESULTS / "log.jsonl").read_text().splitlines()]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    train = [line for line in lines if "snr" in line]
    for name, label in (("snr", "slots that were found"), ("guided", "slots guided by the sources")):
        left.plot([line["step"] for line in train], [-line[name] for line in train], label=label)
    left.set(xlabel="step", ylabel="thresholded SNR (dB)", title="training")
    left.legend()
    checks = [line for line in lines if "validation" in line]
    for name in checks[0]["validation"]:
        if name.startswith("si_sdri_"):
            count = name.removeprefix("si_sdri_")
            label = f"{count} sources, SI-SDRi" if count != "1" else "1 source, SI-SDR / 4"
            scale = 0.25 if count == "1" else 1.0
            values = [scale * line["validation"][name] for line in checks]
            right.plot([line["step"] for line in checks], values, label=label, marker=".")
    right.set(xlabel="step", ylabel="dB", title="validation, averaged weights, known count")
    right.legend()
    figure.savefig(path, dpi=90)


def draw_counter_curve(path: Path) -> None:
    """The counter's losses and its right counts by step."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    lines = [json.loads(line) for line in (RESULTS / "counter_log.jsonl").read_text().splitlines()]
    train = [line for line in lines if "counted" in line]
    for name, label in (("counted", "sources in all"), ("active", "sources at a time")):
        left.plot([line["step"] for line in train], [line[name] for line in train], label=label)
    left.set(xlabel="step", ylabel="cross-entropy", title="training of the counter")
    left.legend()
    checks = [line for line in lines if "validation" in line]
    share = [100 * line["validation"]["count"] for line in checks]
    right.plot([line["step"] for line in checks], share, marker=".")
    right.set(xlabel="step", ylabel="right counts (%)", title="validation, averaged weights")
    figure.savefig(path, dpi=90)


def main() -> None:
    """Write everything."""
    update_tables(HERE / "README.md", tables())
    update_tables(CARD, card_tables())
    update_tables(README, {"all": markdown_table(reports())})
    draw_curve(RESULTS / "curve.png")
    draw_counter_curve(RESULTS / "counter_curve.png")


if __name__ == "__main__":
    sys.exit(exit_status(main, __file__))
