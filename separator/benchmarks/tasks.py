"""The synthetic tasks: sums of one to four parametric sources, one of them loud, in white noise.

Every task has waveforms a(t) = amplitude * shape(t) on t = linspace(0, 1, n_samples), and uniform parameters.
A mixture of K sources uses the first K rows; the other rows are zero.

Reference: Houba, NeurIPS 2026, section 3.1.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from separator.errors import SeparatorError

DOMINANT_AMPLITUDE = (5.0, 10.0)  # of the first source
AMPLITUDE = (0.2, 1.0)  # of the others
AMPLITUDE_NAME = "amplitude"
PHASE_NAME = "phase"
TRAIN, TEST = "train", "test"
TEST_OFFSET = 10_000  # a seed gives the training data; the test data's draws are kept apart


class Mixtures(NamedTuple):
    """Mixtures and what they are made of, zero beyond each mixture's count."""

    signals: Tensor  # [B, N]
    params: Tensor  # [B, K_max, P]
    counts: Tensor  # [B], 1 to K_max
    components: Tensor  # [B, K_max, N]


class Source(Protocol):
    """What mixtures come from, to train on and to be tested on."""

    @property
    def name(self) -> str:
        """Of the task."""

    @property
    def parameter_names(self) -> tuple[str, ...]:
        """Of a source."""

    @property
    def n_params(self) -> int:
        """Parameters of a source."""

    @property
    def tokenizer_type(self) -> str:
        """How the benchmark model reads it."""

    def mixtures(
        self, n: int, *, seed: int, split: str, n_samples: int, max_sources: int, amp_ratio: float | None
    ) -> Mixtures:
        """Return n mixtures of the split `TRAIN` or `TEST`."""


@dataclass(frozen=True)
class Task:
    """One family of sources: the parameters' names and ranges, and the waveform of unit amplitude.

    Attributes:
        ranges: of each parameter of `parameter_names`; that of the amplitude is the quiet sources'.
        shape: maps time [N] and the parameters by name [..., 1] to waveforms [..., N].
        tokenizer_type: how the benchmark model reads it, see `separator.benchmarks.model`.
    """

    name: str
    parameter_names: tuple[str, ...]
    ranges: tuple[tuple[float, float], ...]
    shape: Callable[[Tensor, dict[str, Tensor]], Tensor]
    tokenizer_type: str

    @property
    def n_params(self) -> int:
        """Parameters of a source."""
        return len(self.parameter_names)

    def mixtures(
        self, n: int, *, seed: int, split: str, n_samples: int, max_sources: int, amp_ratio: float | None
    ) -> Mixtures:
        """Draw n mixtures by `draw_mixtures`."""
        seed = seed + TEST_OFFSET if split == TEST else seed
        sizes = {"n_samples": n_samples, "max_sources": max_sources}
        return draw_mixtures(self, n, seed=seed, amp_ratio=amp_ratio, **sizes)

    def waveforms(self, params: Tensor, n_samples: int) -> Tensor:
        """Return the waveforms [..., N] of sources with parameters [..., P].

        The zero rows of `Mixtures.params` are no sources: a width of zero gives NaN.
        """
        time = torch.linspace(0, 1, n_samples, dtype=params.dtype, device=params.device)
        by_name = dict(zip(self.parameter_names, params.unsqueeze(-1).unbind(-2), strict=True))
        return by_name[AMPLITUDE_NAME] * self.shape(time, by_name)


def _sine(time: Tensor, params: dict[str, Tensor]) -> Tensor:
    return torch.sin(2 * math.pi * params["frequency"] * time + params[PHASE_NAME])


def _bump(time: Tensor, params: dict[str, Tensor]) -> Tensor:
    return torch.exp(-0.5 * ((time - params["center"]) / params["width"]).square())


def _wavelet(time: Tensor, params: dict[str, Tensor]) -> Tensor:
    return _bump(time, params) * _sine(time, params)


TURN = (0.0, 2 * math.pi)
TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task(
            "sinusoids",
            ("frequency", AMPLITUDE_NAME, PHASE_NAME),
            ((2.0, 10.0), AMPLITUDE, TURN),
            _sine,
            "fft",
        ),
        Task(
            "gaussian_bumps",
            ("center", AMPLITUDE_NAME, "width"),
            ((0.1, 0.9), AMPLITUDE, (0.02, 0.07)),
            _bump,
            "direct",
        ),
        Task(
            "multiscale",
            ("frequency", AMPLITUDE_NAME, PHASE_NAME, "center", "width"),
            ((3.0, 18.0), AMPLITUDE, TURN, (0.2, 0.8), (0.05, 0.15)),
            _wavelet,
            "fft",
        ),
    )
}


def draw_mixtures(
    task: str | Task,
    n: int,
    *,
    seed: int,
    n_samples: int = 256,
    max_sources: int = 4,
    noise_std: float = 0.1,
    amp_ratio: float | None = None,
) -> Mixtures:
    """Draw `n` mixtures of 1 to `max_sources` sources; the first source of each is the dominant one.

    With `amp_ratio` r the dominant amplitude is r U(0.2, 1) instead of U(5, 10); no other draw changes.

    Raises:
        SeparatorError: unknown task, or a number that is not positive.

    >>> draw_mixtures("sinusoids", 3, seed=0).components.shape
    torch.Size([3, 4, 256])
    """
    task = task_of(task)
    for name, value in (("n", n), ("n_samples", n_samples), ("max_sources", max_sources)):
        if value < 1:
            raise SeparatorError(f"{name}={value} is not positive; pass at least 1")
    if amp_ratio is not None and not amp_ratio > 0:
        raise SeparatorError(f"{amp_ratio=} is not positive; the paper's are 1 to 10")
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, max_sources + 1, (n,), generator=generator)
    unit = torch.rand(n, max_sources, task.n_params, generator=generator)
    low, high = torch.tensor(task.ranges).unbind(1)
    params = low + (high - low) * unit
    amplitude = task.parameter_names.index(AMPLITUDE_NAME)
    if amp_ratio is None:
        quietest, loudest = DOMINANT_AMPLITUDE
        params[:, 0, amplitude] = quietest + (loudest - quietest) * unit[:, 0, amplitude]
    else:
        params[:, 0, amplitude] *= amp_ratio
    exists = torch.arange(max_sources) < counts.unsqueeze(1)  # [B, K_max]
    components = task.waveforms(params, n_samples) * exists.unsqueeze(2)
    noise = noise_std * torch.randn(n, n_samples, generator=generator)
    return Mixtures(components.sum(1) + noise, params * exists.unsqueeze(2), counts, components)


def task_of(task: str | Task) -> Task:
    """Return the task of that name.

    Raises:
        SeparatorError: no task has that name.
    """
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise SeparatorError(f"unknown task {task!r}; choose one of {', '.join(TASKS)}")
    return TASKS[task]
