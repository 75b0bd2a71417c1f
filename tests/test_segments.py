import numpy as np
import pytest
import torch

from separator.network import NetworkConfig, SeparationNetwork
from separator.segments import OVERLAP_SECONDS, SEGMENT_SECONDS, analyse, mono_view
from separator.stft import STFT

RATE = 16_000


def analysis_of(network, waveform, n_slots=4, sample_rate=RATE, length=None, **options):
    length = length or waveform.shape[1]
    return analyse(
        network.eval(), [waveform], sample_rate, n_slots=n_slots, length=length, keep_evidence=True, **options
    )


def all_masks(analysis) -> np.ndarray:
    return analysis.spool.read(0, analysis.spool.n_frames).numpy()


@pytest.mark.parametrize("seconds", [0.001, 1.0, 10.0, 10.001, 18.0, 18.1, 35.5])
def test_there_is_a_mask_for_every_frame_of_the_whole_file(band_network, seconds):
    waveform = np.random.default_rng(0).normal(0, 0.1, (1, round(seconds * RATE))).astype(np.float32)
    masks = all_masks(analysis_of(band_network(), waveform))
    assert masks.shape[-1] == STFT().n_frames(waveform.shape[1])
    np.testing.assert_allclose(masks[0, :32], 1)  # below 1 kHz, at every time
    np.testing.assert_allclose(masks[1:, :32], 0)


def test_a_stem_keeps_its_identity_though_every_segment_orders_its_slots_anew(band_network, tones):
    tone = tones((500.0, 1500.0, 3000.0), RATE, 60.0)
    levels = np.array([1.0, 0.1, 0.3])[:, None]
    masks = all_masks(analysis_of(band_network(shuffle=True), (levels * tone).sum(0, keepdims=True)))
    for bin_ in (16, 48, 96):
        stems = masks[:, bin_].argmax(0)
        assert (stems == stems[0]).all()
        assert masks[stems[0], bin_].min() == 1


def test_two_alternating_sounds_do_not_swap_stems(band_network, tones):
    low, high = tones((500.0, 3000.0), RATE, 60.0)
    time = np.arange(60 * RATE) / RATE
    waveform = np.where(time % 14 < 7, low, high)[None]
    masks = all_masks(analysis_of(band_network(shuffle=True), waveform))
    frames = np.arange(masks.shape[-1]) * 256 / RATE
    for bin_, sounds in ((16, frames % 14 < 7), (96, frames % 14 > 7)):
        stems = masks[:, bin_, sounds].argmax(0)
        assert (stems == stems[0]).all()


def test_a_stem_is_found_again_after_a_quiet_stretch(band_network, tones):
    low, high = tones((500.0, 3000.0), RATE, 60.0)
    time = np.arange(60 * RATE) / RATE
    waveform = (low * (time > 0) + high * ((time < 9) | (time > 45)))[None]
    masks = all_masks(analysis_of(band_network(shuffle=True), waveform))
    assert masks[:, 96, 100].argmax() == masks[:, 96, -100].argmax()


def test_a_new_sound_opens_a_stem_that_was_silent(band_network, tones):
    low, middle, high = tones((500.0, 1500.0, 3000.0), RATE, 40.0)
    time = np.arange(40 * RATE) / RATE
    waveform = (low * (time < 15) + middle * (time < 30) + high * (time > 25))[None]
    masks = all_masks(analysis_of(band_network(shuffle=True), waveform))
    early, late = masks[..., 300], masks[..., -300]
    assert len({early[:, 16].argmax(), early[:, 48].argmax(), late[:, 96].argmax()}) == 3


