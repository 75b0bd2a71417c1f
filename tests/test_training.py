"""The trainer: it learns, and a run that was interrupted ends where an uninterrupted one does."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_datasets import write_bank
from torch import nn

from separator.calibration import (
    CalibrationConfig,
    SlotSet,
    best_threshold,
    calibrate,
    collect_slots,
    fit_head,
    probabilities,
)
from separator.checkpoint import check_model, save_model
from separator.counting import CounterConfig, SourceCounter
from separator.datasets import MixtureDataset
from separator.errors import SeparatorError
from separator.network import NetworkConfig, SeparationNetwork
from separator.objectives import WaveformObjective
from separator.peers import ConvTasNetConfig
from separator.run_folder import load_state
from separator.stft import STFT
from separator.training import Trainee, mean_weights, new_state, train, validate
from separator.training_recipe import TrainingConfig, learning_rate_factor, read_recipe

RECIPE: dict[str, Any] = {
    "network": {"widths": [4, 6, 8, 16], "n_context": 1, "embedding": 8},
    "training": {
        "warmup_steps": 2,
        "decay_steps": 2,
        "log_every": 2,
        "save_every": 3,
        "validate_every": 100,
        "n_validation": 2,
        "workers": 0,
    },
    "stages": [
        {"until": 4, "batch_size": 2, "mixing": {"seconds": 0.5, "counts": [0.0, 1.0], "scene_share": 0.0}},
        {"until": 6, "batch_size": 1, "mixing": {"seconds": 1.0, "counts": [0.5, 0.5]}},
    ],
}


class Killed(Exception):
    """Stands for a kill in the middle of a run."""


def read_log(run: Path) -> list[str]:
    return (run / "log.jsonl").read_text().splitlines()


def test_killed_and_resumed_run_ends_with_the_same_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = write_bank(tmp_path)
    config = TrainingConfig.from_dict(RECIPE)
    whole = train(config, bank, tmp_path / "whole").state_dict()

    step = Trainee.step

    def step_until_killed(self: Trainee, *arguments: Any) -> Any:
        if self._state.step == 5:
            raise Killed
        return step(self, *arguments)

    monkeypatch.setattr(Trainee, "step", step_until_killed)
    with pytest.raises(Killed):
        train(config, bank, tmp_path / "resumed")
    monkeypatch.undo()
    assert json.loads((tmp_path / "resumed/state.json").read_text())["step"] == 3
    resumed = train(config, bank, tmp_path / "resumed").state_dict()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    steps = [[json.loads(line)["step"] for line in read_log(tmp_path / run)] for run in ("whole", "resumed")]
    assert steps[0] == steps[1]


def test_run_folder_tells_what_was_run(tmp_path: Path) -> None:
    train(TrainingConfig.from_dict(RECIPE), write_bank(tmp_path), tmp_path / "run")
    config = json.loads((tmp_path / "run/config.json").read_text())
    assert config["network"]["embedding"] == 8
    assert config["environment"]["torch"] == torch.__version__
    lines = [json.loads(line) for line in read_log(tmp_path / "run")]
    assert [line["step"] for line in lines if "snr" in line] == [2, 4, 6]
    assert "validation" in lines[-1]
    assert len(list((tmp_path / "run").glob("state-*.safetensors"))) == 1


def test_loss_falls_on_two_tones(tmp_path: Path) -> None:
    recipe = {
        **RECIPE,
        "training": {**RECIPE["training"], "learning_rate": 3e-3, "log_every": 10, "bfloat16": False},
        "stages": [
            {
                "until": 60,
                "batch_size": 4,
                "mixing": {"seconds": 0.5, "counts": [0.0, 1.0], "scene_share": 0.0, "reverberant": 0.0},
            }
        ],
    }
    train(TrainingConfig.from_dict(recipe), write_bank(tmp_path), tmp_path / "run")
    lines = [json.loads(line) for line in read_log(tmp_path / "run")]
    guided = [line["guided"] for line in lines if "guided" in line]
    assert guided[-1] < guided[0] - 2


def test_learning_rate_warms_up_and_decays_to_nothing() -> None:
    config = dataclasses.replace(TrainingConfig.from_dict(RECIPE), warmup_steps=3, decay_steps=2)
    assert [learning_rate_factor(s, config) for s in range(6)] == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 0.5])


def test_a_budget_of_minutes_ends_the_run_at_a_rate_of_nothing(tmp_path: Path) -> None:
    config = dataclasses.replace(
        TrainingConfig.from_dict(RECIPE), warmup_steps=1, minutes=60.0, decay_minutes=20.0
    )
    assert [learning_rate_factor(5, config, m) for m in (0, 40, 50, 60, 61)] == [1, 1, 0.5, 0, 0]
    recipe = {
        **RECIPE,
        "training": {**RECIPE["training"], "minutes": 1e-4, "log_every": 1},
        "stages": [{**RECIPE["stages"][0], "until": 100}],
    }
    bank = write_bank(tmp_path)
    ended = train(TrainingConfig.from_dict(recipe), bank, tmp_path / "run").state_dict()
    lines = [json.loads(line) for line in read_log(tmp_path / "run")]
    assert lines[-2]["step"] < 100
    assert lines[-2]["processor_minutes"] >= 1e-4
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert best == {"step": lines[-1]["step"], "score": lines[-1]["validation"]["snr"]}
    again = train(TrainingConfig.from_dict(recipe), bank, tmp_path / "run").state_dict()
    assert all(torch.equal(ended[name], again[name]) for name in ended)
    assert len(read_log(tmp_path / "run")) == len(lines)


def test_recipe_without_stages_or_with_a_misspelt_setting_is_refused() -> None:
    with pytest.raises(SeparatorError, match=r"no list of \[\[stages\]\]"):
        TrainingConfig.from_dict({"network": {}})
    with pytest.raises(SeparatorError, match=r"unknown training setting \['learning_rat'\]"):
        TrainingConfig.from_dict({**RECIPE, "training": {"learning_rat": 1.0}})


@pytest.mark.parametrize("wrong", [{"n_refin": 1}, {"mixing": {"second": 1.0}}, {"loss": {"zero": 1.0}}])
def test_misspelt_setting_of_a_stage_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(SeparatorError, match=r"unknown (stage|mixing|loss) setting"):
        TrainingConfig.from_dict({**RECIPE, "stages": [{"until": 1, "batch_size": 1, **wrong}]})


def test_a_stage_without_its_end_is_refused() -> None:
    with pytest.raises(SeparatorError, match=r"missing stage setting \['until'\]"):
        TrainingConfig.from_dict({**RECIPE, "stages": [{"batch_size": 1}]})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"trainig": {}}, r"unknown recipe setting \['trainig'\]"),
        ({"stages": {"until": 4, "batch_size": 2}}, r"no list of \[\[stages\]\]"),
        ({"training": 3}, "training is 3, not a table"),
        ({"network": 3}, "network is 3, not a table"),
        ({"data": ["fuss"]}, "unknown data"),
        ({"training": {"minutes": "60"}}, "minutes = '60'; pass 1e-06 or more"),
        ({"training": {"log_every": 0}}, "log_every = 0; pass 1 or more"),
        ({"training": {"averaging": 5.0}}, "averaging = 5.0; pass from 0 to 1"),
        ({"network": {"widths": [4, 6, 8]}}, r"widths = \[4, 6, 8\]; pass 4 of them"),
        ({"network": {"widths": ["4", 6, 8, 16]}}, "widths = .* pass 1 or more"),
        ({"network": {"n_bands": 1000}}, "pass a multiple of 8 up to the 257 bins"),
        ({"network": {"n_slots": 1}}, "mixtures of up to 2 sources, but n_slots=1"),
        ({"network": {"counter": {}}}, "a counter is trained by a recipe of its own"),
        ({"network": {"sample_rate": 8000}}, "sample_rate = 8000; the mixtures have 16000"),
    ],
)
def test_a_recipe_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SeparatorError, match=said):
        TrainingConfig.from_dict({**RECIPE, **wrong})


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"until": "4"}, "until = '4'; pass 1 or more"),
        ({"until": 5.5}, "until = 5.5 is no whole number"),
        ({"until": 0}, "until = 0; pass 1 or more"),
        ({"batch_size": -4}, "batch_size = -4; pass 1 or more"),
        ({"n_refine": "a"}, "n_refine = 'a'"),
        ({"mixing": 3}, "mixing is 3, not a table"),
        ({"mixing": {"seconds": -1.0}}, "seconds = -1.0; pass 0.1 or more"),
        ({"mixing": {"counts": [0.5, 0.2]}}, r"counts = \[0.5, 0.2\] do not sum to one"),
        ({"mixing": {"seconds": 2.0, "shortest_seconds": 3.0}}, "shortest_seconds = 3.0; pass at most"),
        ({"loss": {"zero_weight": -1.0}}, "zero_weight = -1.0; pass 0 or more"),
    ],
)
def test_a_stage_that_cannot_be_is_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(SeparatorError, match=said):
        TrainingConfig.from_dict({**RECIPE, "stages": [{"until": 4, "batch_size": 2, **wrong}]})


def test_stages_that_do_not_follow_each_other_are_refused() -> None:
    with pytest.raises(SeparatorError, match=r"stages end at steps \[6, 4\]"):
        TrainingConfig.from_dict({**RECIPE, "stages": RECIPE["stages"][::-1]})


def test_the_run_folder_tells_what_was_run_before_with_other_settings(tmp_path: Path) -> None:
    bank = write_bank(tmp_path)
    train(TrainingConfig.from_dict(RECIPE), bank, tmp_path / "run")
    train(TrainingConfig.from_dict(RECIPE), bank, tmp_path / "run")
    told = json.loads((tmp_path / "run/config.json").read_text())
    assert "earlier" not in told
    longer = {**RECIPE, "stages": [*RECIPE["stages"], {**RECIPE["stages"][1], "until": 8}]}
    train(TrainingConfig.from_dict(longer), bank, tmp_path / "run")
    now = json.loads((tmp_path / "run/config.json").read_text())
    assert now["stages"][-1]["until"] == 8
    assert now["earlier"] == [{**told, "until_step": 6}]


@pytest.mark.parametrize("workers", [0, 1])
def test_what_is_wrong_with_the_data_is_said_alike_by_all_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    def refuse(*_: Any) -> None:
        raise SeparatorError("clip 7 is broken; prepare it again")

    config = TrainingConfig.from_dict({**RECIPE, "training": {**RECIPE["training"], "workers": workers}})
    monkeypatch.setattr(MixtureDataset, "__getitem__", refuse)
    with pytest.raises(SeparatorError, match=r"^clip 7 is broken; prepare it again$"):
        train(config, write_bank(tmp_path), tmp_path / "run")


def test_training_says_how_far_it_is(tmp_path: Path) -> None:
    said: list[str] = []
    train(TrainingConfig.from_dict(RECIPE), write_bank(tmp_path), tmp_path / "run", say=said.append)
    assert said[0] == f"{tmp_path / 'run'}: from step 0"
    assert [line.split(",")[0] for line in said[1:-1]] == ["step 2 of 6", "step 4 of 6", "step 6 of 6"]
    assert said[-1].startswith("validation {'count': ")


def test_a_broken_state_is_refused_by_name(tmp_path: Path) -> None:
    bank = write_bank(tmp_path)
    train(TrainingConfig.from_dict(RECIPE), bank, tmp_path / "run")
    (tmp_path / "run/state-6.safetensors").write_bytes(b"half")
    with pytest.raises(SeparatorError, match=r"state-6\.safetensors cannot be read"):
        train(TrainingConfig.from_dict(RECIPE), bank, tmp_path / "run")


def test_a_setting_of_another_type_is_refused() -> None:
    with pytest.raises(SeparatorError, match=r"training setting seed = 'zero' is of another type than 0"):
        TrainingConfig.from_dict({**RECIPE, "training": {"seed": "zero"}})


@pytest.mark.parametrize("text", ["[training\n", "\x80"])
def test_what_is_no_recipe_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SeparatorError, match=r"broken\.toml cannot be read as a recipe"):
        read_recipe(path)
    with pytest.raises(SeparatorError, match=r"nowhere\.toml cannot be read as a recipe"):
        read_recipe(tmp_path / "nowhere.toml")


def test_mechanism_replaces_the_recipe_s_and_joins_its_name(tmp_path: Path) -> None:
    (tmp_path / "small.toml").write_text('[network]\nembedding = 8\nmechanism = "vanilla"\n')
    assert read_recipe(tmp_path / "small.toml")[0] == "small"
    name, recipe = read_recipe(tmp_path / "small.toml", "sequential")
    assert (name, recipe["network"]) == ("small_sequential", {"embedding": 8, "mechanism": "sequential"})


def test_state_of_another_network_is_not_taken(tmp_path: Path) -> None:
    train(TrainingConfig.from_dict(RECIPE), write_bank(tmp_path), tmp_path / "run")
    other = {**RECIPE, "network": {**RECIPE["network"], "embedding": 4}}
    with pytest.raises(SeparatorError, match="size mismatch"):
        load_state(new_state(TrainingConfig.from_dict(other)), tmp_path / "run")


def test_a_run_starts_from_the_weights_of_a_model(tmp_path: Path) -> None:
    still = {**RECIPE, "training": {**RECIPE["training"], "learning_rate": 0.0}}
    config = TrainingConfig.from_dict(still)
    torch.manual_seed(7)
    model = SeparationNetwork(config.network)
    save_model(model, tmp_path / "model")
    bank = write_bank(tmp_path)
    trained = train(config, bank, tmp_path / "run", start_from=tmp_path / "model")
    given = dict(model.named_parameters())
    assert all(torch.equal(given[name], value) for name, value in trained.named_parameters())
    told = json.loads((tmp_path / "run/config.json").read_text())["start"]
    assert told == check_model(tmp_path / "model")["sha256"]


def test_a_model_of_another_network_is_no_start(tmp_path: Path) -> None:
    other = NetworkConfig.from_dict({**RECIPE["network"], "embedding": 4})
    save_model(SeparationNetwork(other), tmp_path / "model")
    with pytest.raises(SeparatorError, match=r"model are not of the recipe's network \(size mismatch"):
        train(
            TrainingConfig.from_dict(RECIPE), write_bank(tmp_path), tmp_path / "run", None, tmp_path / "model"
        )
    assert not (tmp_path / "run").exists()


COUNTER: dict[str, Any] = {
    **RECIPE,
    "network": {"kind": "counter", "widths": [4, 4, 6, 8], "joined": 8, "hidden": 4},
}


def test_a_counter_is_trained_by_the_same_trainer(tmp_path: Path) -> None:
    counter = train(TrainingConfig.from_dict(COUNTER), write_bank(tmp_path), tmp_path / "run")
    assert isinstance(counter, SourceCounter)
    lines = [json.loads(line) for line in read_log(tmp_path / "run")]
    assert {"total", "counted", "active"} < set(lines[0])
    assert set(lines[-1]["validation"]) == {"count", "likelihood"}
    best = json.loads((tmp_path / "run/best.json").read_text())
    assert best["score"] == lines[-1]["validation"]["likelihood"]


@pytest.mark.parametrize("idle", [{"loss": {"zero_weight": 0.2}}, {"n_refine": 1}])
def test_settings_that_do_nothing_for_a_counter_are_refused(idle: dict[str, Any]) -> None:
    stages = [{"until": 4, "batch_size": 2, **idle}]
    with pytest.raises(SeparatorError, match="loss and n_refine do nothing for a counter"):
        TrainingConfig.from_dict({**COUNTER, "stages": stages})


def test_a_run_starts_from_the_part_of_a_model_that_it_trains(tmp_path: Path) -> None:
    still = {"training": {**RECIPE["training"], "learning_rate": 0.0}}
    counter_config = TrainingConfig.from_dict({**COUNTER, **still})
    config = TrainingConfig.from_dict({**RECIPE, **still})
    torch.manual_seed(7)
    model = SeparationNetwork(dataclasses.replace(config.network, counter=counter_config.network))
    save_model(model, tmp_path / "model")
    bank = write_bank(tmp_path)
    given = dict(model.named_parameters())
    for name, one, prefix in (("whole", config, ""), ("counter", counter_config, "counter.")):
        trained = train(one, bank, tmp_path / name, start_from=tmp_path / "model")
        assert all(torch.equal(given[prefix + n], value) for n, value in trained.named_parameters())


def test_a_model_without_a_counter_is_no_start_for_one(tmp_path: Path) -> None:
    save_model(SeparationNetwork(TrainingConfig.from_dict(RECIPE).network), tmp_path / "model")
    with pytest.raises(SeparatorError, match="model are not of the recipe's network"):
        config = TrainingConfig.from_dict(COUNTER)
        train(config, write_bank(tmp_path), tmp_path / "run", start_from=tmp_path / "model")


def test_the_threshold_is_that_of_the_slots_as_the_network_gives_them() -> None:
    torch.manual_seed(0)
    counter = CounterConfig(widths=(4, 4, 6, 8), joined=8, hidden=4)
    network = SeparationNetwork(
        dataclasses.replace(TrainingConfig.from_dict(RECIPE).network, counter=counter)
    ).eval()
    mixtures = [torch.randn(2, 16_000) for _ in range(3)]
    found = probabilities(network.existence, collect_slots(network, mixtures))
    stft = STFT(network.config.n_fft, network.config.hop_length)
    for index, sources in enumerate(mixtures):
        torch.manual_seed(index)
        with torch.no_grad():
            out = network(stft(sources.sum(0))[None])
        assert torch.allclose(torch.sigmoid(out.existence_logits[0]), found[index], atol=1e-4)


class Planted(nn.Module):
    """Whatever the mixture, these estimates [S, time]."""

    def __init__(self, estimates: torch.Tensor) -> None:
        super().__init__()
        self.estimates = estimates

    def forward(self, mixture: torch.Tensor) -> torch.Tensor:
        return self.estimates[None]


def test_validation_is_not_won_by_slots_of_noise() -> None:
    """Of a buried source any noise is a gain in SI-SDR; of SNR it is a loss, and silence costs nothing."""
    generator = torch.Generator().manual_seed(0)
    loud, quiet, noise = torch.randn(3, 8000, generator=generator)
    sources = torch.stack([loud, 1e-3 * quiet])
    silence = torch.zeros(8000)
    objective = WaveformObjective(ConvTasNetConfig())
    found = {
        name: validate(objective, Planted(torch.stack([loud, second])), [sources, sources[:1]])
        for name, second in {"noise": noise, "silence": silence, "truth": sources[1]}.items()
    }
    assert found["noise"]["si_sdri_2"] > 20
    assert found["truth"]["snr"] == pytest.approx(30.0, abs=0.01)
    assert found["silence"]["snr"] == pytest.approx(15.0, abs=0.01)  # of the loud one's 30
    assert found["noise"]["snr"] < -10


def test_mean_weights_lie_between_and_counters_are_the_last_one_s() -> None:
    states = [
        {"w": torch.tensor([0.0, 4.0]), "n": torch.tensor(1)},
        {"w": torch.ones(2), "n": torch.tensor(3)},
    ]
    mean = mean_weights(states)
    assert mean["w"].tolist() == [0.5, 2.5]
    assert mean["n"].item() == 3


def planted(n: int) -> SlotSet:
    """Slots of which the third fact says whether they exist."""
    generator = torch.Generator().manual_seed(0)
    exists = (torch.rand(n, 4, generator=generator) < 0.5).float()
    facts = torch.randn(n, 4, 9, generator=generator)
    facts[..., :2] = -torch.rand(n, 4, 2, generator=generator)
    facts[..., 2] = 4 * exists - 2
    return SlotSet(facts, exists, torch.ones(n, 4), torch.ones(n, 4))


def test_heads_count_what_slots_show_and_miss_no_more_than_allowed() -> None:
    data = planted(300)
    probability = probabilities(fit_head(data, CalibrationConfig(epochs=10)), data)
    threshold, accuracy = best_threshold(probability, data.exists, 0.9)
    assert accuracy > 0.95
    assert 0.1 <= threshold <= 0.9


def test_threshold_gives_up_counts_for_recall() -> None:
    exists = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0], [1.0, 0.0]])
    probability = torch.tensor([[0.9, 0.4], [0.9, 0.4], [0.9, 0.3], [0.9, 0.0]])
    assert best_threshold(probability, exists, 0.5)[1] == 0.75  # the weak source is missed
    threshold, accuracy = best_threshold(probability, exists, 1.0)
    assert threshold <= 0.3
    assert accuracy == 0.5


def test_slots_that_decoding_did_not_reach_are_never_counted() -> None:
    data = planted(100)
    untried = data._replace(tried=torch.zeros(100, 4))
    assert probabilities(fit_head(data, CalibrationConfig(epochs=2)), untried).max() == 0


@pytest.mark.parametrize("counter", [None, CounterConfig(widths=(4, 4, 6, 8), joined=8, hidden=4)])
def test_calibration_changes_the_head_alone(counter: CounterConfig | None) -> None:
    rng = torch.Generator().manual_seed(0)
    mixtures = [torch.randn(1 + k % 3, 16_000, generator=rng) for k in range(8)]
    network = SeparationNetwork(
        dataclasses.replace(TrainingConfig.from_dict(RECIPE).network, counter=counter)
    )
    before = {name: value.clone() for name, value in network.state_dict().items()}
    settings = CalibrationConfig(epochs=2)
    config, accuracy = calibrate(network, mixtures, mixtures[:4], settings)
    after = network.state_dict()
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed
    assert all(name.startswith("existence.") for name in changed)
    assert 0 <= accuracy <= 1
    assert config == dataclasses.replace(network.config, min_existence=config.min_existence)
