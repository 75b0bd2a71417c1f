"""Counting, learnt last: the existence head fitted to a finished network, and the threshold it is read at.

While masks still change, what tells a source from a left-over changes with them, and a count learnt on the
way swings. So the head is fitted afterwards, on the facts of frozen slots of many mixtures drawn from the
training recordings: to which slots the best assignment gives the true sources, and to how many there are
(the likelihood of the count when slots exist independently). The threshold is the one that counts best on
mixtures of recordings that neither network nor head was trained on, among those that call enough of the true
sources: a sound that is missed is lost to its user, a stem too many is not. A network's counter, trained
before, has its say there too; the head is fitted without it.
"""

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from separator.checkpoint import save_model
from separator.counting import count_distribution, joined_existence
from separator.layers import FLOOR_LEVEL, ExistenceHead, slot_energy
from separator.losses import best_assignment, pairwise_si_sdr
from separator.network import NetworkConfig, SeparationNetwork
from separator.stft import STFT

THRESHOLDS = np.linspace(0.1, 0.9, 81)


@dataclass(frozen=True)
class CalibrationConfig:
    """How the head is fitted."""

    AT_LEAST: ClassVar[dict[str, float]] = {
        **dict.fromkeys(("n_mixtures", "epochs", "batch_size"), 1),
        **dict.fromkeys(("learning_rate", "weight_decay", "min_recall", "seed"), 0),
    }
    AT_MOST: ClassVar[dict[str, float]] = {"min_recall": 1}

    n_mixtures: int = 4000
    """Of training recordings, on which the head is fitted."""
    epochs: int = 25
    batch_size: int = 64
    learning_rate: float = 2e-3
    weight_decay: float = 0.3
    min_recall: float = 0.9
    seed: int = 0


class SlotSet(NamedTuple):
    """What the head reads of N mixtures, and the truth."""

    facts: Tensor
    """[N, S, N_FACTS + N_SEARCH_FACTS]."""
    exists: Tensor
    """[N, S], 1 where a source is assigned."""
    tried: Tensor
    """[N, S], 1 where decoding came to the slot."""
    energy: Tensor
    """[N, S], of the slots."""
    counted: Tensor | None = None
    """[N, C], logits of the network's counter, where it has one."""


def release(
    network: SeparationNetwork,
    heard: Iterable[Tensor],
    unheard: Iterable[Tensor],
    config: CalibrationConfig,
    model: Path,
    steps: int,
) -> dict[str, Any]:
    """Calibrate a trained network, write it to the folder ``model``, and return what is told of it.

    Args:
        network: as training left it; its existence head and threshold are fitted in place.
        heard: sources [K, time] of mixtures of the training recordings.
        unheard: the same of validation recordings.
        config: how the head is fitted.
        model: folder of the model.
        steps: of training.
    """
    network.config, accuracy = calibrate(network, heard, unheard, config)
    facts = {"steps": steps, "count_accuracy_validation": round(accuracy, 4)}
    save_model(network, model, {"training": facts})
    return {"model": str(model), "min_existence": network.config.min_existence, **facts}


def calibrate(
    network: SeparationNetwork,
    heard: Iterable[Tensor],
    unheard: Iterable[Tensor],
    config: CalibrationConfig,
) -> tuple[NetworkConfig, float]:
    """Fit ``network.existence`` in place; return the config with its threshold, and how often it is right.

    Mixtures are given as their sources [K, time]. The head is fitted to those ``heard``, the threshold to
    those ``unheard``, of which the share with the right count is returned.
    """
    network.eval()
    seen, unseen = collect_slots(network, heard), collect_slots(network, unheard)
    head = fit_head(seen, config)
    network.existence.load_state_dict(head.state_dict())
    threshold, accuracy = best_threshold(probabilities(head, unseen), unseen.exists, config.min_recall)
    return dataclasses.replace(network.config, min_existence=threshold), accuracy


def collect_slots(network: SeparationNetwork, mixtures: Iterable[Tensor]) -> SlotSet:
    """Run the network on sums of sources [K, time] and keep what its existence head was given."""
    seen: list[Tensor] = []
    counted: list[Tensor] = []
    energy: list[Tensor] = []
    hooks = [network.existence.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))]
    if network.counter is not None:
        hooks.append(network.counter.register_forward_hook(lambda *call: counted.append(call[2].logits[0])))
    stft = STFT(network.config.n_fft, network.config.hop_length)
    n_slots = network.config.n_slots
    truths = []
    with torch.no_grad():
        for index, sources in enumerate(mixtures):
            torch.manual_seed(index)
            mixture = stft(sources.sum(0))[None]
            masks = network(mixture).masks
            energy.append(slot_energy(masks, mixture)[0])
            quality = pairwise_si_sdr(masks, mixture, stft(sources)[None])
            slots = best_assignment(-quality, torch.ones(1, len(sources), dtype=torch.bool))
            truths.append(torch.zeros(n_slots).index_fill(0, slots[0], 1.0))
    for hook in hooks:
        hook.remove()

    facts = [nn.functional.pad(f, (0, 0, 0, n_slots - len(f)), value=FLOOR_LEVEL) for f in seen]
    tried = [torch.arange(n_slots) < len(f) for f in seen]
    return SlotSet(
        torch.stack(facts),
        torch.stack(truths),
        torch.stack(tried).float(),
        torch.stack(energy),
        torch.stack(counted) if counted else None,
    )


def fit_head(data: SlotSet, config: CalibrationConfig) -> ExistenceHead:
    """Fit a new head by the cross-entropy of slots and of counts."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        head = ExistenceHead()
        optimizer = torch.optim.AdamW(
            head.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay
        )
        steps = config.epochs * -(-len(data.facts) // config.batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(config.epochs):
            for rows in torch.randperm(len(data.facts)).split(config.batch_size):
                facts, exists, tried = (values[rows] for values in data[:3])
                logits = head(facts)
                loss = nn.functional.binary_cross_entropy_with_logits(logits, exists, tried)
                counts = count_distribution(torch.sigmoid(logits) * tried)
                likelihood = counts.gather(1, exists.sum(1, keepdim=True).long())
                loss = loss - torch.log(likelihood + 1e-6).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return head.eval()


def probabilities(head: ExistenceHead, data: SlotSet) -> Tensor:
    """Existence probability [N, S], the counter heard; zero where decoding did not come to the slot."""
    with torch.no_grad():
        logits = head(data.facts)
    if data.counted is None:
        return torch.sigmoid(logits) * data.tried
    return joined_existence(logits, data.facts, data.energy, data.counted) * data.tried


def best_threshold(probability: Tensor, exists: Tensor, min_recall: float) -> tuple[float, float]:
    """The threshold on ``probability`` [N, S] that counts most mixtures right, and their share.

    Only thresholds that call at least ``min_recall`` of the slots with a source (``exists`` [N, S]) are
    looked at, or the lowest one where none does; of equals the middle one is taken.
    """
    truth = exists.numpy() > 0
    called = probability.numpy()[None] >= THRESHOLDS[:, None, None]  # [threshold, N, S]
    accuracy = (called.sum(2) == truth.sum(1)).mean(1)
    recall = (called & truth).sum((1, 2)) / max(1, truth.sum())
    allowed = recall >= min(min_recall, float(recall.max()))
    best = np.flatnonzero(allowed & (accuracy >= accuracy[allowed].max() - 1e-9))
    middle = int(best[len(best) // 2])
    return round(float(THRESHOLDS[middle]), 3), float(accuracy[middle])
