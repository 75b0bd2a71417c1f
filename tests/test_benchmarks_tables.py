"""Tables of records, against figures computed by hand."""

from typing import Any

import pytest

from separator.benchmarks.experiments import Argument, Experiment, Kind
from separator.benchmarks.tables import (
    Results,
    comparison_table,
    latency_table,
    mean_and_deviation,
    select,
    summary_table,
    sweep_table,
)

WHERE = {"processor": "Slowpoke", "cores": 2, "threads": 1, "torch": "2.4"}
KIND = Kind(lambda *_, **__: [], ("one",), ("slow", "fast"), {"epochs": Argument(200, int)})


def record(method: str, seed: int, overlap: float | None, epochs: int = 3, **settings: Any) -> dict[str, Any]:
    run = {"kind": "training", "task": "one", "method": method, "seed": seed, "settings": settings}
    facts = {"seconds": 90.0, "cpu_seconds": 60.0, "date": "2026-01-02", "environment": WHERE}
    return {**run, "budget": {"epochs": epochs}, "peak_overlap": overlap, **facts}


EXPERIMENT = Experiment("e", "training", "e", ("one",), ("slow", "fast"), (0, 1), {"epochs": 200})


def test_the_budget_with_most_cells_is_shown_and_of_two_the_larger() -> None:
    short = [record("slow", 0, 0.1, 3), record("slow", 1, 0.3, 3), record("fast", 0, 0.5, 3)]
    long = [record("slow", 0, 0.7, 9), record("fast", 0, 0.9, 9)]
    foreign = [record("slow", 0, 0.0, 9, gamma=1.0), record("other", 0, 0.0, 9)]
    assert select(EXPERIMENT, KIND, [*short, *long, *foreign]).records == long
    assert select(EXPERIMENT, KIND, [*short, *long[:1], *foreign]).records == short
    assert select(EXPERIMENT, KIND, foreign).caption() == "Not run yet."


def test_seeds_of_another_experiment_of_the_same_records_are_left_out() -> None:
    own = [record(m, s, 0.1) for m in ("slow", "fast") for s in (0, 1)]
    found = select(EXPERIMENT, KIND, [*own, record("slow", 2, 0.9), record("slow", 3, 0.9, 9)])
    assert found.records == own
    assert found.caption().startswith("2 seeds; epochs 3; ")


def test_a_caption_says_budget_seeds_hardware_and_minutes() -> None:
    whole = select(EXPERIMENT, KIND, [record(m, s, 0.1) for m in ("slow", "fast") for s in (0, 1)])
    assert whole.caption() == (
        "2 seeds; epochs 3; 4.0 CPU minutes (6.0 by the clock) of Slowpoke "
        "(2 cores, 1 thread a run, torch 2.4), 2026-01-02."
    )
    part = select(EXPERIMENT, KIND, [record("slow", 0, 0.1), record("slow", 1, 0.1), record("fast", 0, 0.1)])
    assert part.caption().startswith("**3 of 4 runs**; 2 seeds; ")


def test_a_mean_two_published_deviations_away_is_marked() -> None:
    found = [record("slow", 0, 0.1), record("slow", 1, 0.3)]
    assert mean_and_deviation(found, "peak_overlap") == "0.20 ± 0.10"
    assert mean_and_deviation(found, "peak_overlap", [0.39, 0.1]) == "0.20 ± 0.10"
    assert mean_and_deviation(found, "peak_overlap", [0.41, 0.1]) == "0.20 ± 0.10 †"
    assert mean_and_deviation(found, "peak_overlap", [0.41]) == "0.20 ± 0.10"  # no deviation was published
    assert mean_and_deviation(found[:1], "peak_overlap") == "0.10"
    assert mean_and_deviation([*found, record("slow", 2, None)], "peak_overlap") == "0.20 ± 0.10 (2 of 3)"
    assert mean_and_deviation([record("slow", 0, None)], "peak_overlap") == "-"
    assert mean_and_deviation(found, "nothing") == "-"


def test_ours_stands_beside_what_was_published() -> None:
    results = Results([record("slow", 0, 0.1), record("slow", 1, 0.3)], 4)
    published = {"slow": {"one": [0.5, 0.1]}, "fast": {"one": [0.071]}}
    lines = comparison_table(results, ["slow", "fast"], ["one"], published=published).splitlines()
    assert lines[0] == "| peak overlap | one | published |"
    assert lines[2:] == ["| slow | 0.20 ± 0.10 † | 0.50 ± 0.10 |", "| fast | - | 0.071 |"]
    assert comparison_table(results, ["slow"], ["one"]).splitlines()[2] == "| slow | 0.20 ± 0.10 |"


def test_a_sweep_selects_by_settings_and_a_default_is_a_setting_not_set() -> None:
    results = Results([record("slow", 0, 0.1), record("slow", 0, 0.3, n_slots=6)], 2)
    rows = [("slow", {"method": "slow"})]
    table = sweep_table(results, rows, {"5": {"n_slots": None}, "6": {"n_slots": 6}, "7": {"n_slots": 7}})
    assert table.splitlines()[2] == "| slow | 0.10 | 0.30 | - |"


def test_a_summary_has_a_row_a_cell() -> None:
    lines = summary_table([record("slow", 0, 0.1), record("slow", 1, 0.3), record("slow", 0, 0.5, tau=1.0)])
    assert lines.splitlines()[2:] == [
        "| one slow | 2 | 0.20 ± 0.10 | 2.0 |",
        "| one slow tau=1.0 | 1 | 0.50 | 1.0 |",
    ]


@pytest.mark.parametrize("whole", [True, False])
def test_latency_grows_with_the_planted_exponents(whole: bool) -> None:
    usual = {"n_slots": 2, "n_tokens": 4, "d_model": 8}
    points = [{}, {"n_slots": 4}, {"n_tokens": 8}, {"d_model": 16}]
    records = []
    for settings in points:
        size = {**usual, **settings}
        time = size["n_slots"] * size["n_tokens"] * size["d_model"] ** 2.0
        records.append({**record("slow", 0, None, **settings), "forward_ms": time, "training_ms": 2 * time})
    grid = tuple({axis: [value]} for axis, value in (("n_slots", 4), ("n_tokens", 8), ("d_model", 16)))
    experiment = Experiment("e", "training", "e", ("one",), ("slow",), (0,), {}, {}, ({}, *grid))
    results = Results(records if whole else records[:3], 4)
    row = latency_table(results, experiment.cells(KIND), usual).splitlines()[2]
    assert row == (
        "| slow | 512.0 | 1024.0 | 1.00 | 1.00 | 2.00 |" if whole else "| slow | 512.0 | 1024.0 | - | - | - |"
    )
