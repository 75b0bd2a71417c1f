"""The pool's own behaviour is tested with work that is pretended and needs no model; the rest is real."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
from pretended import pretend_to_work

from separator import Separator, jobs
from separator.cli import main
from separator.errors import SeparatorError
from separator.inputs import Input
from separator.jobs import Task, separate_files

# shells start background jobs with SIGINT ignored, and children inherit that
MODULE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from separator.cli import main
sys.exit(main())
"""


@pytest.fixture
def pool(monkeypatch):
    """Run names through a pool of two processes that pretend to work."""
    monkeypatch.setattr(jobs, "_work", pretend_to_work)

    def run(*names, n_jobs=2, progress=lambda index, share: None):
        inputs = [Input(Path(name)) for name in names]
        return separate_files(inputs, Task("", "cpu", {}), n_jobs=n_jobs, progress=progress)

    return run


@pytest.fixture
def folder(tmp_path):
    """Five short files, stereo and mono, of several rates."""
    rng = np.random.default_rng(0)
    for k in range(5):
        samples = rng.normal(0, 0.1, (2000 + 500 * k, 1 + k % 2))
        soundfile.write(tmp_path / f"take {k}.wav", samples, (8000, 16_000, 44_100)[k % 3])
    return tmp_path


def stems(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_outcomes_come_in_the_order_of_the_inputs_from_processes_that_read_no_input(pool):
    names = ["slow 1", "2", "3", "slow 4", "5"]
    told = []
    outcomes = list(pool(*names, progress=lambda index, share: told.append((index, share))))
    assert [str(outcome.input.path) for outcome in outcomes] == names
    assert sorted(told) == [(k, 1.0) for k in range(5)]
    assert len({outcome.warnings[0] for outcome in outcomes} - {str(os.getpid())}) == 2
    assert {outcome.warnings[1] for outcome in outcomes} == {"/dev/null"}


def test_a_process_that_dies_is_an_error_of_its_file_only(pool, tmp_path):
    outcomes = list(pool("slow 1", "dies", "3", "4", "5", str(tmp_path / "dies next to another"), "7"))
    assert [bool(outcome.error) for outcome in outcomes] == [False, True, *[False] * 5]
    assert outcomes[1].error.startswith("dies took its process down (")
    assert "SIGKILL" in outcomes[1].error
    assert len(outcomes[1].error.splitlines()) == 1


def test_a_model_that_cannot_be_loaded_is_one_error_for_all(pool):
    with pytest.raises(SeparatorError, match="no model 'x'"):
        list(pool("has no model", "2", "3"))


def test_leaving_early_stops_the_processes_and_lets_them_clean_up(pool, tmp_path):
    waiting = [tmp_path / "a" / "runs until stopped", tmp_path / "b" / "runs until stopped"]
    for path in waiting:
        path.parent.mkdir()
    outcomes = pool("1", *map(str, waiting), "4")
    pid = int(next(outcomes).warnings[0])
    deadline = time.monotonic() + 200
    while not any(path.exists() for path in waiting) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert any(path.exists() for path in waiting)
    outcomes.close()
    assert not any(path.exists() for path in waiting)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_stems_do_not_depend_on_the_number_of_processes(folder, random_model, capsys):
    common = [str(folder), "--model", str(random_model), "--json"]
    lines = []
    for n_jobs in ("1", "2"):
        output = folder / f"out{n_jobs}"
        assert main([*common, "--jobs", n_jobs, "--output", str(output), "--plot"]) == 0
        lines.append([json.loads(line) for line in capsys.readouterr().out.splitlines()])
    assert [line["input"] for line in lines[0]] == [line["input"] for line in lines[1]]
    assert [line["sources"][0]["level_db"] for line in lines[0]] == [
        line["sources"][0]["level_db"] for line in lines[1]
    ]
    assert len(stems(folder / "out1")) == 5 * 6
    assert stems(folder / "out1") == stems(folder / "out2")


def test_a_command_whose_processes_do_the_work_imports_no_torch_itself(folder, random_model):
    """Its processes would wait for that, a second long."""
    code = "import sys; from separator.cli import main; print(main(), 'torch' in sys.modules)"
    arguments = [str(folder), "--model", str(random_model), "--output", str(folder / "out"), "--quiet"]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments, "--jobs", "2"], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["0", "False"]
    assert len(list(folder.glob("out/*/residual.wav"))) == 5


