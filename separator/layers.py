"""The parts of the separation network: bands, U-Net encoder, slot decoder, existence head.

Shapes are those of the token grid: B batch, K token bands, M token times, D features, E embedding. A *cell*
is the bands and frames of one token.
"""

import math

import torch
from torch import Tensor, nn

N_FACTS = 6  # of `slot_facts`
N_SEARCH_FACTS = 3  # of `search_facts`
FLOOR_DB = -70.0  # of the band power re the mixture's mean; quieter bands look alike to the network
FLOOR_LEVEL = -6.0  # least level of the facts, in units of 10 dB
EMPTY_LEVEL = FLOOR_LEVEL + 0.01


def band_matrix(n_frequencies: int, n_bands: int, n_linear: int) -> Tensor:
    """Interpolation from bands to bins, [F, n_bands]: rows sum to one, so band masks become bin masks.

    The first ``n_linear`` bands are bins; the steps between further centres grow geometrically.
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


class Bands(nn.Module):
    """Complex spectrograms as the networks see them: log power in bands, and where each band lies."""

    pooling: Tensor
    positions: Tensor

    def __init__(self, n_frequencies: int, n_bands: int, n_linear: int) -> None:
        super().__init__()
        matrix = band_matrix(n_frequencies, n_bands, n_linear)
        self.register_buffer("pooling", (matrix / matrix.sum(0)).T.contiguous(), persistent=False)
        self.register_buffer("positions", torch.linspace(-1, 1, n_bands)[:, None], persistent=False)

    def power(self, spectrogram: Tensor) -> Tensor:
        """Complex (..., F, T) to power (..., bands, T)."""
        power = torch.view_as_real(spectrogram).square().sum(-1)
        return torch.einsum("kf,...ft->...kt", self.pooling, power)

    def forward(self, power: Tensor, multiple: int = 1) -> tuple[Tensor, Tensor]:
        """Network input [B, 2, bands, time] of a power [B, bands, T], and that power relative to its mean.

        Silent frames fill both up to a ``multiple``.
        """
        power = power / power.mean((1, 2), keepdim=True).clamp(min=1e-20)
        power = whole_cells(power, multiple)
        level = (10 / -FLOOR_DB) * torch.log10(power + 10 ** (FLOOR_DB / 10)) + 0.5
        return torch.stack([level, self.positions.expand_as(level)], 1), power


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

    def __init__(self, widths: tuple[int, int, int, int], n_context: int, embedding: int) -> None:
        super().__init__()
        w0, w1, w2, w3 = widths
        self.stem = nn.Sequential(nn.Conv2d(2, w0, 3, padding=1), nn.ReLU(inplace=True), ConvBlock(w0))
        self.down1 = _down(w0, w1, (2, 2))
        self.down2 = _down(w1, w2, (2, 2))
        self.down3 = _down(w2, w3, (2, 1))
        self.context = nn.ModuleList([DualPath(w3) for _ in range(n_context)])
        self.up3 = nn.ConvTranspose2d(w3, w2, (2, 1), (2, 1))
        self.mix2 = ConvBlock(w2)
        self.up2 = nn.ConvTranspose2d(w2, w1, 2, 2)
        self.mix1 = ConvBlock(w1)
        self.up1 = nn.ConvTranspose2d(w1, w0, 2, 2)
        self.mix0 = nn.Sequential(ConvBlock(w0), nn.Conv2d(w0, embedding, 1))

    def forward(self, bands: Tensor) -> tuple[Tensor, Tensor]:
        """[B, 2, bands, time] to tokens [B, K, M, D] and embeddings [B, E, bands, time]."""
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
    """One slot's logits: what the slot asks of all bins and tokens, and what it asks of each token's bins.

    The slot's products with embeddings and tokens make slots differ from the first step on; the convolutions
    over tokens modulated by the slot add what depends on the place.
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
        level = (
            (tokens * whole[..., :-1]).sum(-1) / math.sqrt(tokens.shape[-1]) + whole[..., -1] + local[..., -1]
        )
        logits: Tensor = torch.einsum("nkme,nkmce->nkmc", bins / math.sqrt(cells.shape[-1]), cells)
        total: Tensor = logits.float() + level.float()[..., None]
        return total


