"""What an evaluation leaves: a JSON file, a table of examples, a picture, and tables for READMEs.

Those tables are generated from result files, so that the text cannot drift from the numbers. A README holds a
table between ``<!-- table:NAME -->`` and ``<!-- /table -->``. ``update_tables`` writes it there,
``stale_tables`` tells which differ from what the results give, for a test.
"""

import argparse
import csv
import json
import math
import platform
import re
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from separator.errors import SeparatorError
from separator.evaluation import ExampleScore
from separator.metrics import count_confusion
from separator.script import Parser, counted
from separator.training import environment

_TABLE = re.compile(r"(<!-- table:(?P<name>[\w-]+) -->\n)(?P<body>.*?)(<!-- /table -->)", re.DOTALL)
_OPENING = re.compile(r"<!-- table:([\w-]+) -->")


def write_report(
    path: str | Path, reports: Mapping[str, Mapping[str, Any]], *, data: Mapping[str, Any], seconds: float
) -> None:
    """Write reports by method with what they were made on, the date, the time it took and the environment."""
    record = {
        **data,
        "seconds": round(seconds),
        "date": time.strftime("%Y-%m-%d"),
        "environment": {**environment(), "numpy": np.__version__, "system": platform.system()},
        "reports": reports,
    }
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(json.dumps(record, indent=1) + "\n")


def write_scores(path: str | Path, scores: Sequence[ExampleScore]) -> None:
    """Write a CSV with one row an example; a score that is undefined is an empty cell."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("w", newline="") as file:
        writer = csv.DictWriter(file, list(_score_row(ExampleScore("", 0, 0, None))))
        writer.writeheader()
        writer.writerows(_score_row(score) for score in scores)


def save_scores_picture(path: str | Path, scores: Sequence[ExampleScore], title: str) -> None:
    """Save two panels as PNG: each source's SI-SDRi against its SI-SDR in the mixture, and the counts.

    Inputs of one source have no improvement: they are in the right panel alone.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    for count in sorted({score.n_sources for score in scores if score.n_sources >= 2}):
        group = [score for score in scores if score.n_sources == count]
        before = [value for score in group for value in score.before]
        after = [value for score in group for value in score.improvements]
        mean = sum(after) / len(after)
        left.scatter(before, after, s=8, alpha=0.6, label=f"{count} sources, mean {mean:.1f} dB")
    left.axhline(0, color="0.6", linewidth=0.8)
    left.set(xlabel="SI-SDR in the mixture (dB)", ylabel="SI-SDRi, known count (dB)", title=title)
    if left.get_legend_handles_labels()[0]:
        left.legend(fontsize=8)
    called, true = ([getattr(score, name) for score in scores] for name in ("n_called", "n_sources"))
    confusion = count_confusion(torch.tensor(called), torch.tensor(true)).numpy()
    right.imshow(confusion, cmap="Blues", origin="lower")
    for (row, column), count in np.ndenumerate(confusion):
        if count:
            colour = "white" if count > confusion.max() / 2 else "black"
            right.text(column, row, str(count), ha="center", va="center", color=colour)
    right.set(xlabel="called", ylabel="true", title="number of sources")
    right.set_xticks(range(len(confusion)))
    right.set_yticks(range(len(confusion)))
    figure.savefig(path, dpi=100, format="png")


def format_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned, the others to the right.

    >>> print(format_table(["a", "b"], [["x", "1.0"]]))
    | a | b |
    |:--|--:|
    | x | 1.0 |
    """
    lines = [list(columns), *(list(row) for row in rows)]
    for line in lines[1:]:
        if len(line) != len(columns):
            raise SeparatorError(
                f"a row has {counted(len(line), 'cell')}, the table {counted(len(columns), 'column')}: {line}"
            )
    text = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([text[0], "|:--|" + "--:|" * (len(columns) - 1), *text[1:]])


def markdown_table(results: Mapping[str, Mapping[str, Any]], *, part: str = "all") -> str:
    """One row a method: SI-SDR of one source, SI-SDRi of more, known count / strict; the share counted right.

    ``results`` maps a label to the report of ``evaluation.evaluate``; ``part`` is one of the report's parts.
    A method that was not run on the part has dashes; one run on fewer examples than the most says on how
    many.
    """
    parts = {label: report.get(part) for label, report in results.items()}
    counts = sorted({int(k) for entry in parts.values() if entry for k in entry["by_count"]})
    if not counts:
        raise SeparatorError(f"no result has {part=}; the reports hold {_part_names(results)}")
    most = max(entry["n_examples"] for entry in parts.values() if entry)
    heads = [f"{k} source{'s' * (k > 1)}, {'SI-SDRi' if k > 1 else 'SI-SDR'}" for k in counts]
    rows = []
    for label, entry in parts.items():
        if entry is None:
            rows.append([label, *["-"] * (len(counts) + 1)])
            continue
        name = label if entry["n_examples"] == most else f"{label} ({counted(entry['n_examples'], 'input')})"
        cells = [_known_and_strict(entry["by_count"].get(str(k))) for k in counts]
        rows.append([name, *cells, _percent(entry["count"]["accuracy"])])
    return format_table(["dB, known count / strict", *heads, "count right"], rows)


def fuss_table(results: Mapping[str, Mapping[str, Any]], *, part: str = "all", which: str = "fuss") -> str:
    """One row a method in the FUSS protocol: 1S, SI-SNRi of 2, 3, 4 sources, MSi and the three rates.

    ``which`` is ``fuss`` (every output, by its power) or ``fuss_called`` (only outputs called sources).
    """
    rows = []
    for label, report in results.items():
        if part not in report:
            raise SeparatorError(f"{label!r} has no {part=}; the reports hold {_part_names(results)}")
        scores = report[part][which]
        rates = " / ".join(_percent(scores[name]) for name in ("under", "equal", "over"))
        rows.append([label, *[_decibels(scores[k]) for k in ("1S", "2", "3", "4", "MSi")], rates])
    return format_table(["FUSS protocol, dB", "1S", "2", "3", "4", "MSi", "under / equal / over"], rows)


def confusion_table(report: Mapping[str, Any], *, part: str = "all") -> str:
    """How many inputs of each true number of sources (row) were called to have each number (column)."""
    confusion = report[part]["count"]["confusion"]
    rows = [[str(true), *map(str, row)] for true, row in enumerate(confusion) if sum(row)]
    return format_table(["true \\ called", *map(str, range(len(confusion)))], rows)


def update_tables(readme_path: str | Path, tables: Mapping[str, str]) -> bool:
    """Write ``tables`` between their markers in a README; tell whether that changed the file.

    Raises:
        SeparatorError: the file is missing, a table has no place, or a place has no table or no end.
    """
    text = _read_readme(readme_path, tables)
    updated = _TABLE.sub(lambda match: f"{match[1]}{tables[match['name']].strip()}\n{match[4]}", text)
    if updated != text:
        Path(readme_path).write_text(updated)
    return updated != text


def stale_tables(readme_path: str | Path, tables: Mapping[str, str]) -> list[str]:
    """Names of the README's tables that differ from ``tables``; raises as ``update_tables`` does."""
    text = _read_readme(readme_path, tables)
    found = {match["name"]: match["body"].strip() for match in _TABLE.finditer(text)}
    return sorted(name for name, body in found.items() if body != tables[name].strip())


