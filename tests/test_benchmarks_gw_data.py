"""Galactic binaries: they are the package's, they add up, noise and ratios are what their formulas say."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from separator.benchmarks import gw_data
from separator.benchmarks.gw_data import (
    Bank,
    GalacticMixtures,
    Population,
    draw_mixtures,
    in_order,
    load_bank,
)
from separator.benchmarks.gw_waveforms import (
    ARM,
    PARAMETERS,
    SPEED_OF_LIGHT,
    YEAR,
    Band,
    amplitude_basis,
    draw_binaries,
    noise_psd,
    snr,
    waveforms,
    whiten,
)
from separator.errors import SeparatorError

pytest.importorskip("binary_galactica")
SAMPLE = Path(__file__).parents[1] / "data/gravitational_waves/sample.npz"
POPULATION = Population(Band(n_bins=128))


@pytest.fixture(scope="module")
def sample() -> Bank:
    return in_order(gw_data.read_part(SAMPLE))


@pytest.fixture(scope="module")
def mixtures(sample: Bank) -> GalacticMixtures:
    return draw_mixtures(sample, POPULATION, 200, torch.Generator().manual_seed(0))


def of_package(params: np.ndarray, band: Band) -> np.ndarray:
    """One binary by the package's physical interface, over the square root of the noise."""
    import binary_galactica as package
    import jax

    p = dict(zip(PARAMETERS, params.tolist(), strict=True))
    with jax.enable_x64(True):
        wave = package.tdi_waveform(
            package.GBParams(
                amp=math.exp(p["log_amplitude"]),
                f0=(band.first_bin + p["frequency"]) / YEAR,
                fdot=p["drift"] / YEAR**2,
                phi0=p["phase"],
                iota=math.acos(p["cos_inclination"]),
                psi=p["polarisation"],
                lam=p["longitude"],
                beta=math.asin(p["sin_latitude"]),
            ),
            T=YEAR,
            BW=4 * band.n_bins,
        )
        bins = np.asarray(wave["freq_bin_indices"]) - band.first_bin
        channels = np.stack([wave["A"], wave["E"]])
    inside = (bins >= 0) & (bins < band.n_bins)
    assert inside.sum() == band.n_bins
    return 2 * channels[:, inside] / np.sqrt(band.noise())  # the package's unit is sqrt(T)


def test_one_binary_is_the_package_s(mixtures: GalacticMixtures) -> None:
    for b in range(10):
        expected = of_package(mixtures.params[b, 0].double().numpy(), POPULATION.band)
        # float32 keeps a frequency of 100 bins to 1e-5 and a phase to 1e-6: compare without that first
        exact = waveforms(mixtures.params[b, :1].double().numpy(), POPULATION.band)[0]
        assert np.abs(exact - expected).max() < 1e-6 * np.abs(expected).max()
        found = mixtures.components[b, 0].numpy()
        assert np.abs(found - expected).max() < 1e-4 * np.abs(expected).max()


def test_bank_keeps_the_package_s_waveforms_to_single_precision() -> None:
    whitened, params = gw_data.make_part(POPULATION.band, 8, (3,))
    for row, found in zip(params, whitened, strict=True):
        expected = of_package(row, POPULATION.band)
        assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()


def test_many_binaries_add_up(mixtures: GalacticMixtures) -> None:
    noise = mixtures.data - mixtures.components.sum(1)
    for b in torch.nonzero(mixtures.counts == 5).flatten()[:3]:
        rows = mixtures.params[b].double().numpy()
        total = sum(of_package(row, POPULATION.band) for row in rows)
        signal = (mixtures.data[b] - noise[b]).numpy()
        assert np.abs(signal - total).max() < 1e-4 * np.abs(total).max()
    rows = np.asarray(draw_binaries(POPULATION.band, 5, 20, np.random.default_rng(0)))
    alone = sum(waveforms(row[None], POPULATION.band)[0] for row in rows)
    together = waveforms(rows, POPULATION.band).sum(0)
    assert np.abs(alone - together).max() < 1e-9 * np.abs(together).max()


