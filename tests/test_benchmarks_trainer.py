import json

import pytest
import torch

from separator.benchmarks import METHODS, TASKS, train_models, train_synthetic
from separator.benchmarks.evaluation import EVALUATIONS, measure
from separator.benchmarks.trainer import Setting
from separator.errors import SeparatorError

LEARNED = [name for name, method in METHODS.items() if method.mechanism is not None]


def small(**changes):
    return {
        "epochs": 2,
        "n_train": 64,
        "n_test": 16,
        "batch_size": 16,
        "n_samples": 64,
        "n_tokens": 8,
        "d_model": 16,
        "n_slots": 4,
        **changes,
    }


@pytest.mark.parametrize("method", LEARNED)
def test_seeds_trained_together_are_what_each_is_alone(method):
    """Steps of Adam from the same start, data and noise: only rounding differs."""
    setting = Setting(**small())
    together = train_models("sinusoids", method, seeds=[0, 7], setting=setting)
    alone = train_models("sinusoids", method, seeds=[0, 7], setting=setting, together=False)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.seed == theirs.seed
        assert ours.final_loss == pytest.approx(theirs.final_loss, rel=1e-4)
        expected = theirs.model.state_dict()
        for name, value in ours.model.state_dict().items():
            torch.testing.assert_close(value, expected[name], atol=2e-4, rtol=0, msg=name)


def test_the_loss_falls_and_the_record_is_plain_json():
    shares = []
    runs = {n: small(epochs=n, seeds=[3, 1], progress=shares.append) for n in (1, 30)}
    first, later = (train_synthetic("gaussian_bumps", "evidence_linear", **run) for run in runs.values())
    for before, after in zip(first, later, strict=True):
        assert after["final_loss"] < 0.8 * before["final_loss"]
    assert [record["seed"] for record in later] == [3, 1]
    assert json.loads(json.dumps(later, allow_nan=False)) == later
    assert shares[0] == shares[-1] == 1 and shares[1:] == sorted(shares[1:])  # one epoch, then thirty
    names = ("center", "amplitude", "width")
    for record in later:
        assert {f"mae_{name}" for name in names} < record.keys()
        assert (record["epochs"], record["n_train"], record["options"]) == (30, 64, {})
        assert "source_recovery" not in record and record["train_seconds"] > 0


def test_a_seed_gives_the_same_record_in_any_company():
    def of(seeds):
        return {r["seed"]: r for r in train_synthetic("sinusoids", "sa_sh", seeds=seeds, **small())}

    alone, among = of([5])[5], of([2, 5, 9])[5]
    for key, value in alone.items():
        if isinstance(value, float) and key != "train_seconds":
            assert among[key] == pytest.approx(value, abs=1e-4), key


def test_a_model_that_diverged_has_no_metrics():
    task, setting = TASKS["sinusoids"], Setting(**small())
    model, test = setting.model(task, "evidence_linear", seed=0), setting.mixtures(task, 16, 0, "test")
    torch.nn.init.constant_(model.tokenizer.proj[0].weight, torch.nan)
    found = measure(model, task, test, seed=0)
    for extra in EVALUATIONS.values():
        found |= extra.measure(model, task, test, 0)
    assert found.keys() > {"peak_overlap", "count_accuracy", "source_recovery"}
    assert set(found.values()) == {None}


def test_training_leaves_the_global_generator_alone():
    state = torch.get_rng_state()
    for method in ("evidence_linear", "dspn"):
        train_synthetic("sinusoids", method, seeds=[0], **small(epochs=1))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("method", ["dspn", "vanilla"])
def test_dynamics_are_measured_as_often_as_asked_and_change_nothing(method):
    (plain,) = train_synthetic("sinusoids", method, seeds=[0], **small(epochs=4))
    (watched,) = train_synthetic("sinusoids", method, seeds=[0], dynamics_every=2, **small(epochs=4))
    assert [point["epoch"] for point in watched["dynamics"]] == [2, 4]
    assert watched["dynamics"][-1]["peak_overlap"] == watched["peak_overlap"] == plain["peak_overlap"]
    assert watched["final_loss"] == plain["final_loss"]


def test_evidence_takes_every_evaluation():
    (record,) = train_synthetic("sinusoids", "evidence_linear", seeds=[0], evaluations=EVALUATIONS, **small())
    for key in (
        "random_order_peak_overlap_mean",
        "greedy_order_peak_overlap",
        "wrong_peak_mae_frequency",
        "uniform_source_recovery",
        "depleted_mass_unmatched",
    ):
        assert record[key] >= 0, key


def test_options_reach_the_mechanism():
    setting = Setting(**small(options={"gamma": 1.0, "tau": 0.5}))
    (trained,) = train_models("sinusoids", "evidence_cubic", seeds=[0], setting=setting)
    assert (trained.model.slot_attn.gamma, trained.model.slot_attn.tau) == (1.0, 0.5)
    assert not trained.model.training


@pytest.mark.parametrize("task", TASKS)
def test_matching_pursuit_finds_clean_loud_sources(task):
    (record,) = train_synthetic(task, "matching_pursuit", seeds=[0], n_test=50, max_sources=1)
    assert record["mae_amplitude"] < 0.3
    centre = "mae_frequency" if "frequency" in TASKS[task].parameter_names else "mae_center"
    assert record[centre] < 0.1
    assert record["count_accuracy"] is None


@pytest.mark.parametrize(
    ("method", "changes", "words"),
    [
        ("evidence_lin", {}, "unknown method 'evidence_lin'; choose one of vanilla"),
        ("vanilla", {"epoch": 3}, "unknown setting epoch; choose of epochs, n_train"),
        ("vanilla", {"epochs": 0}, "epochs=0 is not positive"),
        ("vanilla", {"n_train": 8}, "n_train=8 is less than batch_size=16"),
        ("vanilla", {"evaluations": ["order"]}, "unknown evaluation 'order'; choose of slot_order"),
        ("vanilla", {"evaluations": ["depleted_mass"]}, "which 'depleted_mass' needs"),
        ("vanilla", {"evaluations": ["slot_order"]}, "takes no slot_order"),
        ("vanilla", {"seeds": []}, "not different seeds"),
        ("vanilla", {"seeds": [1, 1]}, "not different seeds"),
        ("vanilla", {"n_tokens": 7}, "n_tokens=7 does not divide the 64 samples"),
        ("matching_pursuit", {"options": {"tau": 1.0}}, "do not apply to 'matching_pursuit'"),
        ("matching_pursuit", {"n_tokens": 7}, "n_tokens=7 does not divide"),
    ],
)
def test_what_does_not_fit_is_refused(method, changes, words):
    with pytest.raises(SeparatorError, match=words):
        train_synthetic("sinusoids", method, **{"seeds": [0], **small(**changes)})
