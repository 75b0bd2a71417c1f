import pytest
import torch

from separator.benchmarks import METHODS, build_model
from separator.errors import SeparatorError

models = pytest.importorskip("evidence_depletion.models")

LEARNED = [name for name, method in METHODS.items() if method.mechanism is not None]
OTHER_SIZES = {"n_params": 5, "N": 64, "d_model": 16, "n_tokens": 8, "n_slots": 3}


def pair(method, **options):
    """Ours and the reference's, built from one seed."""
    torch.manual_seed(0)
    ours = build_model(method, **options)
    torch.manual_seed(0)
    return ours, models.build_model(method, **options)


def test_the_methods_are_the_references_and_its_loss_baselines():
    training = pytest.importorskip("evidence_depletion.training")
    expected = {*models.METHODS, *training.LOSS_BASELINES, "matching_pursuit"}
    assert set(METHODS) == expected
    for name, (mechanism, weights) in training.LOSS_BASELINES.items():
        ours = METHODS[name]
        assert ours.mechanism == mechanism
        assert (ours.weights.diversity, ours.weights.orthogonality) == (weights["w_div"], weights["w_ortho"])


@pytest.mark.parametrize("tokenizer_type", ["fft", "direct"])
@pytest.mark.parametrize("method", models.METHODS)
def test_one_seed_gives_the_references_start_and_outputs(method, tokenizer_type):
    ours, theirs = pair(method, tokenizer_type=tokenizer_type, **OTHER_SIZES)
    expected = theirs.state_dict()
    assert list(ours.state_dict()) == list(expected)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, expected[name]), name
    signals = torch.randn(4, 64)
    torch.manual_seed(1)
    mine = ours.eval()(signals)
    torch.manual_seed(1)
    other = theirs.eval()(signals)
    torch.testing.assert_close(list(mine[:4]), list(other[:4]), atol=1e-5, rtol=0)
    if other[4] is None:
        assert mine.evidence is None
    else:
        torch.testing.assert_close(mine.evidence, other[4], atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", models.METHODS)
def test_state_dicts_load_both_ways(method):
    ours, theirs = pair(method, **OTHER_SIZES)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    theirs.load_state_dict(ours.state_dict(), strict=True)


def test_features_read_once_give_what_signals_give():
    model = build_model("evidence_linear").eval()
    model.slot_attn.start_noise = 0.0
    signals = torch.randn(3, 256)
    torch.testing.assert_close(model.decompose(model.tokenizer.features(signals)), model(signals))


@pytest.mark.parametrize("method", LEARNED)
def test_every_method_that_learns_has_a_model(method):
    prediction = build_model(method, **OTHER_SIZES)(torch.randn(2, 64))
    assert prediction.slots.shape == (2, 3, 16)
    assert prediction.attn.shape == (2, 3, 8)
    assert prediction.exist_logits.shape == (2, 3)
    assert prediction.params.shape == (2, 3, 5)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("vanila", {}, "unknown method 'vanila'; choose one of vanilla, sequential"),
        ("matching_pursuit", {}, "'matching_pursuit' has no model"),
        ("vanilla", {"n_tokens": 7}, "n_tokens=7 does not divide the 256 samples"),
        ("vanilla", {"tokenizer_type": "dct"}, "unknown tokenizer_type='dct'; choose fft or direct"),
        ("vanilla", {"gamma": 3.0}, "gamma"),
    ],
)
def test_what_does_not_fit_is_refused(method, options, words):
    with pytest.raises(SeparatorError, match=words):
        build_model(method, **options)


def test_signals_of_another_length_are_refused():
    with pytest.raises(SeparatorError, match="signals of 128 samples do not fit; the model reads 256"):
        build_model("vanilla")(torch.zeros(1, 128))
