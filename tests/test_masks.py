import pytest
import torch
from torch import Tensor

from separator.masks import apply_masks, ideal_binary_mask, ideal_ratio_mask


def spectrograms(n_sources: int, seed: int = 0) -> Tensor:
    return torch.randn(
        2, n_sources, 5, 7, dtype=torch.complex64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("rule", [ideal_ratio_mask, ideal_binary_mask])
@pytest.mark.parametrize("n_sources", [1, 4])
def test_masks_sum_to_one_also_where_all_sources_are_silent(rule, n_sources: int) -> None:
    sources = spectrograms(n_sources)
    sources[..., 0] = 0
    masks = rule(sources)
    assert masks.shape == sources.shape
    torch.testing.assert_close(masks.sum(1), torch.ones(2, 5, 7))


def test_masked_spectrograms_sum_to_the_spectrogram() -> None:
    sources = spectrograms(3)
    mixture = sources.sum(1)
    torch.testing.assert_close(apply_masks(ideal_ratio_mask(sources), mixture).sum(1), mixture)


def test_the_ratio_mask_is_the_share_of_magnitudes() -> None:
    sources = torch.tensor([3.0, -1.0j]).reshape(2, 1, 1)
    assert ideal_ratio_mask(sources).flatten().tolist() == [0.75, 0.25]


def test_the_binary_mask_gives_each_bin_to_the_loudest_source() -> None:
    sources = torch.tensor([[1.0, 2.0j, 1.0], [-2.0, 1.0, 1.0]]).reshape(2, 1, 3)
    assert ideal_binary_mask(sources)[:, 0].tolist() == [[0, 1, 1], [1, 0, 0]]


@pytest.mark.parametrize("rule", [ideal_ratio_mask, ideal_binary_mask])
def test_sources_that_never_share_a_bin_are_recovered_exactly(rule) -> None:
    sources = spectrograms(2)
    sources[:, 0, :3] = 0
    sources[:, 1, 3:] = 0
    torch.testing.assert_close(apply_masks(rule(sources), sources.sum(1)), sources)
