"""The separation network: a spectrogram in, one mask per slot and the residual's mask out.

    spectrogram -> bands (log power) -> U-Net encoder -> token grid -> recurrent context -> slots, one after another
                                     \\-> bin embeddings                                      -> masks

Low bins are bands of their own, higher ones are merged ever wider, so that half the frequencies cost nothing. Tokens
are cells of ``BANDS_PER_TOKEN`` bands by ``FRAMES_PER_TOKEN`` frames. A slot is decoded on the token grid into one query
per token; its logit at a bin is the dot product of that query and the bin's embedding. Masks are the softmax of the
slots' logits and of a residual logit of zero, so the masks of slots and residual sum to one. While slots are still
being found, the *claim* of a slot (the sigmoid of its logits, pooled to the tokens) depletes the evidence of the next.

Reference: Houba, "When Attention Collapses", NeurIPS 2026 (the slot decoder); Ronneberger et al., 2015 (the U-Net).
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from separator.attention import SlotAttentionOutput, build_mechanism
from separator.errors import SeparatorError

BANDS_PER_TOKEN = 8
FRAMES_PER_TOKEN = 4
FLOOR_DB = -70.0  # of the band power re the mixture's mean; quieter bands look alike to the network

N_FACTS = 6  # of `slot_facts`
NEVER = -30.0  # existence logit of a slot that was not even tried


@dataclass(frozen=True)
class NetworkConfig:
    """Everything that decides the shape and the behaviour of a `SeparationNetwork`."""

    sample_rate: int = 16_000
    n_fft: int = 512
    hop_length: int = 256
    n_bands: int = 128
    n_linear_bands: int = 64
    widths: tuple[int, int, int, int] = (24, 48, 64, 96)
    n_context: int = 2
    embedding: int = 24
    n_slots: int = 4
    n_iter: int = 2
    gamma: float = 3.0
    tau: float = 0.3
    mechanism: str = "evidence_claim"
    min_existence: float = 0.5
    stop_below: float = 0.005

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "NetworkConfig":
        """Build from plain values such as a TOML table.

        Raises:
            SeparatorError: a key is unknown.
        """
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise SeparatorError(f"unknown network setting {unknown}; known are {sorted(known)}")
        return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return plain values that `from_dict` takes back."""
        return {key: list(v) if isinstance(v, tuple) else v for key, v in dataclasses.asdict(self).items()}


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
    guided_masks: Tensor | None = None
    """[B, K, F, T], of slots that attended to the true sources; only where those were given."""


def band_matrix(n_frequencies: int, n_bands: int, n_linear: int) -> Tensor:
    """Interpolation from bands to bins, [F, n_bands]: rows sum to one, so band masks become bin masks.

    The first ``n_linear`` bands are bins; further centres lie apart by steps that grow geometrically to the last bin.
    """
    low, high = 1.0, 2.0
    for _ in range(60):  # bisect the growth at which the steps just span the remaining bins
        growth = (low + high) / 2
        span = sum(growth**k for k in range(1, n_bands - n_linear + 1))
        low, high = (growth, high) if span < n_frequencies - n_linear else (low, growth)
    steps = [low**k for k in range(1, n_bands - n_linear + 1)]
    upper = n_linear - 1 + torch.cumsum(torch.tensor(steps, dtype=torch.float64), 0)
    centres = torch.cat([torch.arange(n_linear, dtype=torch.float64), upper])
    bins = torch.arange(n_frequencies, dtype=torch.float64)
    right = torch.searchsorted(centres, bins, right=True).clamp(1, n_bands - 1)
    fraction = ((bins - centres[right - 1]) / (centres[right] - centres[right - 1])).clamp(0, 1)
    matrix = torch.zeros(n_frequencies, n_bands, dtype=torch.float64)
    matrix[torch.arange(n_frequencies), right - 1] = 1 - fraction
    matrix[torch.arange(n_frequencies), right] += fraction
    return matrix.float()


class ConvBlock(nn.Module):
    """Residual block: two 3x3 convolutions, each normalised over the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, bands, time] to the same."""
        return nn.functional.relu(x + self.body(x))


