"""The README's tables from results/.

python recipes/file_checks/tables.py
"""

import json
from pathlib import Path

from separator.report import format_table, update_tables

HERE = Path(__file__).parent


def tables() -> dict[str, str]:
    """Every table of the README."""
    sums, fuzz = (json.loads((HERE / f"results/{name}.json").read_text()) for name in ("sums", "fuzz"))
    return {"sums": sums_table(sums), "fuzz": fuzz_table(fuzz)}


def sums_table(record: dict) -> str:
    """Error of the sum of stems for every file and both networks."""
    columns = ["Hz", "channels", "file", "samples"]
    for model in ("shipped", "random"):
        columns += [f"{model}: stems", "dB", "LSB a stem"]
    rows = []
    for row in record["rows"]:
        cells = [str(row["sample_rate"]), str(row["channels"]), f"{row['container']} {row['subtype']}"]
        cells.append(str(row["length"]))
        for model in ("shipped", "random"):
            found = row[model]
            cells += [str(found["stems"]), decibels(found["error_db"]), steps(found.get("lsb_a_stem"))]
        rows.append(cells)
    return format_table(columns, rows)


def decibels(value: float) -> str:
    """A level; nothing is left below -290."""
    return "exact" if value < -290 else f"{value:.0f}"


def steps(value: float | None) -> str:
    """Steps of an integer; floats have none."""
    return "-" if value is None else f"{value:g}"


def fuzz_table(record: dict) -> str:
    """What became of mutated files."""
    rows = [[name, str(count)] for name, count in record["counts"].items()]
    rows.append(["seconds in all", f"{record['seconds']:.0f}"])
    total = sum(record["counts"].values())
    return format_table([f"{total} mutated files of {record['kinds']} kinds, {record['date']}", ""], rows)


if __name__ == "__main__":
    update_tables(HERE / "README.md", tables())
