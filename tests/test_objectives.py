"""What networks are trained on and judged by."""

import pytest
import torch

from separator.counting import CounterConfig
from separator.errors import SeparatorError
from separator.losses import LossConfig, Whole, waveform_loss
from separator.network import NetworkConfig
from separator.objectives import (
    CountObjective,
    MaskObjective,
    WaveformObjective,
    network_config,
    objective_of,
)
from separator.peers import ConvTasNet, ConvTasNetConfig, called_by_level, n_parameters

SMALL = ConvTasNetConfig(enc_num_feats=16, msk_num_feats=8, msk_num_hidden_feats=8, msk_num_layers=2)
TINY = NetworkConfig(widths=(4, 6, 8, 16), n_context=1, embedding=8)


def tones(n_batch: int = 2, time: int = 8000) -> torch.Tensor:
    """Sources [n_batch, 2, time]."""
    t = torch.arange(time) / 16_000
    rates = torch.tensor([[440.0, 1730.0], [600.0, 3000.0]])[:n_batch]
    return 0.1 * torch.sin(2 * torch.pi * rates[..., None] * t)


def batch() -> dict[str, torch.Tensor]:
    sources = tones()
    return {
        "mixture": sources.sum(1),
        "sources": sources,
        "active": torch.ones(2, 2, dtype=torch.bool),
    }


def test_true_sources_in_any_order_cost_least():
    sources = tones()
    active = torch.ones(2, 2, dtype=torch.bool)
    silent = torch.zeros(2, 1, 8000)
    config = LossConfig(snr_limit_db=30.0, zero_weight=0.1, silence_limit_db=20.0)
    perfect = waveform_loss(torch.cat([silent, sources.flip(1)], 1), sources.sum(1), sources, active, config)
    assert float(perfect.snr) == pytest.approx(-30.0, abs=1e-3)
    assert float(perfect.zero) == pytest.approx(-20.0, abs=1e-3)
    # per source: -30 dB, and half a silent slot that weighs a tenth
    assert float(perfect.total) == pytest.approx(-30 - 0.1 * 20 / 2, abs=1e-2)


def test_parts_of_a_batch_add_up_to_its_loss():
    torch.manual_seed(0)
    sources, estimates = tones(), torch.randn(2, 3, 8000)
    active = torch.tensor([[True, True], [True, False]])
    sources = sources * active[..., None]
    arguments = (estimates, sources.sum(1), sources, active)
    whole = waveform_loss(*arguments, LossConfig())
    parts = [waveform_loss(*(x[i : i + 1] for x in arguments), LossConfig(), Whole(2, 3)) for i in range(2)]
    for name, value in whole._asdict().items():
        assert float(sum(part._asdict()[name] for part in parts)) == pytest.approx(float(value), rel=1e-5)


@pytest.mark.parametrize("config", [TINY, SMALL], ids=["separator", "conv_tasnet"])
def test_a_network_of_either_kind_learns(config):
    torch.manual_seed(0)
    objective = objective_of(config)
    network = objective.build()
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(25):
        terms = objective.loss(network, batch(), LossConfig(), Whole.of(batch()["active"]), None)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
        losses.append(float(terms.total.detach()))
    assert sum(losses[-5:]) / 5 < sum(losses[:5]) / 5 - 0.5
    with torch.no_grad():
        quality = objective.quality(network.eval(), tones()[0])
    assert quality.si_sdr.shape[1] == 2
    assert quality.before.abs().max() < 0.5  # equally loud, orthogonal
    assert 0 <= quality.n_called <= 4


def test_a_counter_learns_to_tell_one_tone_from_two():
    torch.manual_seed(0)
    sources = torch.cat([tones(), tones() * torch.tensor([1.0, 0.0])[:, None]])
    active = torch.tensor([[True, True], [True, True], [True, False], [True, False]])
    data = {"mixture": sources.sum(1), "sources": sources, "active": active}
    objective = CountObjective(CounterConfig(widths=(4, 4, 6, 8), joined=8, hidden=4))
    network = objective.build()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
    for _ in range(60):
        terms = objective.loss(network, data, LossConfig(), Whole.of(active), None)
        optimizer.zero_grad()
        terms.total.backward()
        optimizer.step()
    with torch.no_grad():
        scores = [objective.scores(network.eval(), values) for values in (sources[0], sources[2, :1])]
    assert [score["count"] for score in scores] == [[1.0], [1.0]]
    assert min(score["likelihood"][0] for score in scores) > -0.5


def test_estimates_of_conv_tasnet_add_up_at_any_level():
    torch.manual_seed(0)
    network = ConvTasNet(SMALL).eval()
    mixture = tones().sum(1)
    with torch.no_grad():
        estimates, quiet = network(mixture), network(1e-3 * mixture)
    assert estimates.shape == (2, 4, 8000)
    assert torch.allclose(estimates.sum(1), mixture, atol=1e-6)
    assert torch.allclose(quiet, 1e-3 * estimates, atol=1e-7)
    assert n_parameters(network) > 1000


def test_estimates_below_the_floor_are_not_called():
    mixture = tones()[0].sum(0)
    estimates = torch.stack([mixture, 0.1 * mixture, 0.01 * mixture, 0 * mixture])
    assert called_by_level(estimates, mixture, -30.0).tolist() == [True, True, False, False]


def test_kinds_of_networks_go_by_name():
    assert isinstance(objective_of(network_config({"embedding": 8})), MaskObjective)
    assert isinstance(objective_of(network_config({"kind": "conv_tasnet"})), WaveformObjective)
    assert isinstance(objective_of(network_config({"kind": "counter"})), CountObjective)
    with pytest.raises(SeparatorError, match="choose separator, counter or conv_tasnet"):
        network_config({"kind": "unet"})
    with pytest.raises(SeparatorError, match=r"unknown network setting \['layers'\]"):
        network_config({"kind": "conv_tasnet", "layers": 3})
