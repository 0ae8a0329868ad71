"""The collectives of this package, started at once and waited for later.

Every one is on the first dimension of contiguous tensors and returns a `Pending`. Gloo serves all of them on
the CPU, NCCL on GPUs, where waiting holds up the current stream and not the host.

Sums over ranks are made here by an all-to-all of the parts and a float32 sum of what arrives, not by a
reduce-scatter: that moves as many bytes, but would round each of its additions to the tensor's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class Pending:
    """A collective that was started.

    Attributes:
        result: what it writes; not to be read before `wait`.
        sent: what it reads, kept alive and unchanged until then.
        works: torch's handles.
    """

    result: Tensor
    sent: Tensor
    works: list[Any]

    def wait(self) -> Tensor:
        """The result, once it is there."""
        for work in self.works:
            work.wait()
        self.works = []
        return self.result


def rank_and_size(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """This process's number in the group, and how many it has.

    Raises:
        ValueError: there is no process group, or this process is not in it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "no process group; launch with torchrun and call torch.distributed.init_process_group first, or "
            "use streamattn.attention on one process"
        )
    rank = dist.get_rank(group)
    if rank < 0:
        raise ValueError("this process is not in the group; pass one that it belongs to")
    return rank, dist.get_world_size(group)


def all_gather(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to gather x [n, ...] of all ranks: [P * n, ...] in the order of the ranks."""
    _, size = rank_and_size(group)
    gathered = x.new_empty((size * x.shape[0], *x.shape[1:]))
    # renamed in torch 2.13, which warns of the older name
    gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return Pending(gathered, x, [gather(gathered, x, group=group, async_op=True)])


def all_to_all(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to send x[r] of x [P, ...] to rank r: what arrives is [P, ...] too, by who sent it."""
    received = torch.empty_like(x)
    return Pending(received, x, [dist.all_to_all_single(received, x, group=group, async_op=True)])


def all_reduce(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to sum x over all ranks, in place."""
    return Pending(x, x, [dist.all_reduce(x, group=group, async_op=True)])


def pass_on(x: Tensor, group: dist.ProcessGroup | None) -> Pending:
    """Start to send x to the next rank of the ring and to receive the like from the one before."""
    rank, size = rank_and_size(group)
    following, before = ((rank + step) % size for step in (1, -1))
    if group is not None:
        following, before = (dist.get_global_rank(group, each) for each in (following, before))
    received = torch.empty_like(x)
    operations = [
        dist.P2POp(dist.isend, x, following, group=group),
        dist.P2POp(dist.irecv, received, before, group=group),
    ]
    return Pending(received, x, dist.batch_isend_irecv(operations))
