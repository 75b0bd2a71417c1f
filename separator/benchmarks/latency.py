"""How long a mechanism takes, and how that grows with slots, tokens and width."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from separator.attention import build_mechanism
from separator.attention.base import Mechanism
from separator.benchmarks.records import Record
from separator.errors import SeparatorError
from separator.script import counted

RANDOM_TOKENS = "random_tokens"
AXES = ("n_slots", "n_tokens", "d_model")
WARM_UP = 3


def measure_latency(
    task: str,
    method: str,
    *,
    seeds: Sequence[int],
    batch_size: int = 32,
    n_tokens: int = 16,
    n_slots: int = 5,
    d_model: int = 64,
    repeats: int = 30,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[Record]:
    """Time a mechanism on normal tokens: medians of a forward pass, and of one with gradients, in ms."""
    records = []
    for number, seed in enumerate(seeds):
        torch.manual_seed(seed)
        mechanism = build_mechanism(method, n_slots=n_slots, d_model=d_model, **(options or {}))
        tokens = torch.randn(batch_size, n_tokens, d_model)
        passes: dict[str, list[float]] = {"forward_ms": [], "training_ms": []}
        for repeat in range(WARM_UP + repeats):
            times = (_forward(mechanism, tokens), _training(mechanism, tokens))
            if repeat >= WARM_UP:
                for values, elapsed in zip(passes.values(), times, strict=True):
                    values.append(1000 * elapsed)
            if progress is not None:
                progress((number + (repeat + 1) / (WARM_UP + repeats)) / len(seeds))
        medians = {name: round(statistics.median(values), 4) for name, values in passes.items()}
        records.append({"task": task, "method": method, "seed": seed, **medians})
    return records


def scaling_exponents(points: Sequence[Mapping[str, float]], times: Sequence[float]) -> dict[str, float]:
    """Least-squares exponents a, b, c of time ~ n_slots^a n_tokens^b d_model^c.

    Raises:
        SeparatorError: the points do not vary in all three.

    >>> corners = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)]
    >>> points = [dict(zip(AXES, corner)) for corner in corners]
    >>> {axis: round(value, 6) for axis, value in scaling_exponents(points, [1, 2, 2, 4]).items()}
    {'n_slots': 1.0, 'n_tokens': 1.0, 'd_model': 2.0}
    """
    rows = np.array([[1.0, *(math.log(point[axis]) for axis in AXES)] for point in points])
    if np.linalg.matrix_rank(rows) < rows.shape[1]:
        raise SeparatorError(
            f"{counted(len(points), 'point')} without a change in each of {', '.join(AXES)}; measure more"
        )
    solution = np.linalg.lstsq(rows, np.log(np.asarray(times, float)), rcond=None)[0]
    return dict(zip(AXES, solution[1:].tolist(), strict=True))


def _forward(mechanism: Mechanism, tokens: Tensor) -> float:
    with torch.no_grad():
        start = time.perf_counter()
        mechanism(tokens)
        return time.perf_counter() - start


def _training(mechanism: Mechanism, tokens: Tensor) -> float:
    tokens = tokens.clone().requires_grad_()
    mechanism.zero_grad()
    start = time.perf_counter()
    out = mechanism(tokens)
    (out.slots.square().sum() + out.attn.square().sum()).backward()
    return time.perf_counter() - start
