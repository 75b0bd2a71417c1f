"""The folder of a run."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from separator.errors import SeparatorError
from separator.run_folder import (
    TrainingState,
    commit,
    has_state,
    keep_best,
    load_best,
    load_state,
    save_state,
)


def state(value: float, step: int = 1) -> TrainingState:
    network, average = nn.Linear(1, 1), nn.Linear(1, 1)
    nn.init.constant_(average.weight, value)
    optimizer = torch.optim.AdamW(network.parameters())
    network(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    return TrainingState(network, average, optimizer, step, processor_seconds=12.5)


def test_only_a_higher_score_replaces_the_best(tmp_path: Path):
    for value, score in ((1.0, 3.0), (2.0, 5.0), (3.0, 4.0)):
        keep_best(state(value, step=int(value)), score, tmp_path)
    network = nn.Linear(1, 1)
    assert load_best(network, tmp_path) == {"step": 2, "score": 5.0}
    assert network.weight.item() == 2.0


def test_a_run_that_was_never_validated_has_no_best(tmp_path: Path):
    with pytest.raises(SeparatorError, match=r"no best\.json"):
        load_best(nn.Linear(1, 1), tmp_path)


def test_a_state_comes_back_with_what_the_run_has_cost(tmp_path: Path):
    saved, fresh = state(1.0, step=7), state(0.0)
    assert not has_state(tmp_path)
    save_state(saved, tmp_path)
    save_state(TrainingState(saved.network, saved.average, saved.optimizer, 8, 13.0), tmp_path)
    assert has_state(tmp_path)
    load_state(fresh, tmp_path)
    assert (fresh.step, fresh.processor_seconds) == (8, 13.0)
    assert torch.equal(fresh.network.weight, saved.network.weight)
    moments = [s.optimizer.state[s.network.weight]["exp_avg"] for s in (saved, fresh)]
    assert torch.equal(*moments)
    assert [path.name for path in tmp_path.glob("state-*")] == ["state-8.safetensors"]


def test_the_commit_is_a_hash_or_nothing():
    found = commit()
    assert found is None or (len(found) == 40 and int(found, 16) >= 0)
    json.dumps(found)
