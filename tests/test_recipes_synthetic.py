"""Every synthetic experiment runs, for seconds, and learns; what is wrong is refused before anything runs."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from separator.benchmarks.kinds import KINDS
from separator.benchmarks.records import read_records
from separator.report import stale_tables

FOLDER = Path(__file__).parents[1] / "recipes/synthetic"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.toml") if path.stem != "published")
ONCE = ("latency", "geometry")
SHORT = ("--n-train", "256", "--n-test", "60", "--seeds", "0", "1")


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"synthetic_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(*arguments: object, script: str = "run.py") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(FOLDER / script), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experiments that share records share this folder."""
    return tmp_path_factory.mktemp("results")


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in ONCE])
def test_an_experiment_runs_and_its_loss_falls(
    name: str, results: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = load_script("run").main
    arguments = [str(FOLDER / f"{name}.toml"), "--results", str(results), *SHORT]
    if name != "table1":
        arguments += ["--tasks", "sinusoids"]
    losses = []
    for epochs in (1, 5):
        assert main([*arguments, "--epochs", str(epochs)]) == 0
        table = capsys.readouterr().out
        assert table.startswith("| cell | seeds | peak_overlap |")
        experiment = load_script("tables").experiment_of(name)
        records = read_records(results / f"{experiment.records}.jsonl")
        assert {r["task"] for r in records} >= {"sinusoids"}
        losses.append(
            {
                (r["task"], r["method"], r["seed"], str(r["settings"])): r["final_loss"]
                for r in records
                if r["budget"]["epochs"] == epochs and r.get("final_loss") is not None
            }
        )
    first, last = losses
    assert first.keys() == last.keys()
    assert len(last) >= 2 * (len(experiment.methods) - 1)
    risen = [run for run in last if not last[run] < first[run]]
    assert risen == []


@pytest.mark.parametrize("name", ONCE)
def test_what_does_not_train_runs_too(name: str, tmp_path: Path) -> None:
    text = (FOLDER / f"{name}.toml").read_text()
    text = text.split("\n[[grid]]")[0].replace("repeats = 20", "repeats = 2").replace("256 }", "8 }")
    (tmp_path / f"{name}.toml").write_text(text.replace("[0, 1, 2, 3, 4]", "[0]"))
    done = run(tmp_path / f"{name}.toml", "--results", tmp_path)
    assert done.returncode == 0, done.stderr
    records = read_records(tmp_path / f"{name}.jsonl")
    assert {r["kind"] for r in records} == {name}
    if name == "geometry":
        assert [c for r in records for c in r["checks"].values() if not c["holds"]] == []


GOOD = """
tasks = ["sinusoids"]
methods = ["vanilla", "evidence_linear"]
seeds = [0]
budget = { epochs = 1, n_train = 128, n_test = 50 }
settings = { n_tokens = 16 }
"""


@pytest.mark.parametrize(
    ("old", "new", "accepted"),
    [
        ('["sinusoids"]', '["sinusoid"]', "unknown task 'sinusoid'; accepted are sinusoids, gaussian_bumps"),
        ('"vanilla"', '"vanila"', "unknown method 'vanila'; accepted are vanilla, sequential"),
        ("seeds =", "seed =", "unknown key 'seed'; accepted are kind, records, tasks"),
        ("epochs =", "epoch =", "unknown budget key 'epoch'; accepted are epochs, n_train"),
        ("n_tokens = 16", "n_tokens = 7", "n_tokens=7 does not divide the 256 samples"),
        ("n_tokens = 16", "n_token = 16", "unknown setting 'n_token'; the trainer's are epochs, n_train"),
        ("n_tokens = 16", "gamma = 3.0", "those of vanilla n_iter"),
        ("n_tokens = 16", "tau = 0.3", "unknown setting 'tau'"),
        ("n_tokens = 16", 'evaluations = ["order"]', "unknown evaluation 'order'; choose of slot_order"),
        (
            "n_tokens = 16",
            'evaluations = ["greedy_order"]',
            "takes no order_policy, which 'greedy_order' needs",
        ),
        ("n_tokens = 16", "amp_ratio = 0", "amp_ratio=0 is not a number above 0"),
        ("n_train = 128", "n_train = 127", "n_train=127 is less than batch_size=128"),
    ],
)
def test_a_bad_experiment_is_one_line_and_nothing_runs(
    tmp_path: Path, old: str, new: str, accepted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert old in GOOD
    (tmp_path / "bad.toml").write_text(GOOD.replace(old, new))
    main = load_script("run").main
    assert main([str(tmp_path / "bad.toml"), "--results", str(tmp_path / "results")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("run.py: error: ")
    assert said.err.count("\n") == 1
    assert accepted in said.err
    assert not (tmp_path / "results").exists()


def test_wrong_usage_and_bad_files_end_with_a_status_that_is_not_zero(tmp_path: Path) -> None:
    (tmp_path / "good.toml").write_text(GOOD)
    (tmp_path / "good.jsonl").write_text('{"mine": 1}\n')
    done = run(tmp_path / "good.toml", "--results", tmp_path)
    assert done.returncode == 1
    assert "good.jsonl, line 1 has format None" in done.stderr
    assert done.stderr.count("\n") == 1
    assert (tmp_path / "good.jsonl").read_text() == '{"mine": 1}\n'
    assert run(tmp_path / "none.toml").returncode == 1
    assert run(tmp_path / "good.toml", "--jobs", "0").returncode == 2
    assert run().returncode == 2


def test_a_killed_run_goes_on_where_it_was(tmp_path: Path) -> None:
    (tmp_path / "long.toml").write_text(GOOD.replace("[0]", "[0, 1, 2]").replace("128,", "1280,"))
    path = tmp_path / "long.jsonl"
    command = [sys.executable, str(FOLDER / "run.py"), str(tmp_path / "long.toml"), "--epochs", "3"]
    command += ["--results", str(tmp_path)]
    first = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    before = path.read_text().splitlines()
    assert 3 <= len(before) <= 6
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"records of {len(before)} of 6 runs are there already" in done.stderr
    after = path.read_text().splitlines()
    assert len(after) == 6
    assert after[: len(before)] == before
    one = json.loads(after[0])
    assert {"environment", "seconds", "seeds_together", "date", "budget", "settings"} <= one.keys()


def test_quickstart_and_picture_run(tmp_path: Path) -> None:
    done = run("--epochs", "1", "--n-train", "128", script="quickstart.py")
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        "vanilla",
        "sequential",
        "evidence_linear",
    ]
    picture = tmp_path / "attention.png"
    done = run("--epochs", "1", "--n-train", "128", "--output", picture, script="picture.py")
    assert done.returncode == 0, done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_paper_s_package_is_trained_and_measured_once(tmp_path: Path) -> None:
    pytest.importorskip("evidence_depletion")
    path = tmp_path / "reference.jsonl"
    command = ("--epochs", "1", "--seeds", "3", "--methods", "evidence_linear", "--results", str(path))
    for _ in range(2):
        done = run(*command, script="reference.py")
        assert done.returncode == 0, done.stderr
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (record["method"], record["seed"], record["epochs"]) == ("evidence_linear", 3, 1)
    assert 0 <= record["peak_overlap"] <= 1
    texts = load_script("tables").reference_tables(load_script("tables").results_of("table1"), tmp_path)
    assert f"| evidence_linear, the package | {record['peak_overlap']:.2f} |" in texts["reference"]


def test_quick_check_fails_when_evidence_collapses_as_often(tmp_path: Path) -> None:
    done = run("--epochs", "1", "--n-train", "128", script="quick_check.py")  # too short to tell them apart
    assert done.returncode == 1, done.stdout + done.stderr
    assert "failed: " in done.stdout


@pytest.mark.parametrize("script", ["quickstart.py", "quick_check.py", "picture.py"])
def test_a_bad_budget_of_a_script_is_one_line(script: str) -> None:
    done = run("--epochs", "0", script=script)
    assert done.returncode == 1
    assert done.stderr.startswith(f"{script}: error: ")
    assert "epochs=0 is not" in done.stderr
    assert done.stderr.count("\n") == 1


def test_all_methods_of_the_paper_are_compared_somewhere() -> None:
    experiment_of = load_script("tables").experiment_of
    compared = {method for name in EXPERIMENTS for method in experiment_of(name).methods}
    assert compared >= set(KINDS["training"].methods)


def test_readme_tables_are_those_of_the_records() -> None:
    assert stale_tables(FOLDER / "README.md", load_script("tables").tables()) == []
