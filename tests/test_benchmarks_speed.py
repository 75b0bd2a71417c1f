import json
import runpy
from pathlib import Path

import pytest

from separator.report import stale_tables

RECIPE = Path(__file__).parents[1] / "recipes" / "synthetic_speed"


def test_the_readmes_tables_are_those_of_the_results():
    pytest.importorskip("evidence_depletion")
    tables = runpy.run_path(str(RECIPE / "run.py"))["tables"]
    results = json.loads((RECIPE / "results" / "speed.json").read_text())
    assert stale_tables(RECIPE / "README.md", tables(results)) == []


def test_the_recipe_runs_in_seconds(tmp_path):
    pytest.importorskip("evidence_depletion")
    (tmp_path / "README.md").write_text((RECIPE / "README.md").read_text())
    recipe = 'task = "sinusoids"\nmethods = ["evidence_linear"]\nseeds = 2\nsteps = 1\nrepeats = 1\n'
    (tmp_path / "recipe.toml").write_text(recipe)
    main = runpy.run_path(str(RECIPE / "run.py"))["main"]
    results = ["--results", str(tmp_path / "speed.json"), "--readme", str(tmp_path / "README.md")]
    main([str(tmp_path / "recipe.toml"), *results])
    (row,) = json.loads((tmp_path / "speed.json").read_text())["rows"]
    assert min(row["reference_ms"], row["single_ms"], row["cell_ms"]) > 0
    assert "evidence_linear" in (tmp_path / "README.md").read_text()
