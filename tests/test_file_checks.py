"""The recipe of sums and mutated files: it runs, and its results hold."""

import json
from collections import Counter

import pytest
from test_recipes import load_script

from separator.report import stale_tables

N_FILES = 240


def test_mutated_files_end_in_stems_or_in_one_line(tmp_path):
    script = load_script("file_checks", "fuzz")
    found = list(script.outcomes(tmp_path, N_FILES))
    counts = Counter(outcome for _, _, outcome in found)
    assert [seed for seed, _, _ in found] == list(range(N_FILES))
    assert set(counts) == {"separated", "refused in one line"}, counts
    assert min(counts.values()) > N_FILES / 5  # the mutations are neither all fatal nor all harmless


def test_a_crash_and_a_hang_of_a_decoder_are_seen_and_the_next_file_is_tried(tmp_path, monkeypatch):
    script = load_script("file_checks", "fuzz")
    worker = (
        "import sys, os, json, time\n"
        "for seed in range(int(sys.argv[3]), int(sys.argv[4])):\n"
        "    if seed == 1: os.kill(os.getpid(), 11)\n"
        "    if seed == 2: time.sleep(60)\n"
        "    print(json.dumps([seed, 'x', 'separated']), flush=True)\n"
    )
    (tmp_path / "worker.py").write_text(worker)
    monkeypatch.setattr(script, "__file__", str(tmp_path / "worker.py"))
    monkeypatch.setattr(script, "PATIENCE", 1)
    outcomes = [outcome for _, _, outcome in script.outcomes(tmp_path, 4)]
    assert outcomes == ["separated", "crash (-11)", "hang", "separated"]


def test_readme_tables_are_those_of_the_results():
    tables = load_script("file_checks", "tables")
    assert stale_tables(tables.HERE / "README.md", tables.tables()) == []


def test_sums_were_measured_and_hold():
    tables = load_script("file_checks", "tables")
    rows = json.loads((tables.HERE / "results/sums.json").read_text())["rows"]
    assert len(rows) >= 60
    for row in rows:
        for model in ("shipped", "random"):
            found = row[model]
            assert found["same_shape_and_rate"]
            assert found["warnings"] == 0
            if row["subtype"] in ("FLOAT", "DOUBLE"):
                assert found["error_db"] < -100
            else:
                assert found["lsb_a_stem"] <= 1


@pytest.mark.parametrize("case", [(11_025, 2, "WAV", "PCM_24", 700), (16_000, 1, "FLAC", "PCM_16", 1)])
def test_a_sum_is_measured(tmp_path, case):
    script = load_script("file_checks", "run")
    found = script.sum_error(load_script("file_checks", "fuzz").small_separator(), tmp_path, *case)
    assert found == {
        "warnings": 0,
        "stems": 5,
        "same_shape_and_rate": True,
        "error_db": -300.0,
        "gain_db": 0.0,
        "lsb_a_stem": 0.0,
    }


def test_fuzz_was_run_on_ten_thousand_files_and_none_failed():
    tables = load_script("file_checks", "tables")
    record = json.loads((tables.HERE / "results/fuzz.json").read_text())
    assert sum(record["counts"].values()) >= 10_000
    assert record["counts"]["failed"] == len(record["failures"]) == 0
