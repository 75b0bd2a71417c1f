import numpy as np
import pytest
import soundfile
import torch

from separator import Separator, SeparatorError
from separator.naming import MAX_SLOTS

RATES = (8000, 16_000, 44_100, 48_000)


def noise(channels: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, (channels, length)).astype(np.float32)


def db(power_of: np.ndarray, re: np.ndarray) -> float:
    return 10 * np.log10(np.square(power_of, dtype=float).sum() / np.square(re, dtype=float).sum() + 1e-30)


def read_stems(folder) -> dict[str, np.ndarray]:
    return {path.stem: soundfile.read(path, always_2d=True)[0].T for path in sorted(folder.glob("*.wav"))}


@pytest.fixture(scope="module")
def random_separator(random_model):
    return Separator.load(random_model)


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sample_rate", RATES)
def test_estimates_and_residual_sum_to_the_input_at_every_rate(random_separator, sample_rate, channels):
    waveform = noise(channels, sample_rate + 33)
    result = random_separator.separate(waveform, sample_rate)
    assert result.estimates.shape == (4, *waveform.shape)
    assert result.sample_rate == sample_rate
    assert db(result.estimates.sum(0) + result.residual - waveform, re=waveform) < -120


@pytest.mark.parametrize("subtype", ["FLOAT", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("sample_rate", RATES)
def test_stems_sum_to_the_file_with_its_rate_length_and_channels(
    random_separator, tmp_path, sample_rate, channels, subtype
):
    soundfile.write(tmp_path / "mix.wav", noise(channels, sample_rate + 33).T, sample_rate, subtype=subtype)
    mixture = soundfile.read(tmp_path / "mix.wav", always_2d=True)[0].T
    result = random_separator.separate_file(tmp_path / "mix.wav", tmp_path / "out")
    stems = read_stems(tmp_path / "out" / "mix")
    assert len(stems) == 5
    info = soundfile.info(result.residual.file)
    assert (info.samplerate, info.channels, info.frames, info.subtype) == (
        sample_rate,
        channels,
        sample_rate + 33,
        subtype,
    )
    error = sum(stems.values()) - mixture
    if subtype == "FLOAT":
        assert db(error, re=mixture) < -120
    else:
        np.testing.assert_array_equal(error, 0)


def test_known_sources_are_found_and_the_rest_is_the_residual(band_separator, tones):
    low, middle, above = tones((500.0, 1500.0, 6000.0), 16_000, 2.0)
    result = band_separator.separate((low + 2 * middle + above)[None], 16_000)
    assert result.existence.tolist() == pytest.approx([0.982] * 3, abs=1e-3)
    np.testing.assert_allclose(result.estimates[0, 0, 999:-999], 2 * middle[999:-999], atol=2e-3)
    np.testing.assert_allclose(result.estimates[1, 0, 999:-999], low[999:-999], atol=2e-3)
    np.testing.assert_allclose(result.residual[0, 999:-999], above[999:-999], atol=2e-3)
    assert result.masks[0, 48].min() == 1  # masks are in the order of the estimates: 1.5 kHz first
    assert result.masks[1, 16].min() == 1


def test_slots_that_are_no_sources_go_to_the_residual_and_zero_keeps_all(band_separator):
    waveform = noise(1, 16_000)
    assert len(band_separator.separate(waveform, 16_000).estimates) == 3
    assert len(band_separator.separate(waveform, 16_000, min_existence=0).estimates) == 4
    nothing = band_separator.separate(waveform, 16_000, min_existence=0.99)
    assert nothing.estimates.shape == (0, 1, 16_000)
    np.testing.assert_array_equal(nothing.residual, waveform)


def test_the_models_own_threshold_is_the_default(random_model):
    separator = Separator.load(random_model)
    assert separator.network.config.min_existence == 0
    assert len(separator.separate(noise(1, 8000), 16_000, n_slots=3).estimates) == 3


def test_sources_come_by_falling_energy(random_separator):
    energies = np.square(random_separator.separate(noise(2, 20_000), 44_100).estimates).sum((1, 2))
    assert (np.diff(energies) <= 0).all()


def test_torch_in_gives_torch_out_and_the_same_numbers(random_separator):
    waveform = noise(2, 20_000)
    from_numpy = random_separator.separate(waveform, 16_000)
    from_torch = random_separator.separate(torch.from_numpy(waveform), 16_000)
    for name in ("estimates", "residual", "existence", "masks", "evidence"):
        assert isinstance(getattr(from_numpy, name), np.ndarray)
        assert isinstance(getattr(from_torch, name), torch.Tensor)
        np.testing.assert_array_equal(getattr(from_torch, name).numpy(), getattr(from_numpy, name))


def test_the_input_is_not_changed(random_separator):
    waveform = noise(1, 5000)
    random_separator.separate(waveform, 16_000)
    np.testing.assert_array_equal(waveform, noise(1, 5000))


def test_a_file_and_its_waveform_give_the_same_stems(random_separator, tmp_path):
    waveform = noise(2, 500_000)  # two segments, several windows
    soundfile.write(tmp_path / "mix.wav", waveform.T, 44_100, subtype="FLOAT")
    result = random_separator.separate(waveform, 44_100)
    written = random_separator.separate_file(tmp_path / "mix.wav", tmp_path / "out")
    stems = read_stems(tmp_path / "out" / "mix")
    for k in range(4):
        np.testing.assert_allclose(stems[f"source{k + 1}"], result.estimates[k], atol=1e-5)
    np.testing.assert_allclose(written.existence, result.existence, rtol=1e-5)
    assert written.seconds == pytest.approx(500_000 / 44_100)


def test_results_are_the_same_from_run_to_run_and_leave_the_random_state_alone(random_separator):
    waveform = noise(1, 30_000)
    torch.manual_seed(1)
    first = random_separator.separate(waveform, 16_000)
    drawn = torch.rand(3)
    second = random_separator.separate(waveform, 16_000)
    np.testing.assert_array_equal(first.estimates, second.estimates)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), drawn)