def test_noise_has_unit_variance_in_every_part(mixtures: GalacticMixtures) -> None:
    noise = torch.view_as_real(mixtures.data - mixtures.components.sum(1))  # [B, 2, F, 2]
    n = noise[..., 0].numel()
    for part in noise.unbind(-1):
        assert abs(float(part.square().mean()) - 1) < 4 * math.sqrt(2 / n)
    for channel in noise.unbind(1):
        assert abs(float(channel.square().mean()) - 1) < 4 * math.sqrt(2 / n)


def test_whitening_gives_coloured_noise_of_a_time_series_unit_variance() -> None:
    rng = np.random.default_rng(0)
    n_samples, interval = 4096, 15.0
    duration = n_samples * interval
    frequency = np.fft.rfftfreq(n_samples, interval)[1:-1]
    psd = 1e-40 * (1 + (1e-3 / frequency) ** 2)
    white = rng.normal(size=(100, n_samples))  # one-sided density 2 * interval
    continuous = interval * np.fft.rfft(white)[:, 1:-1]
    coloured = continuous * np.sqrt(psd / (2 * interval))
    whitened = whiten(coloured, psd, duration)
    for part in (whitened.real, whitened.imag):
        assert part.var() == pytest.approx(1, abs=5 * math.sqrt(2 / part.size))


def test_noise_is_that_of_two_channels_made_of_x_y_z() -> None:
    frequency = np.geomspace(1e-4, 3e-2, 50)
    omega, x = 2 * np.pi * frequency, 2 * np.pi * frequency * ARM / SPEED_OF_LIGHT
    link = (15e-12 * omega / SPEED_OF_LIGHT) ** 2 * (1 + (2e-3 / frequency) ** 4)
    mass = 9e-30 * (1 + (4e-4 / frequency) ** 2) * (1 + (frequency / 8e-3) ** 4)
    mass = mass / (omega * SPEED_OF_LIGHT) ** 2
    auto = 16 * np.sin(x) ** 2 * (link + (3 + np.cos(2 * x)) * mass)
    cross = -8 * np.sin(x) ** 2 * np.cos(x) * (link + 4 * mass)
    assert np.allclose(noise_psd(frequency), auto - cross, rtol=1e-12)


def test_mean_squared_ratio_is_that_of_the_published_sensitivity() -> None:
    """3.2 A^2 T / S_n, with S_n of Robson, Cornish and Liu (2019): its fit is good to some per cent."""
    band = Band(frequency=2e-3, n_bins=128)
    ratios = snr(waveforms(draw_binaries(band, 2048, 30, np.random.default_rng(0)), band))
    f = (band.first_bin + band.n_bins / 2) / YEAR
    link = 15e-12**2 * (1 + (2e-3 / f) ** 4)
    mass = 3e-15**2 * (1 + (4e-4 / f) ** 2) * (1 + (f / 8e-3) ** 4) / (2 * math.pi * f) ** 4
    x = 2 * math.pi * f * ARM / SPEED_OF_LIGHT
    sensitivity = 10 / (3 * ARM**2) * (link + 2 * (1 + math.cos(x) ** 2) * mass) * (1 + 0.6 * x**2)
    assert (ratios**2).mean() == pytest.approx(3.2 * YEAR / sensitivity, rel=0.06)


def test_sampled_ratios_are_those_of_their_formula(sample: Bank) -> None:
    many = draw_mixtures(sample, POPULATION, 4000, torch.Generator().manual_seed(1))
    ratios = snr(many.components.numpy())
    exists = np.arange(5) < many.counts.numpy()[:, None]
    # by the formula 4 / T sum |h|^2 / S of the package's own waveforms
    for b in range(20):
        for k in range(int(many.counts[b])):
            expected = snr(of_package(many.params[b, k].double().numpy(), POPULATION.band))
            assert ratios[b, k] == pytest.approx(float(expected), rel=0.01)
    loud, quiet = ratios[:, 0], ratios[:, 1:][exists[:, 1:]]
    assert (ratios[~exists] == 0).all()
    for found, low, high in ((loud, 70, 7 * 10**1.5), (quiet, 7, 70)):
        logs = np.log(found / low) / np.log(high / low)
        assert 0 <= logs.min() < logs.max() <= 1.0001
        assert logs.mean() == pytest.approx(0.5, abs=4 / math.sqrt(12 * logs.size))