def test_a_local_cluster_gives_the_same_stems_and_goes_on_after_a_bad_file(
    folder, random_model, capsys, monkeypatch
):
    distributed = pytest.importorskip("distributed")
    monkeypatch.chdir(folder)
    common = [".", "--model", str(random_model), "--json"]
    assert main([*common, "--output", "plain"]) == 0
    capsys.readouterr()
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, dashboard_address=None, memory_limit=0, silence_logs=50
    ) as cluster:
        assert main([*common, "--output", "far", "--scheduler", cluster.scheduler_address]) == 0
        far = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        inputs = [Input(folder / "missing.wav"), Input(folder / "take 1.wav")]
        task = Task(str(random_model), "cpu", {"output_dir": str(folder / "more")})
        missing, good = separate_files(inputs, task, scheduler=cluster.scheduler_address)
        with pytest.raises(SeparatorError, match="no model 'nope'"):
            list(separate_files(inputs, Task("nope", "cpu", {}), scheduler=cluster.scheduler_address))
    assert [line["input"] for line in far] == [str(folder / f"take {k}.wav") for k in range(5)]
    assert stems(folder / "far") == stems(folder / "plain")
    assert "missing.wav does not exist" in missing.error
    assert good.result is not None


def test_a_scheduler_that_does_not_answer_is_one_line_within_seconds(
    folder, random_model, capsys, monkeypatch
):
    pytest.importorskip("distributed")
    monkeypatch.setattr("separator.cluster.CONNECT_SECONDS", 1)
    started = time.monotonic()
    arguments = [str(folder), "--model", str(random_model), "--output", str(folder / "out")]
    assert main([*arguments, "--scheduler", "tcp://127.0.0.1:9"]) == 1
    assert time.monotonic() - started < 25  # Dask itself would wait 30
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert captured.err.startswith("separate: error: no Dask scheduler answers at tcp://127.0.0.1:9 (")


def test_a_missing_extra_is_named(folder, random_model, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    arguments = [str(folder), "--model", str(random_model), "--output", str(folder / "out")]
    assert main([*arguments, "--scheduler", "tcp://127.0.0.1:9"]) == 1
    assert "pip install 'separator[cluster]'" in capsys.readouterr().err


def test_the_overview_does_not_wait_in_memory_with_the_result(folder, random_model):
    task = Task(str(random_model), "cpu", {"output_dir": str(folder / "out")})
    (outcome,) = separate_files([Input(folder / "take 0.wav")], task)
    assert outcome.result.overview.mixture.size == 0
    assert outcome.seconds > 0


def test_the_model_is_loaded_once_for_all_files(folder, random_model, monkeypatch):
    loads = []
    real = Separator.load
    monkeypatch.setattr(Separator, "load", lambda *arguments: loads.append(arguments) or real(*arguments))
    task = Task(str(random_model), "cpu", {"output_dir": str(folder / "out")})
    inputs = [Input(folder / f"take {k}.wav") for k in range(3)]
    assert [outcome.error for outcome in separate_files(inputs, task)] == ["", "", ""]
    assert len(loads) == 1


@pytest.mark.parametrize(("number", "status", "n_jobs"), [(signal.SIGINT, 130, 2), (signal.SIGTERM, 143, 1)])
def test_a_signal_stops_all_and_leaves_no_file(tmp_path, random_model, number, status, n_jobs):
    """Five minutes of sound a file: none can be complete before the signal comes."""
    for name in ("a.wav", "b.wav", "c.wav"):
        soundfile.write(tmp_path / name, np.random.default_rng(0).normal(0, 0.1, 8000 * 300), 8000)
    output = tmp_path / "out"
    command = [sys.executable, "-c", MODULE, str(tmp_path), "--model", str(random_model)]
    process = subprocess.Popen(
        [*command, "--jobs", str(n_jobs), "--output", str(output)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while not list(output.glob("**/*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list(output.glob("**/*"))
    os.killpg(process.pid, number)
    out, err = process.communicate(timeout=200)
    assert process.returncode == status
    assert out == ""
    assert err.splitlines() == ["separate: error: interrupted; what was not finished has left no stems"] * (
        number == signal.SIGINT
    )
    assert [path for path in output.rglob("*") if path.is_file()] == []