@pytest.mark.parametrize("length", [1, 2, 100, 255, 257, 4801])
@pytest.mark.parametrize("sample_rate", RATES)
def test_short_inputs_keep_their_length_and_sum(random_separator, length, sample_rate):
    waveform = noise(2, length)
    result = random_separator.separate(waveform, sample_rate)
    assert result.estimates.shape == (4, 2, length)
    np.testing.assert_allclose(result.estimates.sum(0) + result.residual, waveform, atol=1e-6)


@pytest.mark.parametrize("subtype", ["PCM_16", "FLOAT"])
def test_digital_silence_has_no_sources_and_finite_stems(tmp_path, band_separator, subtype):
    soundfile.write(tmp_path / "silence.wav", np.zeros((30_000, 2)), 44_100, subtype=subtype)
    result = band_separator.separate_file(tmp_path / "silence.wav", tmp_path / "out")
    assert (result.sources, result.residual.level_db) == ((), None)
    stems = read_stems(tmp_path / "out" / "silence")
    assert list(stems) == ["residual"]
    np.testing.assert_array_equal(stems["residual"], np.zeros((2, 30_000)))


def test_a_sound_that_comes_late_or_ends_early_leaves_no_nan(random_separator, tones):
    waveform = tones((440.0,), 16_000, 25.0)
    waveform[:, : 12 * 16_000] = 0
    waveform[:, 13 * 16_000 :] = 0
    result = random_separator.separate(waveform, 16_000)
    assert np.isfinite(result.estimates).all()
    assert np.isfinite(result.masks).all()


def test_antiphase_stereo_is_separated_like_the_same_sound_in_phase(band_separator, tones):
    mono = tones((500.0, 1500.0), 44_100, 1.0).sum(0)
    result = band_separator.separate(np.stack([mono, -mono]), 44_100)
    expected = band_separator.separate(np.stack([mono, mono]), 44_100)
    np.testing.assert_allclose(result.estimates[:, 0], expected.estimates[:, 0], atol=1e-6)
    np.testing.assert_allclose(result.estimates[:, 1], -expected.estimates[:, 0], atol=1e-6)


def test_masks_do_not_depend_on_the_level(random_separator):
    waveform = noise(1, 16_000)
    loud, quiet = (
        random_separator.separate(waveform, 16_000),
        random_separator.separate(1e-4 * waveform, 16_000),
    )
    np.testing.assert_allclose(quiet.masks, loud.masks, atol=2e-3)
    np.testing.assert_allclose(1e4 * quiet.estimates, loud.estimates, atol=2e-3)


def test_a_steady_tone_has_no_step_at_a_seam(band_separator, tones):
    tone = tones((500.0, 1503.0), 16_000, 30.0).sum(0, keepdims=True)
    estimate = band_separator.separate(tone, 16_000).estimates[0, 0, 1000:-1000]
    steps = np.abs(np.diff(estimate))
    seams = [k * 8 * 16_000 - 1000 for k in (1, 2, 3)]
    near = np.concatenate([steps[seam : seam + 2 * 16_000] for seam in seams[:2]])
    assert near.max() <= 1.05 * steps[16_000 : 7 * 16_000].max()


