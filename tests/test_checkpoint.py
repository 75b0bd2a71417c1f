import shutil
import tomllib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from separator import checkpoint
from separator.checkpoint import check_model, find_model, load_model, models_dir, save_model
from separator.errors import SeparatorError
from separator.network import NetworkConfig, SeparationNetwork


@pytest.fixture
def model(random_model, tmp_path):
    return shutil.copytree(random_model, tmp_path / "model")


def test_a_saved_network_comes_back_with_the_same_weights_and_answers(random_model, tmp_path):
    network = load_model(random_model)
    save_model(network, tmp_path / "again")
    again = load_model(tmp_path / "again")
    spectrogram = torch.randn(1, 257, 20, dtype=torch.complex64)
    assert again.config == network.config
    for name, tensor in network.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)
    torch.manual_seed(0)
    expected = network(spectrogram).masks
    torch.manual_seed(0)
    torch.testing.assert_close(again(spectrogram).masks, expected, rtol=0, atol=0)


def test_a_loaded_network_is_ready_for_inference(random_model):
    network = load_model(random_model)
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_facts_about_the_training_are_kept_in_the_config(random_model, tmp_path):
    facts = {
        "training": {
            "steps": 7,
            "rate": 1e-3,
            "seeds": [1, 2],
            "data": {"licence": 'CC0 "1.0"', "free": True},
        }
    }
    save_model(load_model(random_model), tmp_path, facts)
    assert check_model(tmp_path)["training"] == facts["training"]


scalars = (
    st.booleans()
    | st.integers(-(2**60), 2**60)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8"))
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(scalars, max_size=3)
        | st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), inner, max_size=3)
    ),
)


@given(table=st.dictionaries(st.text(st.characters(codec="utf-8"), min_size=1), values, max_size=4))
def test_what_is_written_as_toml_reads_back(table):
    assert tomllib.loads("\n".join(checkpoint._toml_lines(table))) == table


def test_a_value_without_a_toml_form_is_refused(random_model, tmp_path):
    with pytest.raises(SeparatorError, match="None has no TOML form"):
        save_model(load_model(random_model), tmp_path, {"seed": None})


def test_weights_are_safetensors_that_hold_every_parameter(random_model):
    expected = SeparationNetwork(NetworkConfig.from_dict(check_model(random_model)["network"])).state_dict()
    assert load_file(random_model / "model.safetensors").keys() == expected.keys()


def test_a_flipped_bit_in_the_weights_is_noticed(model):
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(SeparatorError, match=r"model\.safetensors has sha256 \w+\.\.\., config\.toml says"):
        load_model(model)


def test_half_written_weights_are_not_trusted(model):
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(SeparatorError, match="restore it"):
        load_model(model)


def test_missing_weights_are_named(model):
    (model / "model.safetensors").unlink()
    with pytest.raises(SeparatorError, match=r"model\.safetensors is missing; restore the file"):
        load_model(model)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("sha256 = ", "is no TOML"),
        ("a = 1", r"has keys \['a'\], not sha256 and \[network\]"),
        ("\xff", "is no TOML"),
    ],
)
def test_a_config_that_is_none_is_refused(model, text, complaint):
    (model / "config.toml").write_bytes(text.encode("latin-1"))
    with pytest.raises(SeparatorError, match=complaint):
        load_model(model)


def test_weights_of_another_network_are_refused(model):
    text = (model / "config.toml").read_text()
    (model / "config.toml").write_text(text.replace("embedding = 4", "embedding = 5"))
    with pytest.raises(SeparatorError, match=r"does not fit the network of config\.toml"):
        load_model(model)


def test_an_unknown_setting_is_refused(model):
    text = (model / "config.toml").read_text()
    (model / "config.toml").write_text(text.replace("embedding = 4", "embeding = 4"))
    with pytest.raises(SeparatorError, match="embeding"):
        load_model(model)


def test_an_unknown_model_is_refused_with_the_names_there_are(random_model, monkeypatch):
    monkeypatch.setattr(checkpoint, "models_dir", lambda: random_model.parent)
    with pytest.raises(SeparatorError, match=r"no model 'nope'; shipped models are \['random'\]"):
        find_model("nope")
    assert find_model("random") == random_model


def test_the_shipped_models_lie_in_the_checkout_or_the_wheel():
    assert (models_dir() / "README.md").is_file()
