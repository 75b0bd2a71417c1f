import numpy as np
import pytest

from separator.errors import SeparatorError
from separator.plot import draw_separation, save_picture
from separator.results import Overview


def overview(n_slots: int, *, evidence: bool = True) -> Overview:
    rng = np.random.default_rng(0)
    mixture = rng.random((257, 40)).astype(np.float32)
    slots = rng.random((n_slots, 257, 40)).astype(np.float32)
    left = np.linspace(1, 0, 5, dtype=np.float32)[:, None, None] * np.ones((5, 16, 10), np.float32)
    return Overview(mixture, slots, left if evidence else None, 2.5, 16_000)


def test_the_picture_has_the_mixture_every_source_and_the_evidence_after_every_slot():
    figure = draw_separation(overview(2))
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[:3] == ["mixture", "source 1", "source 2"]
    assert titles[3:8] == ["evidence before slot 1, mean 1.00"] + [
        f"evidence after slot {k}, mean {1 - k / 4:.2f}" for k in (1, 2, 3, 4)
    ]


def test_the_spectrograms_show_levels_below_the_mixtures_peak():
    shown = overview(1)
    images = [axis.images[0] for axis in draw_separation(shown).axes[:2]]
    for image, power in zip(images, [shown.mixture, shown.slots[0]], strict=True):
        np.testing.assert_allclose(
            image.get_array(), 10 * np.log10(power / shown.mixture.max()), rtol=1e-4, atol=1e-4
        )
        assert image.get_extent() == [0, 2.5, 0, 8]


def test_a_model_without_evidence_and_silence_can_be_drawn(tmp_path):
    silent = Overview(np.zeros((257, 3), np.float32), np.zeros((0, 257, 3), np.float32), None, 0.1, 16_000)
    save_picture(silent, tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert len(draw_separation(overview(3, evidence=False)).axes) == 4


def test_a_picture_that_cannot_be_written_is_a_readable_error(tmp_path):
    with pytest.raises(SeparatorError, match=r"a\.png cannot be written \(No such file or directory\)"):
        save_picture(overview(1), tmp_path / "none" / "a.png")
