"""Processes that share a training: the network is the one that a single process trains."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch import nn

from separator.distributed import SharedBatchNorm2d, SharedDraws, World, joined, rows_of
from separator.errors import SeparatorError

TRAIN = Path(__file__).parents[1] / "recipes/fuss/train.py"
RECIPE = """
data = "fuss"
network = { widths = [4, 6, 8, 16], n_context = 1, embedding = 8 }
[training]
learning_rate = 1e-3
bfloat16 = false
warmup_steps = 2
decay_steps = 2
workers = 0
log_every = 1
save_every = 4
validate_every = 100
n_validation = 4
ACCUMULATE
[[stages]]
until = 3
batch_size = 4
n_refine = 0
mixing = { seconds = 0.5 }
[[stages]]
until = STEPS
batch_size = 4
mixing = { seconds = 0.5 }
"""
N_EXAMPLES = 10


def write_fuss(root: Path) -> Path:
    """A FUSS folder of tones: 10 examples to train on, 4 to validate on, of 1 to 3 sources."""
    rng = np.random.default_rng(0)
    t = np.arange(12_000) / 16_000
    for split, n in (("train", N_EXAMPLES), ("validation", 4)):
        for index in range(n):
            folder = root / split / f"example{index:05d}_sources"
            folder.mkdir(parents=True)
            mixture = np.zeros_like(t)
            for k in range(1 + index % 3):
                # the noise keeps bins apart: of many equal ones all would cross a threshold together
                tone = np.sin(2 * np.pi * rng.uniform(100, 6000) * t) * (np.sin(9 * t + k) > 0)
                source = 0.1 * tone + 0.003 * rng.standard_normal(t.shape)
                name = "background0" if k == 0 else f"foreground{k - 1}"
                soundfile.write(folder / f"{name}_sound.wav", source, 16_000)
                mixture += source
            soundfile.write(root / split / f"example{index:05d}.wav", mixture, 16_000)
    return root


def write_recipe(path: Path, steps: int, accumulate: int = 1) -> Path:
    text = RECIPE.replace("STEPS", str(steps)).replace("ACCUMULATE", f"accumulate = {accumulate}")
    path.write_text(text)
    return path


def command(n_processes: int, recipe: Path, data: Path, run: Path, *options: str) -> list[str]:
    """Start training, alone or by torchrun."""
    arguments = [str(TRAIN), str(recipe), "--data", str(data), "--run-folder", str(run), "--device", "cpu"]
    if n_processes == 1:
        return [sys.executable, *arguments]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_processes), *options]
    return [sys.executable, *launcher, *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


def log(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]


def test_two_processes_train_the_network_that_one_trains(tmp_path: Path) -> None:
    data, recipe = write_fuss(tmp_path / "data"), write_recipe(tmp_path / "recipe.toml", 8)
    for n in (1, 2):
        subprocess.run(
            command(n, recipe, data, tmp_path / str(n)), check=True, env=environment(), timeout=240
        )
    one, two = ([line for line in log(tmp_path / str(n)) if "total" in line] for n in (1, 2))
    assert [line["examples"] for line in two] == [4 * step for step in range(1, 9)]
    for a, b in zip(one, two, strict=True):
        # Adam and the choice of slots amplify what rounding leaves: later steps are only near
        tolerance = 1e-4 if a["step"] <= 4 else 0.05
        for term in ("total", "snr", "zero", "guided", "claim", "attention", "existence"):
            assert b[term] == pytest.approx(a[term], rel=tolerance, abs=tolerance), (a["step"], term)
    assert abs(one[0]["total"] - one[-1]["total"]) > 0.1  # the curves are not flat


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the workers are found in /proc")
def test_a_lost_worker_costs_the_steps_since_the_checkpoint_and_no_example(tmp_path: Path) -> None:
    data, recipe = write_fuss(tmp_path / "data"), write_recipe(tmp_path / "recipe.toml", 40)
    run = tmp_path / "run"
    process = subprocess.Popen(
        command(2, recipe, data, run, "--max-restarts", "2"), env=environment(), start_new_session=True
    )
    try:
        deadline = time.monotonic() + 200
        while not (run / "state.json").is_file():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        workers = [int(pid) for pid in children(process.pid)]
        os.kill(workers[-1], signal.SIGKILL)
        assert process.wait(timeout=240) == 0
    finally:
        if process.poll() is None:
            for pid in [*children(process.pid), process.pid]:  # workers have sessions of their own
                os.kill(int(pid), signal.SIGKILL)
    lines = [line for line in log(run) if "total" in line]
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert lines[-1]["examples"] == 4 * 40


def children(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_draws_of_a_part_are_those_of_the_whole() -> None:
    torch.manual_seed(3)
    whole = [torch.randn(4, 2), torch.rand_like(torch.zeros(4, 5)), torch.randn(7)]
    torch.manual_seed(3)
    with SharedDraws(slice(2, 4), 4):
        part = [torch.randn(2, 2), torch.rand_like(torch.zeros(2, 5)), torch.randn(7)]
    assert torch.equal(part[0], whole[0][2:])
    assert torch.equal(part[1], whole[1][2:])
    assert torch.equal(part[2], whole[2])


def test_batch_norm_alone_is_torch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("separator.distributed.total_of", lambda values: values)
    x = torch.randn(6, 3, 4, 5) * 3 + 2
    plain, shared = nn.BatchNorm2d(3), SharedBatchNorm2d(3)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = [norm(i) for norm, i in zip((plain, shared), inputs, strict=True)]
    assert torch.allclose(*outputs, atol=1e-5)
    for output in outputs:
        (output * torch.arange(5)).sum().backward()
    assert torch.allclose(inputs[0].grad, inputs[1].grad, atol=1e-5)
    for name, value in plain.state_dict().items():
        assert torch.allclose(shared.state_dict()[name], value, atol=1e-5), name
    assert torch.allclose(plain.eval()(x), shared.eval()(x), atol=1e-5)


def test_accumulated_passes_see_the_same_mixtures(tmp_path: Path) -> None:
    data = write_fuss(tmp_path / "data")
    for n in (1, 2):
        recipe = write_recipe(tmp_path / f"{n}.toml", 4, accumulate=n)
        subprocess.run(
            command(1, recipe, data, tmp_path / str(n)), check=True, env=environment(), timeout=240
        )
    one, two = ([line for line in log(tmp_path / str(n)) if "total" in line] for n in (1, 2))
    # batch norms see half the batch: close, not equal
    assert two[0]["claim"] == pytest.approx(one[0]["claim"], rel=0.1)
    assert [line["examples"] for line in two] == [line["examples"] for line in one]


def test_what_cannot_be_trained_on_is_one_line_and_leaves_no_run(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe.toml", 8)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(recipe.read_text().replace("widths", "width"))
    for chosen, words in (
        (recipe, "no folder"),
        (wrong, "unknown network setting ['width']"),
        (tmp_path, ""),
    ):
        done = subprocess.run(
            command(1, chosen, tmp_path / "missing", tmp_path / "run"),
            capture_output=True,
            text=True,
            env=environment(),
            check=False,
        )
        assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
        assert done.stderr.startswith("train.py: error: ")
        assert words in done.stderr
    assert not (tmp_path / "run").exists()


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(SeparatorError, match="batch_size=6 does not divide into 4 equal parts"):
        rows_of(6, 0, 4)


def test_alone_there_is_nothing_to_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with joined("cpu") as world:
        assert world == World()
        assert (world.total([1.0]), world.gather([2]), world.is_writer) == ([1.0], [2], True)
    with pytest.raises(SeparatorError, match="unknown device='tpu'"), joined("tpu"):
        pass
