"""The trainer of overlapping binaries: fresh mixtures of one bank, the posterior's own loss.

The loss is the negative log likelihood, in nats a source, of the count and of the parameters,

    sum over matched (slot, source) of -log q(source | slot) + sum over slots of BCE(existence; matched)

and the matching is the one that makes it least. Terms that keep slots apart are the method's, as elsewhere.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from separator.benchmarks.gw_data import (
    Bank,
    GalacticMixtures,
    Population,
    cache_dir,
    draw_mixtures,
    load_bank,
)
from separator.benchmarks.gw_model import (
    INFERRED_COLUMNS,
    BinaryModel,
    BinaryPrediction,
    build_binary_model,
)
from separator.benchmarks.gw_waveforms import Band
from separator.benchmarks.losses import LossWeights, coverage_loss, similarity_loss
from separator.benchmarks.methods import mechanism_of, method_of
from separator.errors import SeparatorError
from separator.losses import best_assignment

TRAIN_SEED, TEST_SEED = 0, 1  # of the banks; the seed of a run draws its mixtures from them
TEST_OFFSET = 10_000
DATA_OFFSET = 20_000
NOISE_OFFSET = 30_000
N_TEST_WAVEFORMS = 8192
N_STANDARD = 4096  # mixtures that centre and scale of the parameters are taken from
WARM_UP = 0.15  # of the steps
GRADIENT_NORM = 1.0

Progress = Callable[[float], None]


@dataclass(frozen=True)
class BinarySetting:
    """The budget and the sizes of a run.

    Attributes:
        epochs: of `n_train` mixtures each, all of them drawn anew.
        frequency: lower edge of the band, Hz.
        spread_bins: width of the window that holds a mixture's frequencies.
        n_waveforms: binaries of the bank that training mixtures are drawn from.
        options: the mechanism's own options, such as gamma and tau.
    """

    epochs: int = 40
    n_train: int = 3200
    n_test: int = 1000
    batch_size: int = 64
    learning_rate: float = 8e-4
    frequency: float = 3e-3
    n_bins: int = 256
    spread_bins: int = 64
    max_sources: int = 5
    n_waveforms: int = 32768
    n_tokens: int = 32
    n_slots: int = 6
    d_model: int = 64
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("epochs", "n_train", "n_test", "batch_size", "n_waveforms"):
            if getattr(self, name) < 1:
                raise SeparatorError(f"{name}={getattr(self, name)} is not positive; pass at least 1")
        if self.n_train < self.batch_size:
            raise SeparatorError(
                f"n_train={self.n_train} is less than batch_size={self.batch_size}: there is no whole batch; "
                "pass more mixtures"
            )
        if self.n_slots < self.max_sources:
            raise SeparatorError(
                f"n_slots={self.n_slots} is less than max_sources={self.max_sources}; pass one slot more"
            )
        _ = self.population

    @property
    def population(self) -> Population:
        """Which binaries are mixed."""
        return Population(Band(self.frequency, self.n_bins), self.max_sources, self.spread_bins)

    def banks(self, progress: Progress | None = None) -> tuple[Bank, Bank]:
        """Return the banks for training and test; what is not in the cache is made."""
        n_all = self.n_waveforms + N_TEST_WAVEFORMS
        share = self.n_waveforms / n_all
        train = load_bank(
            self.population, self.n_waveforms, seed=TRAIN_SEED, progress=_part(progress, 0, share)
        )
        test = load_bank(
            self.population, N_TEST_WAVEFORMS, seed=TEST_SEED, progress=_part(progress, share, 1 - share)
        )
        return train, test

    def test_mixtures(self, bank: Bank, seed: int) -> GalacticMixtures:
        """Draw the test mixtures of a seed."""
        generator = torch.Generator().manual_seed(seed + TEST_OFFSET)
        return draw_mixtures(bank, self.population, self.n_test, generator)

    def model(self, method: str, seed: int) -> BinaryModel:
        """Build a model of this setting; the seed gives its start."""
        sizes = {name: getattr(self, name) for name in ("n_bins", "d_model", "n_tokens", "n_slots")}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build_binary_model(mechanism_of(method), **sizes, **self.options)


class Pairs(NamedTuple):
    """Which slot answers for which source, source after source of all mixtures."""

    mixture: Tensor  # [n]
    slot: Tensor  # [n]
    source: Tensor  # [n]


def inferred(params: Tensor) -> Tensor:
    """Return the parameters [..., P] that the posterior is over, of all eight [..., 8]."""
    return params[..., list(INFERRED_COLUMNS)]


@torch.no_grad()
def match_binaries(model: BinaryModel, found: BinaryPrediction, params: Tensor, counts: Tensor) -> Pairs:
    """Return the pairs of least loss: each of the inferred parameters [B, K, P] gets a slot of its own."""
    active = torch.arange(params.shape[1]) < counts.unsqueeze(1)
    mixture, source = active.nonzero(as_tuple=True)
    # A slot that is matched costs softplus(-x), one that is not softplus(x): the difference is -x.
    density = model.log_prob(found.slots[mixture], params[mixture, source].unsqueeze(1))  # [n, S]
    cost = params.new_zeros(*found.exist_logits.shape, params.shape[1])  # [B, S, K]
    cost[mixture, :, source] = -(density + found.exist_logits[mixture])
    return Pairs(mixture, best_assignment(cost, active)[mixture, source], source)


def binary_loss(
    model: BinaryModel, found: BinaryPrediction, params: Tensor, counts: Tensor, weights: LossWeights
) -> Tensor:
    """Return the loss of a batch, nats a source; inferred parameters [B, K, P], counts [B]."""
    pairs = match_binaries(model, found, params, counts)
    density = model.log_prob(found.slots[pairs.mixture, pairs.slot], params[pairs.mixture, pairs.source])
    exists = torch.zeros_like(found.exist_logits)
    exists[pairs.mixture, pairs.slot] = 1
    entropy = F.binary_cross_entropy_with_logits(found.exist_logits, exists, reduction="sum")
    loss = (entropy - density.sum()) / counts.sum()
    if weights.diversity:
        loss = loss + weights.diversity * similarity_loss(found.slots)
    if weights.orthogonality:
        loss = loss + weights.orthogonality * similarity_loss(found.attn)
    if weights.coverage:
        loss = loss + weights.coverage * coverage_loss(found.attn)
    return loss


class Trained(NamedTuple):
    """A trained model, the mean loss of its last epoch, and how long it took."""

    model: BinaryModel
    final_loss: float
    seconds: float


def fit(
    method: str, setting: BinarySetting, bank: Bank, *, seed: int, progress: Progress | None = None
) -> Trained:
    """Train one model on mixtures of a bank: Adam, warm-up and cosine, gradients clipped at norm 1."""
    model, weights = setting.model(method, seed).train(), method_of(method).weights
    generator = torch.Generator().manual_seed(seed + DATA_OFFSET)
    _standardise(model, bank, setting, generator)
    n_steps = setting.n_train // setting.batch_size
    optimizer = torch.optim.Adam(model.parameters(), lr=setting.learning_rate, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate(setting.epochs * n_steps))
    started = time.perf_counter()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed + NOISE_OFFSET)
        for epoch in range(1, setting.epochs + 1):
            total = 0.0
            for _ in range(n_steps):
                batch = draw_mixtures(bank, setting.population, setting.batch_size, generator)
                found = model(batch.data)
                loss = binary_loss(model, found, inferred(batch.params), batch.counts, weights)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), GRADIENT_NORM)
                optimizer.step()
                schedule.step()
                total += float(loss.detach())
            if progress is not None:
                progress(epoch / setting.epochs)
    return Trained(model.eval(), total / n_steps, time.perf_counter() - started)


def weights_path(method: str, setting: BinarySetting, seed: int) -> Path:
    """Where the weights of a run are kept, for pictures."""
    identity = json.dumps({"method": method, "seed": seed, **asdict(setting)}, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()
    return cache_dir() / "models" / f"binaries-{method}-{seed}-{digest[:12]}.safetensors"


def save_weights(model: BinaryModel, path: Path) -> None:
    """Write the weights of a model."""
    from safetensors.torch import save_file

    temporary = path.with_suffix(".tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, temporary)
    temporary.replace(path)


def load_trained(method: str, setting: BinarySetting, seed: int) -> BinaryModel:
    """Return the model of a run that was made here.

    Raises:
        SeparatorError: it was not.
    """
    from safetensors.torch import load_file

    path = weights_path(method, setting, seed)
    if not path.exists():
        raise SeparatorError(f"no weights of {method} with {seed=} at {path}; run the experiment here first")
    model = setting.model(method, seed)
    model.load_state_dict(load_file(path))
    return model.eval()


def _standardise(model: BinaryModel, bank: Bank, setting: BinarySetting, generator: torch.Generator) -> None:
    drawn = draw_mixtures(bank, setting.population, N_STANDARD, generator)
    exists = torch.arange(setting.max_sources) < drawn.counts.unsqueeze(1)
    model.standardise(inferred(drawn.params)[exists])


def _rate(n_steps: int) -> Callable[[int], float]:
    """Return the factor of the learning rate by step: up in a line, down along a cosine."""
    n_warm = max(1, round(WARM_UP * n_steps))

    def factor(step: int) -> float:
        if step < n_warm:
            return (step + 1) / n_warm
        return 0.5 * (1 + math.cos(math.pi * (step - n_warm) / max(1, n_steps - n_warm)))

    return factor


def _part(progress: Progress | None, start: float, share: float) -> Progress:
    """Return what tells `progress` the share of the whole from that of a part of it."""
    return lambda done: None if progress is None else progress(start + share * done)
