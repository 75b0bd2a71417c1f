"""The recipe of gravitational waves runs, for seconds, and learns; what is wrong is refused at once."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from separator.benchmarks import gw_training
from separator.benchmarks.kinds import KINDS
from separator.benchmarks.records import read_records
from separator.report import stale_tables

pytest.importorskip("binary_galactica")
ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "recipes/gravitational_waves"
GOOD = """
kind = "binaries"
tasks = ["galactic_binaries"]
methods = ["vanilla", "evidence_quadratic"]
seeds = [0]
budget = { epochs = 1, n_train = 128, n_test = 40, batch_size = 32, learning_rate = 2e-3 }
[settings]
n_bins = 128
n_tokens = 16
d_model = 16
n_waveforms = 256
frequency = 3e-3
spread_bins = 32
"""


def load_script(folder: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{folder.name}_{name}", folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def small(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An experiment of seconds; its banks are made once for all tests."""
    monkeypatch.setenv("SEPARATOR_CACHE", str(cache))
    monkeypatch.setattr(gw_training, "N_TEST_WAVEFORMS", 256)
    (tmp_path / "small.toml").write_text(GOOD)
    return tmp_path / "small.toml"


def test_the_recipe_goes_from_banks_to_pictures(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert load_script(ROOT / "data/gravitational_waves", "prepare").main([str(small)]) == 0
    assert "100 % of the banks" in capsys.readouterr().err
    results = small.parent / "results"
    run = load_script(FOLDER, "run").main
    losses = []
    for epochs in (1, 8):
        assert run([str(small), "--results", str(results), "--epochs", str(epochs)]) == 0
        assert "| cell | seeds | peak_overlap |" in capsys.readouterr().out
        records = read_records(results / "small.jsonl")
        losses.append([r["final_loss"] for r in records if r["budget"]["epochs"] == epochs])
    assert len(losses[0]) == len(losses[1]) == 2
    assert all(last < first for first, last in zip(*losses, strict=True))
    known = {
        *("cosine_overlap", "count_accuracy", "count_confusion", "recovered_share", "coverage_50"),
        *("coverage_90", "pp", "pp_band", "frequency_error_bins", "residual_power", "train_seconds"),
    }
    assert all(known <= record.keys() for record in records)
    assert all(0 <= record["coverage_50"] <= record["coverage_90"] <= 1 for record in records)
    pictures = load_script(FOLDER, "pictures").main
    output = small.parent / "pictures"
    assert pictures([str(small), "--output", str(output)]) == 0
    assert {path.name for path in output.iterdir()} == {"mixture.png", "corner.png"}
    assert pictures([str(small), "--output", str(output), "--seed", "7"]) == 1
    assert "no weights of evidence_quadratic with seed=7" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("frequency = 3e-3", "frequency = -3e-3", "frequency=-0.003 is not a number above 0"),
        ("frequency = 3e-3", "frequency = 3.0", "frequency=3.0 Hz is not between 0.0001 and 0.03 Hz"),
        ("n_bins = 128", "n_bins = 64", "n_bins=64 is too narrow for 5 sources over 32 bins"),
        ("spread_bins = 32", "spread_bins = 4", "spread_bins=4 is too narrow for 5 sources"),
        ("frequency =", "frequenzy =", "unknown setting 'frequenzy'; the trainer's are epochs, n_train"),
        ("seeds =", "seed =", "unknown key 'seed'; accepted are kind, records"),
        ("epochs =", "epoch =", "unknown budget key 'epoch'; accepted are epochs, n_train"),
        ('"vanilla"', '"matching_pursuit"', "unknown method 'matching_pursuit'; accepted are vanilla"),
        ("galactic", "gallactic", "unknown task 'gallactic_binaries'; accepted are galactic_binaries"),
        ("n_tokens = 16", "n_tokens = 24", "n_tokens=24 does not divide the 128 bins"),
        ("d_model = 16", "gamma = 3.0", "those of vanilla n_iter"),
    ],
)
def test_a_bad_experiment_is_one_line_and_nothing_runs(
    small: Path, old: str, new: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in GOOD
    small.write_text(GOOD.replace(old, new))
    results = small.parent / "results"
    assert load_script(FOLDER, "run").main([str(small), "--results", str(results)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("run.py: error: ")
    assert said.err.count("\n") == 1
    assert words in said.err
    assert not results.exists()


@pytest.mark.parametrize("name", ["binary_galactica", "zuko"])
def test_without_the_extra_one_line_names_it(
    name: str, small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    assert load_script(FOLDER, "run").main([str(small), "--results", str(small.parent / "results")]) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert f"gravitational waves need {name}; install separator[gw]" in said


def test_wrong_usage_ends_with_a_status_that_is_not_zero() -> None:
    for script, arguments in (("run", ["--jobs", "0"]), ("pictures", ["--seed", "one"])):
        with pytest.raises(SystemExit) as ended:
            load_script(FOLDER, script).main(arguments)
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        load_script(ROOT / "data/gravitational_waves", "prepare").main([])
    assert ended.value.code == 2


def test_readme_tables_are_those_of_the_records() -> None:
    assert stale_tables(FOLDER / "README.md", load_script(FOLDER, "tables").tables()) == []


def test_records_of_the_recipe_are_whole() -> None:
    records = load_script(FOLDER, "tables").results_of().records
    assert "binaries" in KINDS
    for record in records:
        assert record["n_pairs"] >= 1000
        assert json.dumps(record["pp"])


def test_the_speed_of_the_simulation_is_measured(tmp_path: Path) -> None:
    script = FOLDER / "generation.py"
    command = [sys.executable, str(script), "--repeats", "1", "--results", str(tmp_path)]
    subprocess.run(command, check=True, timeout=200)
    found = json.loads((tmp_path / "generation.json").read_text())
    assert found["binaries_a_second"] == pytest.approx(3 * found["mixtures_a_second"], abs=2)
    assert found["mixtures_a_second"] > 0