def test_masks_fade_from_segment_to_segment(band_network):
    class Step(band_network):
        def forward(self, spectrogram, *, n_slots=None):
            out = super().forward(spectrogram, n_slots=n_slots)
            return out._replace(masks=out.masks * (0.5 if self.n_calls == 1 else 1.0))

    waveform = np.random.default_rng(0).normal(0, 0.1, (1, 18 * RATE)).astype(np.float32)
    course = all_masks(analysis_of(Step(), waveform))[0, 5]
    hop = (SEGMENT_SECONDS - OVERLAP_SECONDS) * RATE // 256
    n_fade = OVERLAP_SECONDS * RATE // 256 + 1
    np.testing.assert_allclose(course[:hop], 0.5)
    np.testing.assert_allclose(course[hop : hop + n_fade], np.linspace(0.5, 1, n_fade), atol=1e-3)
    np.testing.assert_allclose(course[hop + n_fade :], 1)


@pytest.fixture
def unsure_network(band_network):
    """Make a network that gives all its slots the k-th of ``probabilities`` in the k-th segment."""

    class Unsure(band_network):
        def __init__(self, probabilities):
            super().__init__()
            self.logits = torch.logit(torch.tensor(probabilities))

        def forward(self, spectrogram, *, n_slots=None):
            out = super().forward(spectrogram, n_slots=n_slots)
            return out._replace(existence_logits=self.logits[self.n_calls - 1].expand(1, 4))

    return Unsure


def test_a_stem_exists_as_segments_with_a_fifth_of_its_energy_say(unsure_network, tones):
    waveform = tones((500.0,), RATE, 58.0)  # seven equal segments
    existence = analysis_of(unsure_network([0.02, 0.3, 0.05, 0.01, 0.4, 0.1, 0.03]), waveform).existence
    assert existence[0] == pytest.approx(0.3)  # a seventh of the energy reaches 0.4


def test_a_segment_where_a_stem_hardly_sounds_does_not_make_it_exist(unsure_network, tones):
    waveform = tones((500.0,), RATE, 42.0)
    waveform[:, 8 * RATE : 34 * RATE] *= 0.01  # three of the segments, and overlaps
    existence = analysis_of(unsure_network([0.1, 0.9, 0.9, 0.9, 0.2]), waveform).existence
    assert existence[0] == pytest.approx(0.2)


def test_a_sound_of_one_segment_exists_as_that_segment_says(unsure_network, tones):
    low, high = tones((500.0, 1500.0), RATE, 58.0)
    time = np.arange(58 * RATE) / RATE
    waveform = (low + high * ((time > 18.5) & (time < 23.5)))[None]  # the third segment alone
    existence = analysis_of(unsure_network([0.01, 0.01, 0.8, 0.01, 0.01, 0.01, 0.01]), waveform).existence
    assert existence[0] == pytest.approx(0.01)
    assert existence[1:].max() == pytest.approx(0.8)


def test_existence_follows_the_stem_though_every_segment_orders_its_slots_anew(band_network, tones):
    probability = {16: 0.9, 48: 0.2, 96: 0.6}  # by the bin of a tone

    class Sure(band_network):
        def forward(self, spectrogram, *, n_slots=None):
            out = super().forward(spectrogram, n_slots=n_slots)
            of_slot = torch.full((4,), 0.5)
            for bin_, value in probability.items():
                of_slot[out.masks[0, :, bin_].amax(1).argmax()] = value
            return out._replace(existence_logits=torch.logit(of_slot)[None])

    tone = tones((500.0, 1500.0, 3000.0), RATE, 60.0)
    analysis = analysis_of(Sure(shuffle=True), tone.sum(0, keepdims=True))
    for bin_, value in probability.items():
        assert analysis.existence[all_masks(analysis)[:, bin_, 100].argmax()] == pytest.approx(value)


def test_a_file_of_one_segment_exists_as_the_network_says(unsure_network, tones):
    network = unsure_network([0.37])
    assert analysis_of(network, tones((500.0,), RATE, 10.0)).existence[0] == torch.sigmoid(network.logits)[0]


def test_nothing_exists_in_digital_silence(band_network):
    analysis = analysis_of(band_network(), np.zeros((2, RATE), np.float32))
    np.testing.assert_array_equal(analysis.existence, 0)
    assert np.isfinite(all_masks(analysis)).all()