def _score_row(score: ExampleScore) -> dict[str, Any]:
    fuss, pairs = score.fuss, score.bsseval
    values: dict[str, float] = {
        "known_count_db": score.known_count,
        "strict_db": score.strict,
        "input_si_sdr_db": _mean(score.before) if score.n_sources >= 2 else math.nan,
        "fuss_si_snr_db": math.nan if fuss is None else _mean(fuss.si_snr.tolist()),
        "fuss_si_snri_db": math.nan if fuss is None else _mean(fuss.improvement.tolist()),
        "inactive_db": score.inactive_db,
        "residual_db": score.residual_db,
        "sum_error_db": score.sum_error_db,
        **{
            f"bsseval_{name}_db": math.nan if pairs is None else _mean(getattr(pairs, name).tolist())
            for name in ("sdr", "isr", "sir", "sar")
        },
    }
    return {
        "name": score.name,
        "n_sources": score.n_sources,
        "n_called": score.n_called,
        "n_active_outputs": "" if fuss is None else fuss.n_estimates,
        **{name: f"{value:.4f}" if math.isfinite(value) else "" for name, value in values.items()},
    }


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


def _read_readme(readme_path: str | Path, tables: Mapping[str, str]) -> str:
    path = Path(readme_path)
    if not path.is_file():
        raise SeparatorError(f"no file {path} to hold the tables {', '.join(tables)}")
    text = path.read_text()
    opened = _OPENING.findall(text)
    closed = [match["name"] for match in _TABLE.finditer(text)]
    if opened != closed:
        unclosed = ", ".join(sorted(set(opened) - set(closed))) or ", ".join(opened)
        raise SeparatorError(f"{path.name}: table {unclosed} has no '<!-- /table -->' on a line of its own")
    if set(opened) != set(tables):
        raise SeparatorError(
            f"{path.name} has places for {sorted(set(opened))}, the results give {sorted(tables)}: "
            "add '<!-- table:NAME -->' and '<!-- /table -->' lines, or remove them"
        )
    return text


def _part_names(results: Mapping[str, Mapping[str, Any]]) -> str:
    names = {name for report in results.values() for name in report} - {"settings"}
    return ", ".join(sorted(names)) or "none"


def _known_and_strict(scores: Mapping[str, Any] | None) -> str:
    return "-" if scores is None else f"{_decibels(scores['known_count'])} / {_decibels(scores['strict'])}"


def _decibels(value: Mapping[str, Any]) -> str:
    return "-" if value["mean"] is None else f"{value['mean']:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    return plt


def measure_recipe(
    here: Path,
    description: str | None,
    measure: Callable[[dict[str, Any]], dict[str, Any]],
    tables: Callable[[dict[str, Any]], dict[str, str]],
    arguments: Sequence[str] | None = None,
) -> None:
    """Run a recipe that measures speed: measure (or read) the results, write them and the README's tables.

    Args:
        here: folder of the recipe, with recipe.toml, README.md and results/speed.json.
        description: what ``--help`` says.
        measure: makes results, ready for JSON, of the recipe's table.
        tables: makes the README's tables of the results.
        arguments: of the command line; by default those of the process.
    """
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path, nargs="?", default=here / "recipe.toml")
    parser.add_argument("--results", type=Path, default=here / "results" / "speed.json")
    parser.add_argument("--readme", type=Path, default=here / "README.md")
    parser.add_argument(
        "--table-only", action="store_true", help="write the table from the results as they are"
    )
    options = parser.parse_args(arguments)
    if not options.table_only:
        results = measure(tomllib.loads(options.recipe.read_text()))
        options.results.write_text(json.dumps(results, indent=1) + "\n")
    update_tables(options.readme, tables(json.loads(options.results.read_text())))
