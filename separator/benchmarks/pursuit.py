"""Matching pursuit: no learning, one atom after another from a dense grid of the task's own waveforms.

Each round takes the atom that explains most of the residual, and subtracts it. An atom has the best amplitude
in closed form and, where the task has a phase, the best phase as well: it is the span of a sine and a cosine.

Reference: Mallat and Zhang, "Matching pursuits with time-frequency dictionaries", IEEE TSP 1993.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from separator.benchmarks.model import Prediction
from separator.benchmarks.tasks import AMPLITUDE_NAME, PHASE_NAME, Mixtures, Task, task_of
from separator.errors import SeparatorError
from separator.script import counted

GRID_POINTS = {
    1: (321,),
    2: (161, 26),
    3: (61, 31, 11),
}  # by number of parameters that are no amplitude or phase
BATCH = 64  # mixtures at a time, whose products with all atoms are kept
EXISTS = 1.0


class Atoms(NamedTuple):
    """The grid of a task: an orthonormal basis and the parameters of each atom."""

    basis: Tensor  # [A, n, N], n = 2 with a phase and 1 without
    to_basis: Tensor  # [A, n, n]: the basis is to_basis of sine and cosine
    params: Tensor  # [A, P], amplitude 1 and phase 0


def pursue(task: Task, mixtures: Mixtures, n_slots: int, n_tokens: int) -> Prediction:
    """Take as many atoms from each mixture as it has sources, at most `n_slots`.

    The slots are the atoms' waveforms [B, S, N], the attention is their energy by chunk [B, S, L], and the
    logits say which rounds were made: the count is given, not found.

    Raises:
        SeparatorError: `n_tokens` does not divide the signals.
    """
    n_samples = mixtures.signals.shape[1]
    if n_samples % n_tokens:
        raise SeparatorError(
            f"{n_tokens=} does not divide the {counted(n_samples, 'sample')} of a signal; pass a divisor"
        )
    atoms = _atoms(task.name, n_samples)
    parts = [_pursue(task, atoms, signals, n_slots) for signals in mixtures.signals.split(BATCH)]
    params = torch.cat(parts)
    exists = torch.arange(n_slots) < mixtures.counts.unsqueeze(1)  # [B, S]
    params = params * exists.unsqueeze(2)
    waveforms = torch.where(exists.unsqueeze(2), task.waveforms(params, n_samples), 0.0)
    attn = waveforms.square().unflatten(2, (n_tokens, -1)).sum(3)
    attn = attn / attn.sum(2, keepdim=True).clamp(min=torch.finfo(attn.dtype).tiny)
    logits = torch.where(exists, EXISTS, -EXISTS)
    return Prediction(waveforms, attn, logits, params, None)


def _pursue(task: Task, atoms: Atoms, signals: Tensor, n_rounds: int) -> Tensor:
    """Return the parameters [B, rounds, P] of the atoms of signals [B, N]."""
    residual = signals
    rounds = []
    for _ in range(n_rounds):
        weights = torch.tensordot(residual, atoms.basis, dims=([1], [2]))  # [B, A, n]
        if PHASE_NAME not in task.parameter_names:
            weights = weights.clamp(min=0)  # amplitudes are positive
        best = weights.square().sum(2).argmax(1)  # [B]
        chosen = weights[torch.arange(len(best)), best].unsqueeze(1)  # [B, 1, n]
        residual = residual - (chosen @ atoms.basis[best]).squeeze(1)
        params = atoms.params[best].clone()
        amounts = (chosen @ atoms.to_basis[best]).squeeze(1)  # [B, n], of sine and cosine
        params[:, task.parameter_names.index(AMPLITUDE_NAME)] = amounts.norm(dim=1)
        if PHASE_NAME in task.parameter_names:
            phase = torch.atan2(amounts[:, 1], amounts[:, 0])
            params[:, task.parameter_names.index(PHASE_NAME)] = phase % (2 * math.pi)
        rounds.append(params)
    return torch.stack(rounds, 1)


@cache
def _atoms(task_name: str, n_samples: int) -> Atoms:
    task = task_of(task_name)
    ranges = dict(zip(task.parameter_names, task.ranges, strict=True))
    shape_names = [name for name in ranges if name not in (AMPLITUDE_NAME, PHASE_NAME)]
    points = GRID_POINTS[len(shape_names)]
    axes = [torch.linspace(*ranges[name], n) for name, n in zip(shape_names, points, strict=True)]
    grid = dict(zip(shape_names, torch.meshgrid(*axes, indexing="ij"), strict=True))
    size = grid[shape_names[0]].numel()
    fixed = {AMPLITUDE_NAME: torch.ones(size), PHASE_NAME: torch.zeros(size)}
    columns = [fixed[name] if name in fixed else grid[name].flatten() for name in task.parameter_names]
    params = torch.stack(columns, 1)
    spans = [params]
    if PHASE_NAME in task.parameter_names:
        quarter = params.clone()
        quarter[:, task.parameter_names.index(PHASE_NAME)] = math.pi / 2
        spans.append(quarter)
    waveforms = torch.stack([task.waveforms(span, n_samples) for span in spans], 1)  # [A, n, N]
    # waveforms = L basis with the Cholesky factor L of their products, so basis = L^-1 waveforms
    products = (waveforms @ waveforms.mT).double()
    to_basis = torch.linalg.inv(torch.linalg.cholesky(products)).to(waveforms)
    return Atoms(to_basis @ waveforms, to_basis, params)