class DualPath(nn.Module):
    """Context over the whole token grid: a bidirectional LSTM along frequency, then one along time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2)])
        self.recurrences = nn.ModuleList(
            [nn.LSTM(width, width // 2, bidirectional=True, batch_first=True) for _ in range(2)]
        )

    def forward(self, x: Tensor) -> Tensor:
        """[B, bands, time, D] to the same."""
        for axis, norm, recurrence in zip((1, 2), self.norms, self.recurrences, strict=True):
            rows = norm(x).movedim(axis, 2)  # [B, other, axis, D]
            context, _ = recurrence(rows.flatten(0, 1))
            x = x + context.unflatten(0, rows.shape[:2]).movedim(2, axis)
        return x


class Encoder(nn.Module):
    """U-Net over (bands, time): features of the token grid and embeddings of the bins."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        w0, w1, w2, w3 = config.widths
        self.stem = nn.Sequential(nn.Conv2d(2, w0, 3, padding=1), nn.ReLU(inplace=True), ConvBlock(w0))
        self.down1 = _down(w0, w1, (2, 2))
        self.down2 = _down(w1, w2, (2, 2))
        self.down3 = _down(w2, w3, (2, 1))
        self.context = nn.ModuleList([DualPath(w3) for _ in range(config.n_context)])
        self.up3 = nn.ConvTranspose2d(w3, w2, (2, 1), (2, 1))
        self.mix2 = ConvBlock(w2)
        self.up2 = nn.ConvTranspose2d(w2, w1, 2, 2)
        self.mix1 = ConvBlock(w1)
        self.up1 = nn.ConvTranspose2d(w1, w0, 2, 2)
        self.mix0 = nn.Sequential(ConvBlock(w0), nn.Conv2d(w0, config.embedding, 1))

    def forward(self, bands: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 2, bands, time] to tokens [B, token bands, token time, D] and embeddings [B, E, bands, time]."""
        level0 = self.stem(bands)
        level1 = self.down1(level0)
        level2 = self.down2(level1)
        tokens = self.down3(level2).permute(0, 2, 3, 1)  # [B, token bands, token time, D]
        for block in self.context:
            tokens = block(tokens)
        up2 = self.mix2(level2 + self.up3(tokens.permute(0, 3, 1, 2)))
        up1 = self.mix1(level1 + self.up2(up2))
        return tokens, self.mix0(level0 + self.up1(up1))


class SlotDecoder(nn.Module):
    """One slot's logits: what the slot itself asks of bins and tokens, and what it asks of each token's own bins.

    The slot's products with embeddings and tokens make slots differ from the first step on; the convolutions over
    tokens modulated by the slot add what depends on the place.
    """

    def __init__(self, width: int, embedding: int) -> None:
        super().__init__()
        self.bin_query = nn.Linear(width, embedding)
        self.token_query = nn.Linear(width, width + 1)
        self.modulation = nn.Linear(width, 2 * width)
        self.inner = nn.Conv2d(width, width, 3, padding=1)
        self.outer = nn.Conv2d(width, width, 3, padding=1)
        self.local_query = nn.Linear(width, embedding + 1)

    def forward(self, slot: Tensor, tokens: Tensor, cells: Tensor) -> Tensor:
        """Slot [N, D], tokens [N, K, M, D] and embeddings [N, K, M, cell, E] to logits [N, K, M, cell]."""
        scale, shift = self.modulation(slot)[:, None, None].chunk(2, dim=-1)
        x = (tokens * (1 + scale) + shift).permute(0, 3, 1, 2)
        x = x + self.outer(nn.functional.gelu(self.inner(nn.functional.gelu(x))))
        local = self.local_query(nn.functional.gelu(x.permute(0, 2, 3, 1)))  # [N, K, M, E + 1]
        whole = self.token_query(slot)[:, None, None]  # [N, 1, 1, D + 1]
        bins = self.bin_query(slot)[:, None, None] + local[..., :-1]
        level = (tokens * whole[..., :-1]).sum(-1) / math.sqrt(tokens.shape[-1]) + whole[..., -1] + local[..., -1]
        logits = torch.einsum("nkme,nkmce->nkmc", bins / math.sqrt(cells.shape[-1]), cells)
        return logits.float() + level.float()[..., None]


class ExistenceHead(nn.Module):
    """Decides which slots are sources from their vectors and facts, each seen beside all the others.

    It reads the slots without teaching them: counting must not bend what is separated.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(width + N_FACTS, 64), nn.GELU())
        self.outer = nn.Sequential(nn.Linear(3 * 64, 64), nn.GELU(), nn.Linear(64, 1))

    def forward(self, slots: Tensor, facts: Tensor) -> Tensor:
        """Slots [B, S, D] and `slot_facts` [B, S, N] to existence logits [B, S]."""
        each = self.inner(torch.cat([slots.detach(), facts.detach()], -1).float())
        share = 10 ** facts[..., :1].detach()  # empty slots weigh nothing, however many there are
        together = (share * each).sum(1, keepdim=True).expand_as(each)
        greatest = (share.sqrt() * each).amax(1, keepdim=True).expand_as(each)
        logits: Tensor = self.outer(torch.cat([each, together, greatest], -1))
        return logits.squeeze(-1)


