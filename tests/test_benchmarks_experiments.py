"""Experiments and their runs, with a stand-in for the trainer that records what it was asked."""

import io
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from separator.benchmarks import latency, running
from separator.benchmarks.experiments import (
    Experiment,
    Kind,
    arguments_of_function,
    call_of,
    read_experiment,
)
from separator.benchmarks.geometry import check_geometry
from separator.benchmarks.latency import measure_latency
from separator.benchmarks.records import add_records, read_records
from separator.benchmarks.running import Progress, missing, run_experiment
from separator.errors import SeparatorError


def pretend(
    task: str,
    method: str,
    *,
    seeds: Sequence[int],
    epochs: int = 200,
    n_train: int = 5000,
    learning_rate: float = 3e-4,
    n_slots: int = 5,
    amp_ratio: float | None = None,
    evaluations: Sequence[str] = (),
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[dict[str, Any]]:
    """Stand in for the trainer; options make it slow, or kill its process once or always."""
    options = options or {}
    if "marker" in options and not Path(options["marker"]).exists():
        Path(options["marker"]).write_text(str(os.getpid()))
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if options.get("deadly"):
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(options.get("sleep", 0))
    for share in (0.5, 1.0):
        if progress is not None:
            progress(share)
    facts = {"epochs": epochs, "loss": float("nan"), "torch_threads": torch.get_num_threads()}
    return [
        {"task": task, "method": method, "seed": seed, **facts, "peak_overlap": seed / 10, "pid": os.getpid()}
        for seed in seeds
    ]


def only_positive_gamma(task: str, method: str, arguments: Mapping[str, Any]) -> None:
    if arguments["options"].get("gamma", 1) <= 0:
        raise SeparatorError(f"gamma={arguments['options']['gamma']} is not positive; pass 3.0")


ARGUMENTS = arguments_of_function(pretend)
KIND = Kind(pretend, ("one", "two"), ("slow", "fast"), ARGUMENTS, only_positive_gamma)
KINDS = {"training": KIND}
TEXT = """
tasks = ["one", "two"]
methods = ["slow", "fast"]
seeds = [0, 1]
budget = { epochs = 3 }
settings = { evaluations = ["order"] }
[[grid]]
gamma = [1.0, 3.0]
n_slots = [4, 5]
[[grid]]
gamma = [3.0]
amp_ratio = [2]
"""


def write(path: Path, text: str = TEXT) -> Path:
    path.write_text(text)
    return path


def small(tasks: tuple[str, ...] = ("one", "two"), **settings: Any) -> Experiment:
    budget = {"epochs": 3}
    return Experiment("small", "training", "small", tasks, ("slow", "fast"), (0, 1), budget, settings)


def test_cells_are_the_union_of_the_grids_with_the_whole_budget(tmp_path: Path) -> None:
    experiment = read_experiment(write(tmp_path / "some.toml"), KINDS)
    cells = experiment.cells(KIND)
    assert (experiment.name, experiment.records, len(cells)) == ("some", "some", 2 * 2 * (4 + 1))
    assert {c.task for c in cells} == {"one", "two"}
    assert all(c.budget == {"epochs": 3, "n_train": 5000, "learning_rate": 3e-4} for c in cells)
    first = cells[0]
    assert first.settings == {"evaluations": ["order"], "gamma": 1.0, "n_slots": 4}
    assert call_of(first, KIND) == {
        **first.budget,
        "evaluations": ["order"],
        "n_slots": 4,
        "options": {"gamma": 1.0},
    }
    assert "n_slots" not in cells[1].settings  # 5 is the default: one and the same run


def test_grids_that_meet_make_a_cell_once(tmp_path: Path) -> None:
    text = TEXT.split("[[grid]]")[0] + "[[grid]]\nn_slots = [4, 5]\n"
    text += "[[grid]]\namp_ratio = [2]\nn_slots = [5, 4]\n[[grid]]\nn_slots = [5, 6]\n"
    cells = read_experiment(write(tmp_path / "some.toml", text), KINDS).cells(KIND)
    assert len(cells) == 4 * (2 + 2 + 1)


def test_overrides_replace_what_the_file_says(tmp_path: Path) -> None:
    path = write(tmp_path / "some.toml")
    experiment = read_experiment(path, KINDS, epochs=9, seeds=[7], tasks=["two"], methods=None, n_train=None)
    assert (experiment.seeds, experiment.tasks) == ((7,), ("two",))
    assert experiment.budget == {"epochs": 9}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("tasks =", "task =", "unknown key 'task'; accepted are kind, records, tasks, methods"),
        ('"two"]', '"three"]', "unknown task 'three'; accepted are one, two"),
        ('["slow", "fast"]', '["sloww"]', "unknown method 'sloww'; accepted are slow, fast"),
        ('["slow", "fast"]', "[]", "methods=[] is not a list of names; choose of slow, fast"),
        ('["slow", "fast"]', '"slow"', "methods='slow' is not a list of names"),
        ("[0, 1]", "[]", "seeds=[] are not whole numbers"),
        ("[0, 1]", "[0, -1]", "seeds=[0, -1] are not whole numbers"),
        ("[0, 1]", "[0.5]", "seeds=[0.5] are not whole numbers"),
        ("epochs = 3", "epoch = 3", "unknown budget key 'epoch'; accepted are epochs, n_train"),
        ("epochs = 3", "repeats = 3", "unknown budget key 'repeats'"),
        ("epochs = 3", "epochs = 0", "epochs=0 is not a whole number above 0"),
        ("epochs = 3", "epochs = 2.5", "epochs=2.5 is not a whole number above 0"),
        ("epochs = 3", "epochs = true", "epochs=True is not a whole number above 0"),
        ("epochs = 3", "learning_rate = nan", "learning_rate=nan is not a number above 0"),
        ("epochs = 3", 'learning_rate = "3e-4"', "learning_rate='3e-4' is not a number above 0"),
        ('["order"]', '"order"', "evaluations='order' is not a list of names"),
        ("amp_ratio = [2]", "amp_ratio = [-2]", "amp_ratio=-2 is not a number above 0"),
        ("amp_ratio = [2]", "amp_ratio = 2", "grid amp_ratio=2 is not a list of values; write [2]"),
        ("amp_ratio = [2]", "epochs = [2, 3]", "grid epochs=[2, 3] varies the budget"),
        ("gamma = [1.0, 3.0]", "gamma = [-1.0]", "gamma=-1.0 is not positive; pass 3.0"),
        ("[[grid]]", "[grid]", "some.toml"),
        ("seeds", 'kind = "sorcery"\nseeds', "unknown kind 'sorcery'; accepted are training"),
        ("seeds", 'records = "../../etc"\nseeds', "records='../../etc' is not the name of an experiment"),
        ("tasks = [", "tasks = ", "cannot be read as an experiment"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_that_names_what_is_accepted(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    assert old in TEXT
    with pytest.raises(SeparatorError) as caught:
        read_experiment(write(tmp_path / "some.toml", TEXT.replace(old, new)), KINDS)
    assert said in str(caught.value)
    assert "some.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(SeparatorError, match=r"nowhere.toml cannot be read as an experiment"):
        read_experiment(tmp_path / "nowhere.toml", KINDS)


def test_a_run_records_what_ran_where_and_for_how_long(tmp_path: Path) -> None:
    stream = io.StringIO()
    records = run_experiment(small(gamma=3.0), KIND, tmp_path, threads=1, stream=stream)
    assert len(records) == 8
    assert records == read_records(tmp_path / "small.jsonl")
    one = records[0]
    assert one["budget"] == {"epochs": 3, "n_train": 5000, "learning_rate": 3e-4}
    assert one["settings"] == {"gamma": 3.0}
    assert one["environment"]["threads"] == one["torch_threads"] == 1
    assert set(one["environment"]) == {"torch", "processor", "python", "cores", "threads"}
    assert min(one["seconds"], one["cpu_seconds"]) >= 0
    assert one["seeds_together"] == 2
    assert one["loss"] is None  # NaN is not JSON
    assert "epochs" not in one  # the budget says it
    assert stream.getvalue().splitlines()[-1] == "8 of 8 runs, 100 %, 0 s left"


def test_a_second_run_does_nothing_and_a_third_only_what_is_missing(tmp_path: Path) -> None:
    first = run_experiment(small(), KIND, tmp_path)
    before = (tmp_path / "small.jsonl").stat().st_mtime_ns
    assert run_experiment(small(), KIND, tmp_path) == first
    assert (tmp_path / "small.jsonl").stat().st_mtime_ns == before
    lines = (tmp_path / "small.jsonl").read_text().splitlines()
    (tmp_path / "small.jsonl").write_text("".join(f"{line}\n" for line in lines[:3]))
    stream = io.StringIO()
    again = run_experiment(small(), KIND, tmp_path, stream=stream)
    assert len(again) == 8
    assert stream.getvalue().startswith("records of 3 of 8 runs are there already\n")
    assert sorted(r["seeds_together"] for r in again) == [1, 2, 2, 2, 2, 2, 2, 2]


def test_a_record_of_another_budget_is_said_kept_and_not_used(tmp_path: Path) -> None:
    short = read_experiment(write(tmp_path / "small.toml"), KINDS, epochs=2)
    run_experiment(short, KIND, tmp_path)
    stream = io.StringIO()
    experiment = read_experiment(tmp_path / "small.toml", KINDS)
    records = run_experiment(experiment, KIND, tmp_path, stream=stream)
    said = "40 records of small.jsonl with another budget (epochs 2, not 3): kept, not used"
    assert said in stream.getvalue().splitlines()
    assert {r["budget"]["epochs"] for r in records} == {3}
    assert len(records) == 40
    assert len(read_records(tmp_path / "small.jsonl")) == 80


def test_other_settings_are_other_runs(tmp_path: Path) -> None:
    run_experiment(small(gamma=1.0), KIND, tmp_path)
    cells = small(gamma=3.0).cells(KIND)
    assert missing(cells, read_records(tmp_path / "small.jsonl")) == cells


def test_a_foreign_records_file_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "small.jsonl").write_text("mine\n")
    with pytest.raises(SeparatorError, match="line 1 is not JSON"):
        run_experiment(small(marker=str(tmp_path / "ran")), KIND, tmp_path)
    assert (tmp_path / "small.jsonl").read_text() == "mine\n"
    assert not (tmp_path / "ran").exists()


def test_two_processes_run_cells_side_by_side(tmp_path: Path) -> None:
    records = run_experiment(small(sleep=0.3), KIND, tmp_path, jobs=2)
    pids = {r["pid"] for r in records}
    assert [(r["task"], r["method"], r["seed"]) for r in records] == [
        (task, method, seed) for task in ("one", "two") for method in ("slow", "fast") for seed in (0, 1)
    ]
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert {r["torch_threads"] for r in records} == {1}


def test_what_measures_time_runs_alone(tmp_path: Path) -> None:
    alone = Kind(pretend, KIND.tasks, KIND.methods, ARGUMENTS, alone=True)
    stream = io.StringIO()
    records = run_experiment(small(), alone, tmp_path, jobs=2, scheduler="tcp://nowhere:1", stream=stream)
    assert {r["pid"] for r in records} == {os.getpid()}
    assert stream.getvalue().startswith("training is timed: its cells run here, one at a time\n")


def test_a_killed_process_loses_nothing_but_time(tmp_path: Path) -> None:
    stream = io.StringIO()
    marker = tmp_path / "killed"
    records = run_experiment(small(marker=str(marker)), KIND, tmp_path, jobs=2, stream=stream)
    assert len(records) == 8
    assert int(marker.read_text()) not in {r["pid"] for r in records}
    assert "a worker process died; its cells start again" in stream.getvalue()


def test_processes_that_always_die_end_in_one_line_and_keep_the_records(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = small(("one",), deadly=True)
    add_records(tmp_path / "small.jsonl", [{**deadly.cells(KIND)[0].runs()[0], "score": 1}])
    monkeypatch.setattr(running, "MAX_DEATHS", 2)
    with pytest.raises(SeparatorError, match=r"worker processes died 2 times in a row"):
        run_experiment(deadly, KIND, tmp_path, jobs=2)
    assert len(read_records(tmp_path / "small.jsonl")) == 1


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    ) as cluster:
        cluster.wait_for_workers(2)
        yield cluster


def test_a_cluster_runs_cells_on_both_workers(tmp_path: Path, cluster: Any) -> None:
    records = run_experiment(small(sleep=0.3), KIND, tmp_path, scheduler=cluster.scheduler_address)
    pids = {r["pid"] for r in records}
    assert len(records) == 8
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_killed_cluster_worker_loses_nothing_but_time(tmp_path: Path, cluster: Any) -> None:
    marker = tmp_path / "killed"
    experiment = small(marker=str(marker), sleep=0.1)
    records = run_experiment(experiment, KIND, tmp_path, scheduler=cluster.scheduler_address)
    assert len(records) == 8
    assert int(marker.read_text()) not in {r["pid"] for r in records}


def test_a_cell_that_kills_every_cluster_worker_ends_in_one_line(tmp_path: Path, cluster: Any) -> None:
    with pytest.raises(SeparatorError, match="worker"):
        run_experiment(small(("one",), deadly=True), KIND, tmp_path, scheduler=cluster.scheduler_address)


def test_an_address_where_nobody_answers_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    monkeypatch.setattr("separator.cluster.CONNECT_SECONDS", 1)
    for address in ("tcp://127.0.0.1:9", "nonsense"):
        with pytest.raises(SeparatorError, match=r"no Dask scheduler answers at .*pass its address"):
            run_experiment(small(), KIND, tmp_path, scheduler=address)
    assert not (tmp_path / "small.jsonl").exists()


def test_progress_says_the_share_and_the_time_left() -> None:
    stream = io.StringIO()
    cells = small().cells(KIND)
    progress = Progress(cells, cells[2:], stream)
    progress.last -= 20
    progress.start -= 20
    progress.of(cells[2])(0.5)
    progress.of(cells[2])(0.6)  # too soon for another line
    progress.add(2)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "records of 4 of 8 runs are there already"
    assert lines[1] == "4 of 8 runs, 62 %, 60 s left, now two slow"
    assert lines[2] == "6 of 8 runs, 75 %, 20 s left"
    assert len(lines) == 3


def test_latency_is_the_median_of_the_clock_s_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    warm_up = [9.0] * 2 * latency.WARM_UP  # a forward pass and one with gradients, each time
    ticks = iter(2 * [*warm_up, 1.0, 4.0, 2.0, 6.0, 8.0, 5.0])
    readings = (reading for tick in ticks for reading in (0.0, tick / 1000))
    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: next(readings)))
    options: dict[str, Any] = {"n_tokens": 4, "n_slots": 3, "batch_size": 2}
    timed = measure_latency("random_tokens", "evidence_linear", seeds=[0, 1], repeats=3, **options)
    assert [(r["seed"], r["forward_ms"], r["training_ms"]) for r in timed] == [(0, 2.0, 5.0), (1, 2.0, 5.0)]
    assert next(readings, None) is None


def test_geometry_is_checked() -> None:
    options: dict[str, Any] = {"seeds": [0, 1], "n_tokens": 4, "n_slots": 3}
    checked = check_geometry("random_tokens", "evidence_quadratic", n_inputs=8, **options)
    assert len(checked[0]["checks"]) == 5
    assert all(check["holds"] for r in checked for check in r["checks"].values())
    with pytest.raises(SeparatorError, match="has no slots that start alike"):
        check_geometry("random_tokens", "dspn", n_inputs=8, seeds=[0])


def test_geometry_sees_a_depletion_that_breaks_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    import separator.attention.evidence as evidence

    monkeypatch.setattr(evidence, "deplete", lambda e, share, epsilon: e * (1 + share))
    (record,) = check_geometry("random_tokens", "evidence_linear", seeds=[0], n_inputs=8)
    broken = {name for name, check in record["checks"].items() if not check["holds"]}
    assert broken == {"evidence never grows", "evidence starts at one"}
