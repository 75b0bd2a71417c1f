import pytest
import torch

from separator.benchmarks import METHODS, train_models
from separator.benchmarks.trainer import Setting

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
