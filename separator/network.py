"""The separation network: a spectrogram in, one mask per slot and the residual's mask out.

    spectrogram -> bands (log power) -> U-Net -> token grid -> recurrent context -> slots, one after another
                                          \\-> embeddings of bins                       \\-> masks

Low bins are bands of their own, higher ones are merged ever wider, so that half the frequencies cost
nothing. Tokens are cells of `BANDS_PER_TOKEN` bands by `FRAMES_PER_TOKEN` frames. A slot starts at the
strongest token that is not explained yet, gathers what belongs to it by attention, and is decoded into one
query per token; its logit at a bin is the dot product of that query and the bin's embedding. Masks are the
softmax of the slots' logits and of `RESIDUAL_LOGIT`, so the masks of slots and residual sum to one.
While slots are still being found, the *claim* of a slot (the sigmoid of its logits, pooled to the tokens)
depletes the evidence of the next.

A slot exists by facts about it and, in a network that has a `SourceCounter` and is not in training, by how
many sources that hears.

Reference: Houba, "When Attention Collapses", NeurIPS 2026 (slots, evidence); Ronneberger et al., "U-Net",
2015.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from separator.attention import SlotAttention, SlotAttentionOutput, build_mechanism, mechanism_options
from separator.counting import CounterConfig, SourceCounter, joined_existence
from separator.errors import SeparatorError
from separator.layers import (
    N_FACTS,
    Bands,
    Encoder,
    ExistenceHead,
    SlotDecoder,
    band_matrix,
    search_facts,
    slot_energy,
    slot_facts,
    whole_cells,
)
from separator.settings import plain, settings_from

N_LEVELS = 4  # of the U-Net
BANDS_PER_TOKEN = 8
FRAMES_PER_TOKEN = 4
RESIDUAL_LOGIT = -4.0  # what no slot claims even this much goes to the residual
NEVER = -30.0  # existence logit of a slot that was not even tried


@dataclass(frozen=True)
class NetworkConfig:
    """Everything that decides the shape and the behaviour of a `SeparationNetwork`."""

    AT_LEAST: ClassVar[dict[str, float]] = {
        **dict.fromkeys(("sample_rate", "hop_length", "n_bands", "n_linear_bands", "widths"), 1),
        **dict.fromkeys(("embedding", "n_slots", "n_iter"), 1),
        **dict.fromkeys(("n_context", "n_refine", "gamma", "tau", "min_existence", "stop_below"), 0),
        "n_fft": 2,
    }
    AT_MOST: ClassVar[dict[str, float]] = {"min_existence": 1, "stop_below": 1}

    sample_rate: int = 16_000
    n_fft: int = 512
    hop_length: int = 256
    n_bands: int = 128
    n_linear_bands: int = 64
    widths: tuple[int, int, int, int] = (16, 32, 64, 96)
    n_context: int = 2
    embedding: int = 24
    n_slots: int = 4
    n_iter: int = 2
    n_refine: int = 1
    gamma: float = 3.0
    tau: float = 0.3
    mechanism: str = "evidence_claim"
    min_existence: float = 0.5
    stop_below: float = 0.005
    counter: CounterConfig | None = None
    """Of the counter that has a say in which slots exist; None: there is none."""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NetworkConfig":
        """Build from plain values such as a TOML table.

        Raises:
            SeparatorError: a key is unknown, or a value cannot be.
        """
        values = dict(values)
        if "counter" in values:
            values["counter"] = CounterConfig.from_dict(values["counter"])
        config = settings_from(cls, values, "network")
        if len(config.widths) != N_LEVELS:
            raise SeparatorError(f"network setting widths = {list(config.widths)}; pass {N_LEVELS} of them")
        if config.n_bands % BANDS_PER_TOKEN or config.n_bands > config.n_fft // 2 + 1:
            raise SeparatorError(
                f"network setting n_bands = {config.n_bands}; pass a multiple of {BANDS_PER_TOKEN} up to the "
                f"{config.n_fft // 2 + 1} bins of n_fft = {config.n_fft}"
            )
        if config.n_linear_bands > config.n_bands:
            raise SeparatorError(f"network setting n_linear_bands is above n_bands = {config.n_bands}")
        if (counter := config.counter) is not None:
            seen = [(c.sample_rate, c.n_fft, c.hop_length) for c in (config, counter)]
            if seen[0] != seen[1]:
                raise SeparatorError(
                    f"the counter's sample_rate, n_fft, hop_length are {seen[1]}, the network's {seen[0]}; "
                    "train it on the network's spectrograms"
                )
        return config

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` takes back."""
        values = {key: plain(value) for key, value in dataclasses.asdict(self).items()}
        return {key: value for key, value in values.items() if value is not None}


