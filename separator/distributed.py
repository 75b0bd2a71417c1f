"""The processes that train together: who they are, what they share, and how they stay one training.

`torchrun` starts them and says who is who by environment variables; without it there is one. Each has some
rows of every batch. The whole must not depend on how many share it, so normalisation over the batch, sums
of losses and random draws are those of the whole batch.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.overrides import TorchFunctionMode

from separator.errors import SeparatorError

TIMEOUT = timedelta(minutes=30)  # for the slowest to arrive: checkpoints and validation take minutes
CPU = torch.device("cpu")
DRAWS = {torch.randn, torch.rand, torch.rand_like, torch.randn_like}


@dataclass(frozen=True)
class World:
    """This process among those that train together."""

    rank: int = 0
    size: int = 1
    device: torch.device = CPU

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the run folder; one does."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Return each of ``values`` summed over the processes."""
        if self.size == 1:
            return list(values)
        sums = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(sums)
        return [float(value) for value in sums]

    def gather(self, values: list[Any]) -> list[Any]:
        """Return the lists of all processes, one behind the other."""
        if self.size == 1:
            return values
        lists: list[list[Any]] = [[] for _ in range(self.size)]
        dist.all_gather_object(lists, values)
        return [value for part in lists for value in part]

    def wait(self) -> None:
        """Wait until all processes are here."""
        if self.size > 1:
            dist.barrier()


@contextmanager
def joined(device: str = "auto") -> Iterator[World]:
    """Join the processes that `torchrun` started, or be alone; gloo between CPUs, nccl between GPUs.

    Raises:
        SeparatorError: ``device`` is unknown or not there.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise SeparatorError(f"unknown {device=}; choose auto, cpu or cuda")
    if device == "cuda" and not torch.cuda.is_available():
        raise SeparatorError(f"{device=} is not there; choose auto or cpu")
    cuda = device != "cpu" and torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", 0))
    place = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    if "RANK" not in os.environ:
        yield World(device=place)
        return
    store, rank, size = next(rendezvous("env://", timeout=TIMEOUT))
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        # The launcher keeps one store over all restarts, with the addresses of processes that are gone
        # (pytorch issue 135712); machines may count their restarts differently, one machine does not.
        store = PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    backend = "nccl" if cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    try:
        yield World(dist.get_rank(), dist.get_world_size(), place)
    finally:
        dist.destroy_process_group()


def rows_of(batch_size: int, part: int, n_parts: int) -> slice:
    """Return the rows of a batch that are the given part of ``n_parts`` equal ones.

    Raises:
        SeparatorError: the parts cannot be equal.

    >>> rows_of(8, 1, 4)
    slice(2, 4, None)
    """
    if batch_size % n_parts:
        raise SeparatorError(
            f"{batch_size=} does not divide into {n_parts} equal parts (processes times accumulation); "
            f"pass a multiple of {n_parts}"
        )
    size = batch_size // n_parts
    return slice(part * size, (part + 1) * size)


class SharedDraws(TorchFunctionMode):
    """Random numbers of some rows are those that the whole batch would have drawn.

    Within it, what is drawn for the rows' first dimension is drawn for the batch's, and the rows are taken.
    """

    def __init__(self, rows: slice, batch_size: int) -> None:
        super().__init__()
        self._rows = rows
        self._batch_size = batch_size

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in DRAWS:
            return func(*args, **kwargs)
        if isinstance(args[0], Tensor):
            like = args[0]
            kwargs = {"device": like.device, "dtype": like.dtype, **kwargs}
            shape = tuple(like.shape)
            func = torch.rand if func is torch.rand_like else torch.randn
        else:
            shape = tuple(args[0]) if len(args) == 1 and not isinstance(args[0], int) else args
        if shape and shape[0] == self._rows.stop - self._rows.start:
            return func(self._batch_size, *shape[1:], **kwargs)[self._rows]
        return func(*shape, **kwargs)


class _Total(torch.autograd.Function):
    """The sum over the processes; so is its gradient."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        total = values.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


def total_of(values: Tensor) -> Tensor:
    """Return the sum of ``values`` over the processes, with a gradient."""
    return cast(Tensor, _Total.apply(values))


class SharedBatchNorm2d(nn.BatchNorm2d):
    """`nn.BatchNorm2d` over the batches of all processes, on CPUs as well; parameters have the same names."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise [B, C, height, width] by the statistics of the whole batch, in training."""
        if not self.training:
            return super().forward(x)
        values = x.float()
        count = total_of(values.new_tensor(values.numel() / values.shape[1]))
        mean = total_of(values.sum((0, 2, 3))) / count
        centred = values - mean[:, None, None]
        variance = total_of(centred.square().sum((0, 2, 3))) / count
        self._remember(mean.detach(), (variance * count / (count - 1)).detach())
        scale = self.weight * torch.rsqrt(variance + self.eps)
        normed: Tensor = centred * scale[:, None, None] + self.bias[:, None, None]
        return normed.to(x.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor) -> None:
        """Move the running statistics as `nn.BatchNorm2d` does."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked += 1
        momentum = 0.1 if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, momentum)
        self.running_var.lerp_(variance, momentum)


def share_batch_norms(module: nn.Module) -> None:
    """Make every `nn.BatchNorm2d` in ``module`` normalise over all processes; state dicts stay the same."""
    for part in module.modules():
        if type(part) is nn.BatchNorm2d:
            part.__class__ = SharedBatchNorm2d