def test_stems_that_would_clip_get_one_gain_and_still_add_up(tmp_path, band_separator):
    square = 0.999 * np.sign(np.sin(2 * np.pi * 400 * np.arange(16_000) / 16_000))
    soundfile.write(tmp_path / "square.wav", square, 16_000, subtype="PCM_16")
    result = band_separator.separate_file(tmp_path / "square.wav", tmp_path / "out")
    assert -3 < result.gain_db < 0  # the first harmonic of a square is 4 / pi times as high
    stems = read_stems(tmp_path / "out" / "square")
    np.testing.assert_allclose(sum(stems.values())[0], 10 ** (result.gain_db / 20) * square, atol=2**-14)
    assert max(np.abs(stem).max() for stem in stems.values()) <= 1 - 2**-15


def test_more_slots_than_the_model_was_made_for_are_decoded(random_separator):
    assert random_separator.separate(noise(1, 8000), 16_000, n_slots=8).estimates.shape == (8, 1, 8000)


def test_a_file_is_not_separated_twice_into_the_same_folder_unless_asked(random_separator, tmp_path):
    soundfile.write(tmp_path / "mix.wav", noise(1, 4000)[0], 16_000)
    random_separator.separate_file(tmp_path / "mix.wav", tmp_path / "out")
    with pytest.raises(SeparatorError, match=r"holds residual\.wav, source1\.wav.*overwrite"):
        random_separator.separate_file(tmp_path / "mix.wav", tmp_path / "out")
    with pytest.warns(UserWarning, match=r"source3\.wav, source4\.wav of an earlier run removed"):
        result = random_separator.separate_file(
            tmp_path / "mix.wav", tmp_path / "out", n_slots=2, overwrite=True
        )
    assert sorted(read_stems(tmp_path / "out" / "mix")) == ["residual", "source1", "source2"]
    assert [stem.file.name for stem in result.sources] == ["source1.wav", "source2.wav"]


def test_progress_grows_to_one(random_separator, tmp_path):
    soundfile.write(tmp_path / "mix.wav", noise(1, 20 * 16_000)[0], 16_000)
    shares: list[float] = []
    random_separator.separate_file(tmp_path / "mix.wav", tmp_path / "out", progress=shares.append)
    assert len(shares) > 3
    assert shares == sorted(shares)
    assert shares[-1] == pytest.approx(1)


@pytest.mark.parametrize(
    ("waveform", "sample_rate", "complaint"),
    [
        (np.zeros(100), 16_000, r"shape \(100,\); pass \(channel, time\).*waveform\[None\]"),
        (np.zeros((1000, 2)), 16_000, r"shape \(1000, 2\); pass \(channel, time\)"),
        (np.zeros((2, 0)), 16_000, r"shape \(2, 0\)"),
        (np.zeros((1, 100), np.int16), 16_000, "waveform is int16; pass floats"),
        (np.array([[0.0, np.nan]]), 16_000, r"waveform\[0, 1\] is nan"),
        (np.zeros((1, 100)), 0, "sample_rate=0 Hz is not positive"),
    ],
)
def test_a_waveform_that_cannot_be_meant_is_refused(band_separator, waveform, sample_rate, complaint):
    with pytest.raises(SeparatorError, match=complaint):
        band_separator.separate(waveform, sample_rate)


def test_options_that_cannot_be_meant_are_refused(band_separator, random_model):
    for n_slots in (0, -3, MAX_SLOTS + 1, 100_000, 2.5, "4"):
        with pytest.raises(
            SeparatorError, match=rf"n_slots={n_slots!r} is no whole number from 1 to {MAX_SLOTS}"
        ):
            band_separator.separate(noise(1, 100), 16_000, n_slots=n_slots)
    with pytest.raises(SeparatorError, match=r"min_existence=1\.5 is no probability"):
        band_separator.separate(noise(1, 100), 16_000, min_existence=1.5)
    with pytest.raises(SeparatorError, match="device='moon' cannot be used"):
        Separator.load(random_model, device="moon")


def test_a_network_in_training_is_refused(band_network):
    with pytest.raises(SeparatorError, match=r"network\.training=True; call network\.eval"):
        Separator(band_network().train())