def test_evidence_is_stitched_over_time(band_network):
    waveform = np.random.default_rng(0).normal(0, 0.1, (1, 30 * RATE)).astype(np.float32)
    evidence = analysis_of(band_network(), waveform).evidence
    n_frames = STFT().n_frames(30 * RATE)
    assert evidence.shape == (5, 257, -(-n_frames // 4))
    np.testing.assert_array_equal(evidence[0], 1)
    np.testing.assert_array_equal(evidence[1, :32], 0)  # the first slot took all below 1 kHz
    np.testing.assert_array_equal(evidence[4, :128], 0)
    np.testing.assert_array_equal(evidence[4, 128:], 1)


def test_the_overview_holds_the_power_of_mixture_and_slots(band_network, tones):
    waveform = tones((500.0, 3000.0), RATE, 25.0).sum(0, keepdims=True)
    overview = analysis_of(band_network(), waveform).overview
    assert overview.mixture.mean() == pytest.approx(np.square(waveform).sum() / 2 / 257 / 1564, rel=0.01)
    np.testing.assert_allclose(overview.slots[0, :32], overview.mixture[:32], rtol=1e-3)
    assert overview.slots[0, 32:].max() == 0
    assert overview.seconds == 25.0


@pytest.mark.parametrize("stated", [1, 25 * RATE, 1000 * RATE])
def test_the_overview_has_few_columns_whatever_length_a_file_states(band_network, tones, stated):
    waveform = tones((500.0, 3000.0), RATE, 25.0).sum(0, keepdims=True)
    overview = analysis_of(band_network(), waveform, length=stated).overview
    assert overview.mixture.shape[1] <= 2001
    spectrum = analysis_of(band_network(), waveform).overview.mixture.mean(1)
    np.testing.assert_allclose(overview.mixture.mean(1), spectrum, rtol=0.02, atol=1e-4 * spectrum.max())
    np.testing.assert_allclose(overview.evidence[1, :32], 0, atol=1e-6)
    np.testing.assert_allclose(overview.evidence[1, 32:], 1, atol=1e-3)


def test_smaller_segments_give_as_many_masks_and_as_much_evidence(band_network):
    waveform = np.random.default_rng(0).normal(0, 0.1, (1, 30 * RATE)).astype(np.float32)
    usual, small = (analysis_of(band_network(), waveform, segment_seconds=s) for s in (10, 6))
    assert small.spool.n_frames == usual.spool.n_frames
    assert abs(small.evidence.shape[-1] - usual.evidence.shape[-1]) <= 1
    np.testing.assert_allclose(all_masks(small)[0, :32], 1)


def test_a_network_that_stops_early_leaves_the_other_slots_empty():
    config = NetworkConfig(widths=(4, 6, 8, 12), n_context=1, stop_below=1.1)  # spent after the first slot
    waveform = np.random.default_rng(0).normal(0, 0.1, (1, RATE)).astype(np.float32)
    analysis = analysis_of(SeparationNetwork(config).eval(), waveform, n_slots=6)
    assert analysis.existence.shape == (6,)
    assert all_masks(analysis)[0].max() > 0
    np.testing.assert_array_equal(all_masks(analysis)[1:], 0)
    np.testing.assert_array_equal(analysis.evidence[1], analysis.evidence[6])


def test_one_channel_is_viewed_as_it_is():
    spectrogram = torch.randn(1, 5, 7, dtype=torch.complex64)
    assert torch.equal(mono_view(spectrogram), spectrogram[0])


def test_opposite_channels_do_not_cancel_in_the_view():
    spectrogram = torch.randn(1, 5, 7, dtype=torch.complex64)
    for right in (spectrogram, -spectrogram, 1j * spectrogram):
        view = mono_view(torch.cat([spectrogram, right]))
        torch.testing.assert_close(view.abs(), spectrogram[0].abs())


def test_the_view_has_the_mean_power_of_the_channels():
    spectrogram = torch.randn(3, 5, 7, dtype=torch.complex64)
    torch.testing.assert_close(mono_view(spectrogram).abs() ** 2, (spectrogram.abs() ** 2).mean(0))