class ExistenceHead(nn.Module):
    """Decides which slots are sources from facts about them, each seen beside the stronger and weaker ones.

    It reads the facts without teaching them: counting must not bend what is separated. The vectors of the
    slots are left out, since heads that had them counted worse on recordings they were not fitted to.
    """

    def __init__(self, width: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        facts = N_FACTS + N_SEARCH_FACTS
        self.inner = nn.Sequential(nn.Linear(facts, width), nn.GELU(), nn.Dropout(dropout))
        self.outer = nn.Sequential(
            nn.Linear(5 * width, width), nn.GELU(), nn.Dropout(dropout), nn.Linear(width, 1)
        )

    def forward(self, facts: Tensor) -> Tensor:
        """Facts [B, S, N], `slot_facts` first, to existence logits [B, S]."""
        facts = facts.detach().float()
        level = facts[..., 0]  # [B, S]
        share = 10 ** level[..., None]
        # a slot at the floor of the levels is as none: it does not matter whether it was decoded
        each = self.inner(facts) * has_content(facts)[..., None]  # [B, S, width]
        weaker = (level[:, :, None] > level[:, None, :]).to(each)  # [B, S, other]
        beside = [weaker.transpose(1, 2) @ each, weaker @ each]
        together = (share * each).sum(1, keepdim=True).expand_as(each)
        greatest = (share.sqrt() * each).amax(1, keepdim=True).clamp(min=0).expand_as(each)
        logits: Tensor = self.outer(torch.cat([each, *beside, together, greatest], -1))
        return logits.squeeze(-1)


def slot_energy(masks: Tensor, spectrogram: Tensor) -> Tensor:
    """Energy [B, S] of the spectrogram [B, F, T] under masks [B, S, F, T]."""
    power = torch.view_as_real(spectrogram).square().sum(-1)
    return torch.einsum("bsft,bft->bs", masks.square(), power)


def slot_facts(shares: Tensor, weights: Tensor) -> Tensor:
    """What a slot's masks say about it, [B, S, N_FACTS], for masks [B, S, K, M, cell] and cell weights.

    Level and claimed share (units of 10 dB re the mixture), how sure the masks are, and how alike the most
    alike other slot is on the token grid, in time and in frequency (cosines of energy).
    """
    power = shares.square() * weights[:, None]
    energy, claimed = power.sum((2, 3, 4)), (shares * weights[:, None]).sum((2, 3, 4))
    total = weights.sum((1, 2, 3))[:, None]
    cells = power.sum(-1)  # [B, S, K, M]
    alike = [_most_alike(view) for view in (cells.flatten(2), cells.sum(2), cells.sum(3))]
    levels = [_log_level(energy / total), _log_level(claimed / total), energy / claimed.clamp(min=1e-12)]
    return torch.stack(levels + alike, -1)


def has_content(facts: Tensor) -> Tensor:
    """Which slots, by their facts [..., N], took anything of the mixture."""
    return facts[..., 0] > EMPTY_LEVEL


def search_facts(attn: Tensor, claims: Tensor, first: Tensor, last: Tensor, weights: Tensor) -> Tensor:
    """What finding a slot says about it, [B, S, N_SEARCH_FACTS].

    Over what share of the tokens its attention [B, S, L] spread and what share of the mixture it claimed,
    both as powers of ten, and how alike its masks [B, S, K, M, cell] are before and after refinement.
    """
    spread = -(attn * torch.log(attn.clamp(min=1e-12))).sum(-1) / math.log(10) - math.log10(attn.shape[-1])
    total = weights.sum((1, 2, 3))[:, None]
    claimed = (torch.sigmoid(claims) * weights[:, None]).sum((2, 3, 4)) / total
    before, after = ((x * weights[:, None]).flatten(2) for x in (first, last))
    stability = nn.functional.cosine_similarity(before, after, dim=-1)
    return torch.stack([spread, _log_level(claimed), stability], -1)


def whole_cells(frames: Tensor, multiple: int) -> Tensor:
    """Fill frames (..., time) up to a multiple, with zeros."""
    return nn.functional.pad(frames, (0, -frames.shape[-1] % multiple))


def _most_alike(views: Tensor) -> Tensor:
    """Largest cosine of each of [B, S, N] with another one, [B, S]; zero for a single slot."""
    unit = nn.functional.normalize(views, dim=-1)
    cosines = unit @ unit.transpose(1, 2)
    others = 1 - torch.eye(views.shape[1], device=views.device)
    return (cosines * others).amax(-1)


def _down(narrow: int, wide: int, stride: tuple[int, int]) -> nn.Sequential:
    """A strided convolution and a residual block."""
    kernel = (2 * stride[0], 2 * stride[1] if stride[1] > 1 else 3)
    return nn.Sequential(
        nn.Conv2d(narrow, wide, kernel, stride, padding=1, bias=False), nn.BatchNorm2d(wide), ConvBlock(wide)
    )


def _log_level(share: Tensor) -> Tensor:
    """A share of energy in units of 10 dB, at least `FLOOR_LEVEL`."""
    return torch.log10(share + 10**FLOOR_LEVEL)