def test_frequencies_of_a_mixture_lie_in_one_window(mixtures: GalacticMixtures) -> None:
    exists = torch.arange(5) < mixtures.counts.unsqueeze(1)
    frequency = mixtures.params[..., 0]
    low = frequency.masked_fill(~exists, torch.inf).amin(1)
    high = frequency.masked_fill(~exists, -torch.inf).amax(1)
    assert (high - low <= POPULATION.spread_bins).all()
    assert low.min() >= POPULATION.band.half_width
    assert high.max() <= 128 - POPULATION.band.half_width
    assert set(mixtures.counts.tolist()) == {1, 2, 3, 4, 5}
    assert (mixtures.params[~exists] == 0).all()


def test_two_waveforms_span_all_orientations() -> None:
    params = draw_binaries(POPULATION.band, 6, 20, np.random.default_rng(2))
    params[:, PARAMETERS.index("phase")] = np.linspace(0, 6, 6)
    wanted = waveforms(params, POPULATION.band)
    basis = amplitude_basis(params, POPULATION.band)  # [n, 2, 2, F]
    for target, pair in zip(wanted, basis, strict=True):
        columns = pair.reshape(2, -1).T
        found = columns @ np.linalg.lstsq(columns, target.ravel(), rcond=None)[0]
        assert np.abs(found - target.ravel()).max() < 1e-9 * np.abs(target).max()


def test_half_width_holds_nearly_all_power() -> None:
    band = POPULATION.band
    params = draw_binaries(band, 64, band.half_width, np.random.default_rng(0))
    power = (np.abs(waveforms(params, band)) ** 2).sum(1)
    distance = np.abs(np.arange(band.n_bins) - params[:, :1])
    assert ((power * (distance <= band.half_width)).sum(1) > 0.97 * power.sum(1)).all()


def test_a_bank_is_made_once_and_goes_on_where_it_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gw_data, "N_PART", 8)
    whole = load_bank(POPULATION, 20, seed=4, directory=tmp_path / "whole")
    shares: list[float] = []
    folder = tmp_path / "stopped"
    load_bank(POPULATION, 8, seed=4, directory=folder, progress=shares.append)
    (first,) = folder.rglob("*.npz")
    written = first.stat().st_mtime_ns
    again = load_bank(POPULATION, 20, seed=4, directory=folder, progress=shares.append)
    assert first.stat().st_mtime_ns == written
    assert shares == [1, 1 / 3, 2 / 3, 1]
    assert torch.equal(again.waveforms, whole.waveforms)
    assert torch.equal(again.params, whole.params)
    assert len(again.params) == 20
    other = load_bank(POPULATION, 20, seed=5, directory=folder)
    assert not torch.equal(other.params, whole.params)
    first.write_bytes(first.read_bytes()[:100])
    with pytest.raises(SeparatorError, match=r"cannot be read as binaries .*; delete it$"):
        load_bank(POPULATION, 8, seed=4, directory=folder)


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SeparatorError, match="set SEPARATOR_CACHE to a folder that can be"):
        load_bank(POPULATION, 1, seed=0, directory=tmp_path / "file")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Band(frequency=-3e-3), "frequency=-0.003 Hz is not between 0.0001 and 0.03 Hz"),
        (lambda: Band(frequency=math.nan), "frequency=nan Hz is not between"),
        (lambda: Band(n_bins=127), "n_bins=127 is not an even number above 0"),
        (lambda: Population(Band(n_bins=60)), "n_bins=60 is too narrow for 5 sources over 64 bins"),
        (lambda: Population(spread_bins=4), "spread_bins=4 is too narrow for 5 sources"),
        (lambda: Population(max_sources=0), "max_sources=0 is not positive"),
    ],
)
def test_bad_ranges_are_one_line(make, words: str) -> None:
    with pytest.raises(SeparatorError) as caught:
        make()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bank_too_small_for_its_windows_is_refused(sample: Bank) -> None:
    few = Bank(sample.waveforms[:3], sample.params[:3])
    with pytest.raises(
        SeparatorError, match=r"too small a bank \(3\) leaves windows empty; pass more binaries"
    ):
        draw_mixtures(few, POPULATION, 500, torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", ["binary_galactica", "jax", "zuko"])
def test_without_the_extra_one_line_names_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SeparatorError, match=rf"^gravitational waves need {name}; install separator\[gw\]$"):
        load_bank(POPULATION, 1, seed=0)