class Guidance(NamedTuple):
    """What training compares with the true sources; L tokens, each a cell of C bands * frames."""

    masks: Tensor
    """[B, K, F, T], of slots that attended to just the true sources: what slot attention has to find."""
    guided_claims: Tensor
    """[B, K, L, C], logits of what those slots claim."""
    claims: Tensor
    """[B, S, L, C], logits of what the slots that were found claim."""
    shares: Tensor
    """[B, K, L, C], the true sources' shares of power."""
    weights: Tensor
    """[B, L, C], how much each band and frame counts, one in all."""
    attended: Tensor
    """[B, S, K], share of a slot's attention that lies on a source."""


class Decomposition(NamedTuple):
    """What the network says about a batch of spectrograms."""

    masks: Tensor
    """[B, S, F, T], in [0, 1]; with `residual_mask` they sum to one."""
    residual_mask: Tensor
    """[B, F, T]."""
    existence_logits: Tensor
    """[B, S]."""
    attn: Tensor
    """[B, S, L], attention over the tokens, L = bands * time of `token_grid`."""
    evidence: list[Tensor] | None
    """S + 1 tensors [B, L], remaining before the first and after every slot; None for parallel attention."""
    token_grid: tuple[int, int]
    """(bands, time) of the tokens."""
    guidance: Guidance | None = None
    """Only where the true sources were given."""