def slot_facts(shares: Tensor, weights: Tensor) -> Tensor:
    """What a slot's masks say about it, [B, S, N_FACTS], for masks [B, S, K, M, cell] and cell weights.

    Level and claimed share (units of 10 dB re the mixture), how sure the masks are, and how alike the most alike
    other slot is in time, in frequency and in both (cosines of energy).
    """
    power = shares.square() * weights[:, None]
    energy, claimed = power.sum((2, 3, 4)), (shares * weights[:, None]).sum((2, 3, 4))
    total = weights.sum((1, 2, 3))[:, None]
    cells = power.sum(-1)  # [B, S, K, M]
    alike = [_most_alike(view) for view in (cells.flatten(2), cells.sum(2), cells.sum(3))]
    levels = [_log_level(energy / total), _log_level(claimed / total), energy / claimed.clamp(min=1e-12)]
    return torch.stack(levels + alike, -1)


def _most_alike(views: Tensor) -> Tensor:
    """Largest cosine of each of [B, S, N] with another one, [B, S]; zero for a single slot."""
    unit = nn.functional.normalize(views, dim=-1)
    cosines = unit @ unit.transpose(1, 2)
    others = 1 - torch.eye(views.shape[1], device=views.device)
    return (cosines * others).amax(-1)


class SeparationNetwork(nn.Module):
    """Encoder, slot attention and mask readout; the weights do not depend on the number of slots."""

    interpolation: Tensor
    pooling: Tensor
    positions: Tensor

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.widths[-1]
        matrix = band_matrix(config.n_fft // 2 + 1, config.n_bands, config.n_linear_bands)
        self.register_buffer("interpolation", matrix, persistent=False)
        self.register_buffer("pooling", (matrix / matrix.sum(0)).T.contiguous(), persistent=False)
        positions = torch.linspace(-1, 1, config.n_bands)[None, None, :, None]
        self.register_buffer("positions", positions, persistent=False)
        self.encoder = Encoder(config)
        self.norm = nn.LayerNorm(width)
        options: dict[str, Any] = {"n_slots": config.n_slots, "d_model": width, "n_iter": config.n_iter}
        if config.mechanism != "vanilla":
            options["tau"] = config.tau
        if config.mechanism.startswith("evidence"):
            options["gamma"] = config.gamma
        self.attention = build_mechanism(config.mechanism, **options)
        self.seed = nn.Linear(width, width)
        self.decoder = SlotDecoder(width, config.embedding)
        self.existence = ExistenceHead(width)

    def forward(
        self, spectrogram: Tensor, *, n_slots: int | None = None, sources: Tensor | None = None
    ) -> Decomposition:
        """Decompose complex spectrograms [B, F, T] into ``n_slots`` masks and a residual mask each.

        With the true ``sources`` [B, K, F, T] as well, `Decomposition.guided_masks` says what the decoder makes of
        slots that attended to just those: the target that slot attention has to find, and a way to train the rest.
        """
        n_frames = spectrogram.shape[-1]
        bands, power = self._bands(self._band_power(spectrogram))
        tokens, embeddings = self.encoder(bands)
        tokens = self.norm(tokens)  # [B, K, M, D]
        grid = (tokens.shape[1], tokens.shape[2])
        cells = _to_cells(embeddings.float(), grid)  # [B, K, M, bands * time of a cell, E]
        weights = _cell_weights(power, grid)  # [B, K, M, bands * time of a cell]
        n_slots = n_slots or self.config.n_slots
        out, logits = self._find_slots(tokens, cells, weights, n_slots)
        shares, masks = self._masks(logits, n_frames)
        existence = self.existence(out.slots, slot_facts(shares[:, :-1], weights))
        guided = None
        if sources is not None:
            slots = self._guided_slots(tokens, weights, self._band_power(sources))
            guided = self._masks(self._decode(slots, tokens, cells), n_frames)[1][:, :-1]
        found = Decomposition(
            masks[:, :-1], masks[:, -1], existence, out.attn, out.evidence, grid, guided_masks=guided
        )
        return _pad_slots(found, n_slots)

    def _masks(self, logits: Tensor, n_frames: int) -> tuple[Tensor, Tensor]:
        """Softmax over slots and a residual logit of zero: shares [B, S + 1, K, M, cell] and masks of bins."""
        shares = torch.softmax(torch.cat([logits, torch.zeros_like(logits[:, :1])], 1), dim=1)
        band_masks = _from_cells(shares, self.config.n_bands)[..., :n_frames]  # [B, S + 1, bands, time]
        with torch.autocast(logits.device.type, enabled=False):
            masks = torch.einsum("fk,bskt->bsft", self.interpolation, band_masks)
        return shares, masks

    def _decode(self, slots: Tensor, tokens: Tensor, cells: Tensor) -> Tensor:
        """Logits [B, S, K, M, cell] of slots [B, S, D]."""
        repeats = [x.repeat_interleave(slots.shape[1], 0) for x in (tokens, cells)]
        return self.decoder(slots.flatten(0, 1), *repeats).unflatten(0, slots.shape[:2])

    def _guided_slots(self, tokens: Tensor, weights: Tensor, source_power: Tensor) -> Tensor:
        """Slots [B, K, D] whose attention is the sources' share of the tokens, [B, K, bands, time] of power."""
        attention, grid = self.attention, weights.shape[1:3]
        power = nn.functional.pad(source_power, (0, -source_power.shape[-1] % FRAMES_PER_TOKEN))
        share = power / power.sum(1, keepdim=True).clamp(min=1e-20)
        cells = torch.stack([_to_cells(part[:, None], grid).squeeze(-1) for part in share.unbind(1)], 1)
        attn = (cells * weights[:, None]).sum(-1).flatten(2).square()  # [B, K, L]
        attn = attn / attn.sum(-1, keepdim=True).clamp(min=1e-20)
        update = attention.proj_v(attn @ attention.norm_in(tokens.flatten(1, 2).float())).flatten(0, 1).float()
        slot = attention.slot_mu[0].expand_as(update)
        for _ in range(self.config.n_iter):
            slot = attention.gru(update, slot)
            slot = slot + attention.mlp(attention.norm_mlp(slot))
        return slot.unflatten(0, attn.shape[:2])

    def _band_power(self, spectrogram: Tensor) -> Tensor:
        """Complex (..., F, T) to power (..., bands, time)."""
        power = torch.view_as_real(spectrogram).square().sum(-1)
        return torch.einsum("kf,...ft->...kt", self.pooling, power)

    def _bands(self, power: Tensor) -> tuple[Tensor, Tensor]:
        """Network input [B, 2, bands, time] and power relative to the mixture's mean, of power [B, bands, time]."""
        power = power / power.mean((1, 2), keepdim=True).clamp(min=1e-20)
        power = nn.functional.pad(power, (0, -power.shape[-1] % FRAMES_PER_TOKEN))
        level = (10 / -FLOOR_DB) * torch.log10(power + 10 ** (FLOOR_DB / 10)) + 0.5
        return torch.stack([level, self.positions[:, 0].expand_as(level)], 1), power

    def _find_slots(
        self, tokens: Tensor, cells: Tensor, weights: Tensor, n_slots: int
    ) -> tuple[SlotAttentionOutput, Tensor]:
        """Run the attention mechanism; return its output and the slots' logits [B, S, K, M, cell]."""
        flat = tokens.flatten(1, 2).float()
        if self.config.mechanism == "vanilla":
            out = self.attention(flat, n_slots=n_slots)
            return out, self._decode(out.slots, tokens, cells)
        energy = weights.sum(-1).flatten(1)

        def seed(evidence: Tensor) -> Tensor:
            """Start at the strongest token that is not explained yet; in training, at one drawn by strength."""
            strength = torch.log(evidence * energy)
            if self.training:
                strength = strength - torch.log(-torch.log(torch.rand_like(strength).clamp(1e-7, 1 - 1e-7)))
            at = strength.argmax(1)[:, None, None].expand(-1, 1, flat.shape[2])
            return self.seed(flat.gather(1, at).squeeze(1))

        if self.config.mechanism != "evidence_claim":
            out = self.attention(flat, n_slots=n_slots, seed=seed)
            return out, self._decode(out.slots, tokens, cells)
        found: list[Tensor] = []
        left = torch.ones_like(energy)  # [B, L]

        def claim(slot: Tensor) -> Tensor:
            nonlocal left
            logits = self.decoder(slot, tokens, cells)
            share = ((torch.sigmoid(logits) * weights).sum(-1) / weights.sum(-1)).flatten(1)
            found.append(logits + torch.log(left).view(*logits.shape[:-1], 1))  # against what earlier slots left
            left = (left * (1 - share)).clamp(min=self.attention.epsilon)
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
            found = [found[order.index(s)] for s in range(len(found))]
        return out, torch.stack(found, 1)


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


def _down(narrow: int, wide: int, stride: tuple[int, int]) -> nn.Sequential:
    """A strided convolution and a residual block."""
    kernel = (2 * stride[0], 2 * stride[1] if stride[1] > 1 else 3)
    return nn.Sequential(
        nn.Conv2d(narrow, wide, kernel, stride, padding=1, bias=False), nn.BatchNorm2d(wide), ConvBlock(wide)
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


def _log_level(share: Tensor) -> Tensor:
    """A share of energy in units of 10 dB, at least -60 dB."""
    return torch.log10(share + 1e-6)

