"""Shared by the tests: one thread a process, a network with planted truths, a folder with a random model."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")  # the page's client would tell that it was started

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor, nn

from separator.checkpoint import save_model
from separator.network import FRAMES_PER_TOKEN, Decomposition, NetworkConfig, SeparationNetwork
from separator.separate import Separator

torch.set_num_threads(1)
settings.register_profile("tests", deadline=None, derandomize=True)
settings.load_profile("tests")


class BandNetwork(nn.Module):
    """A network whose answer is known: slot k is the k-th band of ``edges_hz``, what lies above is residual.

    With ``shuffle`` every call puts its slots into another order, as a network is free to do.
    """

    def __init__(self, edges_hz: tuple[float, ...] = (0, 1000, 2000, 4000), *, shuffle: bool = False) -> None:
        super().__init__()
        self.config = NetworkConfig()
        self.edges_hz = edges_hz
        self.shuffle = shuffle
        self.n_calls = 0
        self.place = nn.Parameter(torch.zeros(()))

    def forward(self, spectrogram: Tensor, *, n_slots: int | None = None) -> Decomposition:
        n_slots = n_slots or self.config.n_slots
        n_bands = len(self.edges_hz) - 1
        batch, n_frequencies, n_frames = spectrogram.shape
        frequencies = torch.arange(n_frequencies) * (self.config.sample_rate / self.config.n_fft)
        masks = torch.zeros(batch, n_slots, n_frequencies, n_frames)
        for k in range(min(n_slots, n_bands)):
            inside = (frequencies >= self.edges_hz[k]) & (frequencies < self.edges_hz[k + 1])
            masks[:, k, inside] = 1
        logits = torch.full((batch, n_slots), -4.0)
        logits[:, :n_bands] = 4.0
        if self.shuffle:
            order = torch.randperm(n_slots, generator=torch.Generator().manual_seed(self.n_calls))
            masks, logits = masks[:, order], logits[:, order]
        self.n_calls += 1
        grid = (n_frequencies, -(-n_frames // FRAMES_PER_TOKEN))
        claimed = masks[..., ::FRAMES_PER_TOKEN].cumsum(1)
        evidence = [torch.ones(batch, grid[0] * grid[1])] + [1 - c.flatten(1) for c in claimed.unbind(1)]
        attn = torch.zeros(batch, n_slots, grid[0] * grid[1])
        return Decomposition(masks, 1 - masks.sum(1), logits, attn, evidence, grid)


@pytest.fixture
def band_network() -> type[BandNetwork]:
    """The class, to be made with other bands."""
    return BandNetwork


@pytest.fixture
def band_separator() -> Separator:
    """A separator whose three sources are the bands 0-1, 1-2 and 2-4 kHz."""
    return Separator(BandNetwork().eval())  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small model with random weights; with its threshold of 0 every slot is a source."""
    torch.manual_seed(0)
    network = SeparationNetwork(
        NetworkConfig(widths=(8, 8, 8, 16), n_context=1, embedding=4, min_existence=0.0)
    )
    folder = tmp_path_factory.mktemp("models") / "random"
    save_model(network, folder, {"training": {"steps": 0}})
    return folder


@pytest.fixture
def tones() -> Callable[..., np.ndarray]:
    """Make sines (one for every frequency, time) of ``amplitude``."""

    def make(
        frequencies_hz: tuple[float, ...], sample_rate: int, seconds: float, amplitude: float = 0.2
    ) -> np.ndarray:
        time = np.arange(round(seconds * sample_rate)) / sample_rate
        return amplitude * np.sin(2 * np.pi * np.outer(frequencies_hz, time))

    return make
