import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from separator.bsseval import BssEval
from separator.errors import SeparatorError
from separator.evaluation import ExampleScore
from separator.fuss_protocol import FussScore
from separator.report import (
    confusion_table,
    format_table,
    fuss_table,
    markdown_table,
    save_scores_picture,
    stale_tables,
    update_tables,
    write_report,
    write_scores,
)


def stat(mean: float | None) -> dict[str, Any]:
    return {"mean": mean, "std": 1.0, "count": 5}


def report(n_examples: int = 10, shift: float = 0.0) -> dict[str, Any]:
    rates = {"under": 0.25, "equal": 0.5, "over": 0.25}
    return {
        "settings": {"zero_mean": False},
        "all": {
            "n_examples": n_examples,
            "by_count": {
                "1": {"known_count": stat(30.0 + shift), "strict": stat(25.0)},
                "2": {"known_count": stat(8.04 + shift), "strict": stat(None)},
            },
            "fuss": {
                "1S": stat(30.0),
                "2": stat(1.0),
                "3": stat(2.0),
                "4": stat(None),
                "MSi": stat(1.5),
                **rates,
            },
            "count": {"accuracy": 0.625, "confusion": [[0, 0, 0], [0, 3, 1], [0, 2, 4]]},
        },
    }


def test_the_table_has_a_row_a_method_and_known_count_before_strict() -> None:
    lines = markdown_table({"ours": report(), "NMF": report(4, 1.0)}).splitlines()
    assert lines[0] == ("| dB, known count / strict | 1 source, SI-SDR | 2 sources, SI-SDRi | count right |")
    assert lines[2] == "| ours | 30.0 / 25.0 | 8.0 / - | 62 % |"
    assert lines[3] == "| NMF (4 inputs) | 31.0 / 25.0 | 9.0 / - | 62 % |"


def test_a_part_that_no_result_has_is_refused() -> None:
    with pytest.raises(SeparatorError, match="part='package_heldout'; the reports hold all"):
        markdown_table({"ours": report()}, part="package_heldout")
    with pytest.raises(SeparatorError, match="'ours' has no part='x'"):
        fuss_table({"ours": report()}, part="x")


def test_a_method_without_the_part_has_dashes() -> None:
    other = {"settings": {}, "package_heldout": report()["all"]}
    assert markdown_table({"a": report(), "b": other}).splitlines()[3] == "| b | - | - | - |"


def test_the_fuss_table_follows_the_protocol() -> None:
    lines = fuss_table({"ours": report()}).splitlines()
    assert lines[2] == "| ours | 30.0 | 1.0 | 2.0 | - | 1.5 | 25 % / 50 % / 25 % |"


def test_the_confusion_table_leaves_out_counts_that_never_occur() -> None:
    lines = confusion_table(report()).splitlines()
    assert lines[2:] == ["| 1 | 0 | 3 | 1 |", "| 2 | 0 | 2 | 4 |"]


def test_a_row_of_another_width_is_refused() -> None:
    with pytest.raises(SeparatorError, match="a row has 1 cell, the table 2 columns"):
        format_table(["a", "b"], [["x"]])


def readme(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "README.md"
    path.write_text(text)
    return path


GOOD = "before\n<!-- table:scores -->\nold\n<!-- /table -->\nafter\n<!-- table:fuss -->\n<!-- /table -->\n"


def test_tables_are_written_between_their_markers_and_nothing_else_changes(tmp_path: Path) -> None:
    path = readme(tmp_path, GOOD)
    tables = {"scores": "| new |", "fuss": "| \\1 |"}
    assert stale_tables(path, tables) == ["fuss", "scores"]
    assert update_tables(path, tables) is True
    assert path.read_text() == GOOD.replace("old", "| new |").replace(
        "<!-- table:fuss -->\n", "<!-- table:fuss -->\n| \\1 |\n"
    )
    assert stale_tables(path, tables) == []
    assert update_tables(path, tables) is False


def test_a_table_edited_by_hand_is_stale(tmp_path: Path) -> None:
    path = readme(tmp_path, GOOD)
    tables = {"scores": "| 1 |", "fuss": "| 2 |"}
    update_tables(path, tables)
    path.write_text(path.read_text().replace("| 1 |", "| 100 |"))
    assert stale_tables(path, tables) == ["scores"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no markers\n", r"has places for \[\], the results give \['scores'\]"),
        ("<!-- table:other -->\n<!-- /table -->\n", r"places for \['other'\]"),
        ("<!-- table:scores -->\n| 1 |\n", "table scores has no '<!-- /table -->'"),
        ("<!-- table:a -->\n<!-- table:scores -->\n<!-- /table -->\n", "table scores has no"),
    ],
)
def test_markers_that_do_not_fit_the_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SeparatorError, match=message):
        update_tables(readme(tmp_path, text), {"scores": "| 1 |"})


def test_a_missing_readme_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match=r"no file .*README.md"):
        update_tables(tmp_path / "README.md", {"scores": ""})


def scores() -> list[ExampleScore]:
    pairs = FussScore(torch.tensor([10.0, 20.0]), torch.tensor([5.0, 15.0]), 2, 3)
    nothing = torch.tensor([math.nan, 4.0])
    bsseval = BssEval(torch.tensor([1.0, 2.0]), nothing, nothing, nothing, 10, 1, 0, 1)
    two = ExampleScore(
        "b", 2, 3, None, 7.0, 6.5, (-1.0, 1.0), (6.0, 8.0), pairs, pairs, -40.0, bsseval=bsseval
    )
    one = ExampleScore("a", 1, 1, None, 30.0, 30.0, (100.0,), (-70.0,))
    return [one, two, ExampleScore("silent", 0, 1, None)]


def test_the_csv_has_a_row_an_example_and_empty_cells_for_what_is_undefined(tmp_path: Path) -> None:
    write_scores(tmp_path / "new/scores.csv", scores())
    with (tmp_path / "new/scores.csv").open(newline="") as file:
        one, two, silent = csv.DictReader(file)
    assert (one["name"], one["known_count_db"], one["input_si_sdr_db"]) == ("a", "30.0000", "")
    assert (two["n_sources"], two["n_called"], two["n_active_outputs"]) == ("2", "3", "3")
    assert (two["input_si_sdr_db"], two["fuss_si_snr_db"], two["fuss_si_snri_db"]) == (
        "0.0000",
        "15.0000",
        "10.0000",
    )
    assert (two["bsseval_sdr_db"], two["bsseval_sir_db"], two["residual_db"]) == ("1.5000", "4.0000", "")
    assert [value for value in silent.values() if value] == ["silent", "0", "1"]


def test_the_report_file_holds_what_it_was_made_on_and_where(tmp_path: Path) -> None:
    write_report(tmp_path / "new/ours.json", {"ours": report()}, data={"split": "eval"}, seconds=12.6)
    record = json.loads((tmp_path / "new/ours.json").read_text())
    assert (record["split"], record["seconds"], record["reports"]["ours"]) == ("eval", 13, report())
    assert {"date", "environment"} <= set(record)


@pytest.mark.parametrize("kept", [slice(None), slice(1), slice(2, None)])
def test_the_picture_is_drawn_whatever_counts_there_are(tmp_path: Path, kept: slice) -> None:
    save_scores_picture(tmp_path / "scores.png", scores()[kept], "ours")
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")