class SeparationNetwork(nn.Module):
    """Encoder, slot attention and mask readout; the weights do not depend on the number of slots."""

    interpolation: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.widths[-1]
        matrix = band_matrix(config.n_fft // 2 + 1, config.n_bands, config.n_linear_bands)
        self.register_buffer("interpolation", matrix, persistent=False)
        self.bands = Bands(config.n_fft // 2 + 1, config.n_bands, config.n_linear_bands)
        self.encoder = Encoder(config.widths, config.n_context, config.embedding)
        self.norm = nn.LayerNorm(width)
        options: dict[str, Any] = {"n_slots": config.n_slots, "d_model": width, "n_iter": config.n_iter}
        options |= {"tau": config.tau, "gamma": config.gamma}
        taken = mechanism_options(config.mechanism)
        attention = build_mechanism(config.mechanism, **{k: v for k, v in options.items() if k in taken})
        if not isinstance(attention, SlotAttention):
            raise SeparatorError(
                f"mechanism={config.mechanism!r} finds one number of slots only; choose another, "
                "such as 'evidence_claim'"
            )
        self.attention = attention
        self.seed = nn.Linear(width, width)
        self.decoder = SlotDecoder(width, config.embedding)
        self.presence = nn.Linear(N_FACTS, 1)
        self.existence = ExistenceHead()
        self.counter = None if config.counter is None else SourceCounter(config.counter)
        with torch.no_grad():  # a slot that claimed less than a hundredth fades out
            self.presence.weight.copy_(torch.tensor([[0.0, 3.0, 0.0, 0.0, 0.0, 0.0]]))
            self.presence.bias.fill_(6.0)

    def forward(
        self,
        spectrogram: Tensor,
        *,
        n_slots: int | None = None,
        n_refine: int | None = None,
        sources: Tensor | None = None,
    ) -> Decomposition:
        """Decompose complex spectrograms [B, F, T] into ``n_slots`` masks and a residual mask each.

        Slots that were found are refined ``n_refine`` times: each attends to what its masks took, and is
        decoded anew. With the true ``sources`` [B, K, F, T] the result has the `Guidance` for training.
        """
        n_frames = spectrogram.shape[-1]
        bands, power = self.bands(self.bands.power(spectrogram), FRAMES_PER_TOKEN)
        tokens, embeddings = self.encoder(bands)
        tokens = self.norm(tokens)  # [B, K, M, D]
        grid = (tokens.shape[1], tokens.shape[2])
        cells = _to_cells(embeddings.float(), grid)  # [B, K, M, bands * time of a cell, E]
        weights = _cell_weights(power, grid)  # [B, K, M, bands * time of a cell]
        n_slots = n_slots or self.config.n_slots
        out, claims, logits = self._find_slots(tokens, cells, weights, n_slots)
        shares, masks = self._masks(logits, n_frames)
        first, slots, facts = shares[:, :-1], out.slots, slot_facts(shares[:, :-1], weights)
        for _ in range(self.config.n_refine if n_refine is None else n_refine):
            slots = self._guided_slots(tokens, weights, shares[:, :-1])
            presence = nn.functional.logsigmoid(self.presence(facts))[..., None, None]  # [B, S, 1, 1, 1]
            logits = self._decode(slots, tokens, cells) + presence
            shares, masks = self._masks(logits, n_frames)
            facts = slot_facts(shares[:, :-1], weights)
        attn = nn.functional.normalize(out.attn.float(), p=1, dim=2)  # vanilla's sums to one over slots
        search = search_facts(attn, claims.float(), first, shares[:, :-1], weights)
        existence = self.existence(torch.cat([facts, search], -1))
        if self.counter is not None and not self.training:
            counted = self.counter(spectrogram).logits
            energy = slot_energy(masks[:, :-1], spectrogram)
            existence = torch.logit(joined_existence(existence, facts, energy, counted), 1e-6)
        found = Decomposition(masks[:, :-1], masks[:, -1], existence, out.attn, out.evidence, grid)
        if sources is not None:
            true = _cell_shares(self.bands.power(sources), grid)  # [B, K, K, M, cell]
            guided = self._decode(self._guided_slots(tokens, weights, true), tokens, cells)
            guided_masks = self._masks(guided, n_frames)[1][:, :-1]
            guided_claims, claims, true = (x.flatten(2, 3) for x in (guided, claims, true))
            parts = (weights / weights.sum((1, 2, 3), keepdim=True)).flatten(1, 2)
            owned = (true * parts[:, None]).sum(-1) / parts.sum(-1)[:, None]  # [B, K, L]
            attended = torch.einsum("bsl,bkl->bsk", attn, owned)
            guidance = Guidance(guided_masks, guided_claims, claims, true, parts, attended)
            found = found._replace(guidance=guidance)
        return _pad_slots(found, n_slots)

    def _masks(self, logits: Tensor, n_frames: int) -> tuple[Tensor, Tensor]:
        """Softmax of slots and residual: shares [B, S + 1, K, M, cell], masks of bins [B, S + 1, F, T]."""
        residual = torch.full_like(logits[:, :1], RESIDUAL_LOGIT)
        shares = torch.softmax(torch.cat([logits, residual], 1), dim=1)
        band_masks = _from_cells(shares, self.config.n_bands)[..., :n_frames]  # [B, S + 1, bands, time]
        with torch.autocast(logits.device.type, enabled=False):
            masks = torch.einsum("fk,bskt->bsft", self.interpolation, band_masks)
        return shares, masks

    def _decode(self, slots: Tensor, tokens: Tensor, cells: Tensor) -> Tensor:
        """Logits [B, S, K, M, cell] of slots [B, S, D]; one after another, which copies no tokens."""
        return torch.stack([self.decoder(slot, tokens, cells) for slot in slots.unbind(1)], 1)

    def _guided_slots(self, tokens: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
        """Slots [B, K, D] whose attention follows each source's ``shares`` [B, K, K, M, cell]."""
        attention = self.attention
        attn = (shares * weights[:, None]).sum(-1).flatten(2).square()  # [B, K, L]
        attn = attn / attn.sum(-1, keepdim=True).clamp(min=1e-20)
        pooled = attn @ attention.norm_in(tokens.flatten(1, 2).float())
        update = attention.proj_v(pooled).flatten(0, 1).float()
        slot: Tensor = attention.slot_mu[0].expand_as(update)
        for _ in range(self.config.n_iter):
            slot = attention.gru(update, slot)
            slot = slot + attention.mlp(attention.norm_mlp(slot))
        slots: Tensor = slot.unflatten(0, attn.shape[:2])
        return slots

    def _find_slots(
        self, tokens: Tensor, cells: Tensor, weights: Tensor, n_slots: int
    ) -> tuple[SlotAttentionOutput, Tensor, Tensor]:
        """Run the mechanism; return its output and [B, S, K, M, cell] logits of claims and of masks."""
        flat = tokens.flatten(1, 2).float()
        if not self.config.mechanism.startswith("evidence"):
            out = self.attention(flat, n_slots=n_slots)
            logits = self._decode(out.slots, tokens, cells)
            return out, logits, logits
        energy = weights.sum(-1).flatten(1)

        def seed(evidence: Tensor) -> Tensor:
            """Start at the strongest token not explained yet; in training, at one drawn by strength."""
            strength = self.config.gamma * torch.log(evidence) + torch.log(energy)  # as attention sees it
            if self.training:
                strength = strength - torch.log(-torch.log(torch.rand_like(strength).clamp(1e-7, 1 - 1e-7)))
            at = strength.argmax(1)[:, None, None].expand(-1, 1, flat.shape[2])
            start: Tensor = self.seed(flat.gather(1, at).squeeze(1))
            return start

        if self.config.mechanism != "evidence_claim":
            out = self.attention(flat, n_slots=n_slots, seed=seed)
            logits = self._decode(out.slots, tokens, cells)
            return out, logits, logits
        claims: list[Tensor] = []
        found: list[Tensor] = []
        left = torch.ones_like(energy)  # [B, L], as the attention's own evidence
        floor = float(self.attention.epsilon)  # type: ignore[arg-type]

        def claim(slot: Tensor) -> Tensor:
            nonlocal left
            logits = self.decoder(slot, tokens, cells)
            share = ((torch.sigmoid(logits) * weights).sum(-1) / weights.sum(-1)).flatten(1)
            claims.append(logits)
            # earlier slots keep what they took unless a later one is surer
            found.append(logits + torch.log(left).view(*logits.shape[:-1], 1))
            left = (left * (1 - share)).clamp(min=floor)
            return share

        order = torch.randperm(n_slots).tolist() if self.training else None
        out = self.attention(
            flat,
            n_slots=n_slots,
            slot_order=order,
            claim=claim,
            seed=seed,
            stop_below=None if self.training else self.config.stop_below,
            token_weights=energy,
        )
        if order is not None:
            claims, found = ([x[order.index(s)] for s in range(n_slots)] for x in (claims, found))
        return out, torch.stack(claims, 1), torch.stack(found, 1)


def _cell_shares(source_power: Tensor, grid: tuple[int, int]) -> Tensor:
    """Share [B, K, K, M, cell] of the power that each source has, of band power [B, K, bands, time]."""
    power = whole_cells(source_power, FRAMES_PER_TOKEN)
    share = power / power.sum(1, keepdim=True).clamp(min=1e-20)
    return torch.stack([_to_cells(part[:, None], grid).squeeze(-1) for part in share.unbind(1)], 1)


def _pad_slots(found: Decomposition, n_slots: int) -> Decomposition:
    """Give the slots that an early stop left out empty masks, no attention and the evidence as it was."""
    missing = n_slots - found.masks.shape[1]
    if missing == 0:
        return found
    pad = (0, 0, 0, 0, 0, missing)
    return found._replace(
        masks=nn.functional.pad(found.masks, pad),
        existence_logits=nn.functional.pad(found.existence_logits, (0, missing), value=NEVER),
        attn=nn.functional.pad(found.attn, pad[2:]),
        evidence=found.evidence and found.evidence + found.evidence[-1:] * missing,
    )


def _to_cells(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """[B, C, bands, time] to [B, token bands, token time, bands * time of a cell, C]."""
    x = x.unflatten(3, (grid[1], -1)).unflatten(2, (grid[0], -1))  # [B, C, K, k, M, m]
    return x.permute(0, 2, 4, 3, 5, 1).flatten(3, 4)


def _from_cells(x: Tensor, n_bands: int) -> Tensor:
    """[B, S, K, M, cell] to [B, S, bands, time]."""
    x = x.unflatten(-1, (n_bands // x.shape[2], -1))  # [B, S, K, M, k, m]
    return x.permute(0, 1, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)


def _cell_weights(power: Tensor, grid: tuple[int, int]) -> Tensor:
    """Compressed band power [B, bands, time] as weights [B, K, M, cell]; never zero."""
    return _to_cells((power + 1e-8).sqrt()[:, None], grid).squeeze(-1)
