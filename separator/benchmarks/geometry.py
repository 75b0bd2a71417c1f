"""What the paper says of the geometry of depletion, checked on random weights and tokens.

- Proposition 2: epsilon <= e_after <= e_before.
- A slot takes at most one token's worth of evidence: sum_l (e_before - e_after) <= sum_l f(alpha_l) <= 1.
- Slots that start alike and see the same input share their fixed point; the state that earlier slots leave
  is what separates them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from separator.attention import SlotAttention, SlotAttentionOutput, build_mechanism
from separator.attention.evidence import EvidenceDepletionSlotAttention
from separator.benchmarks.records import Record
from separator.errors import SeparatorError

ROUNDING = 1e-6
D_MODEL = 64
SHARPNESS = (1.0, 4.0, 16.0)
"""Factors of the query weights, from nearly uniform attention to nearly one token."""
CHECKED = ("vanilla", "sequential", "evidence_linear", "evidence_quadratic", "evidence_cubic")


def check_geometry(
    task: str,
    method: str,
    *,
    seeds: Sequence[int],
    n_inputs: int = 256,
    n_tokens: int = 16,
    n_slots: int = 5,
    options: Mapping[str, Any] | None = None,
    progress: Callable[[float], None] | None = None,
) -> list[Record]:
    """Return the worst value of each statement over `SHARPNESS`, its bound, and whether it holds."""
    records = []
    for number, seed in enumerate(seeds):
        torch.manual_seed(seed)
        mechanism = build_mechanism(method, n_slots=n_slots, d_model=D_MODEL, **(options or {})).eval()
        if not isinstance(mechanism, SlotAttention):
            raise SeparatorError(f"{method=} has no slots that start alike; choose of {', '.join(CHECKED)}")
        tokens = torch.randn(n_inputs, n_tokens, D_MODEL) * torch.rand(n_inputs, n_tokens, 1).exp()
        query = mechanism.proj_q.weight.detach().clone()
        checks: dict[str, dict[str, Any]] = {}
        for factor in SHARPNESS:
            mechanism.proj_q.weight.data = factor * query
            for name, check in _statements(mechanism, tokens).items():
                checks[name] = check if name not in checks else _worse(checks[name], check)
        records.append({"task": task, "method": method, "seed": seed, "checks": checks})
        if progress is not None:
            progress((number + 1) / len(seeds))
    return records


@torch.no_grad()
def _statements(mechanism: SlotAttention, tokens: Tensor) -> dict[str, dict[str, Any]]:
    checks = {}
    if isinstance(mechanism, EvidenceDepletionSlotAttention):
        checks = _evidence_statements(mechanism(tokens), mechanism.epsilon)
    mechanism.start_noise = 0.0
    slots = mechanism(tokens).slots
    mechanism.start_noise = 1.0
    if isinstance(mechanism, EvidenceDepletionSlotAttention):
        apart = (slots[:, 1] - slots[:, 0]).abs().amax(1)  # [B]
        checks["two slots that start alike end apart"] = _at_least(float(apart.min()), ROUNDING)
    else:
        apart = (slots - slots[:, :1]).abs().amax((1, 2))  # [B]
        checks["all slots that start alike stay alike"] = _at_most(float(apart.max()), ROUNDING)
    return checks


def _evidence_statements(out: SlotAttentionOutput, epsilon: float) -> dict[str, dict[str, Any]]:
    evidence = torch.stack(out.evidence or [])  # [S + 1, B, L]
    taken = evidence[:-1] - evidence[1:]
    return {
        "evidence never grows": _at_least(float(taken.min()), 0.0),
        "evidence stays above epsilon": _at_least(float(evidence.min()), epsilon - ROUNDING),
        "evidence starts at one": _at_most(float(evidence.max()), 1.0),
        "a slot takes at most one token's worth": _at_most(float(taken.sum(2).max()), 1.0 + ROUNDING),
    }


def _at_least(value: float, bound: float) -> dict[str, Any]:
    return {"worst": value, "at_least": bound, "holds": value >= bound}


def _at_most(value: float, bound: float) -> dict[str, Any]:
    return {"worst": value, "at_most": bound, "holds": value <= bound}


def _worse(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    pick = min if "at_least" in first else max
    return pick(first, second, key=lambda check: check["worst"])
