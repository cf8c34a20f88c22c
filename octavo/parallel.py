"""How ranks are joined: Group, the tensor-parallel ranks of a stage and their collectives, and Links, which carry hidden states from one
pipeline stage to the next."""

import socket
from collections import deque
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from octavo.errors import ConfigError

_TIMEOUT = timedelta(minutes=10)


class Group:
    """A group of `size` ranks; this process is number `rank`. Every rank makes the same calls in the same order.
    `in_order`: add up in rank order, so that the sum does not depend on the tensor's size."""

    def __init__(
        self,
        rank: int,
        size: int,
        process_group: dist.ProcessGroup | None = None,
        in_order: bool = False,
        host_group: dist.ProcessGroup | None = None,
    ) -> None:
        """`host_group`: the same ranks over gloo, if `process_group` is not."""
        assert 0 <= rank < size, f"rank {rank} of {size}"
        assert size == 1 or process_group is not None, "several ranks need a process group"
        self.rank = rank
        self.size = size
        self._process_group = process_group
        self._host_group = host_group or process_group
        self._in_order = in_order and size > 2  # the sum of two numbers is the same in both orders

    @classmethod
    def single(cls) -> "Group":
        return cls(0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks, in place. With `in_order` the parts are added rank by rank; a ring would begin with a different
        rank in each of its pieces, and the pieces depend on the tensor's size."""
        if self._in_order:
            parts = self._gather(tensor)
            total = parts[0].float()
            for part in parts[1:]:
                total += part
            tensor.copy_(total)
        elif self.size > 1:
            dist.all_reduce(tensor, group=self._process_group)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's tensor along the last dimension, in rank order."""
        if self.size == 1:
            return tensor
        return torch.cat(self._gather(tensor), dim=-1)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._process_group)
        return parts

    def highest(self, values: list[int]) -> list[int]:
        """For each place, the highest value of any rank. It is exchanged between the hosts: a GPU need not be done with its step."""
        found = torch.tensor(values, dtype=torch.int64)
        if self.size > 1:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self._host_group)
        return found.tolist()

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._process_group)

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
            self._process_group = None


class Links:
    """One rank's connections to the same rank of the stages before and after its own. Base class: there are none; what a rank without
    neighbours, or in a trial step, receives is zeros."""

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        """Fill `hidden` [T, D], contiguous, with what the stage before sent. On a GPU, later work of the stream waits for it, not the
        host."""
        return hidden.zero_()

    def send(self, hidden: torch.Tensor) -> None:
        """Send [T, D] to the next stage, without waiting for it. The tensor must not be changed afterwards."""


NO_LINKS = Links()


class StageLinks(Links):
    """Links by point-to-point messages in groups of two ranks, so that a send never waits for an earlier receive."""

    def __init__(
        self, before: tuple[int, dist.ProcessGroup] | None, after: tuple[int, dist.ProcessGroup] | None, depth: int
    ) -> None:
        """`before`, `after`: a neighbour's rank and the group of the two. `depth`: sends that may be under way."""
        self._before, self._after, self._depth = before, after, depth
        self._sending: deque[tuple[dist.Work, torch.Tensor]] = deque()  # tensors live until they are sent

    def receive(self, hidden: torch.Tensor) -> torch.Tensor:
        assert self._before is not None and hidden.is_contiguous()
        rank, group = self._before
        work = dist.irecv(hidden, rank, group=group)
        assert work is not None
        work.wait()
        return hidden

    def send(self, hidden: torch.Tensor) -> None:
        assert self._after is not None
        while len(self._sending) > self._depth or (self._sending and self._sending[0][0].is_completed()):
            self._sending.popleft()[0].wait()
        rank, group = self._after
        hidden = hidden.contiguous()
        work = dist.isend(hidden, rank, group=group)
        assert work is not None
        self._sending.append((work, hidden))


class Ranks(NamedTuple):
    """A rank's place among all ranks of its engine."""

    group: Group  # the tensor-parallel ranks of its stage
    links: Links
    stage: int
    num_stages: int
    world: Group  # all ranks


def single_rank() -> Ranks:
    return Ranks(Group.single(), NO_LINKS, 0, 1, Group.single())


def init_ranks(
    rank: int,
    tensor_parallel: int,
    num_stages: int,
    address: str,
    device: torch.device,
    is_deterministic: bool = False,
    meeting: socket.socket | None = None,
) -> Ranks:
    """Join all ranks at the rendezvous `address`. Rank r is number r % tensor_parallel of stage r // tensor_parallel. `meeting`: rank 0's
    socket that listens at the address already; None: the address is a file's, or its port is free."""
    world = init_group(rank, tensor_parallel * num_stages, address, device, is_deterministic, meeting)
    stage, place = divmod(rank, tensor_parallel)
    if num_stages == 1:
        return Ranks(world, NO_LINKS, 0, 1, world)
    group = Group.single()
    in_order = is_deterministic or device.type == "cpu"
    for number in range(num_stages) if tensor_parallel > 1 else ():  # every rank makes every group, in the same order
        members = list(range(number * tensor_parallel, (number + 1) * tensor_parallel))
        made = dist.new_group(members, timeout=_TIMEOUT)
        host = dist.new_group(members, timeout=_TIMEOUT, backend="gloo") if device.type == "cuda" else None
        if number == stage:
            group = Group(place, tensor_parallel, made, in_order, host)
    before: tuple[int, dist.ProcessGroup] | None = None
    after: tuple[int, dist.ProcessGroup] | None = None
    for first in range((num_stages - 1) * tensor_parallel):
        pair = dist.new_group([first, first + tensor_parallel], timeout=_TIMEOUT)
        if rank == first:
            after = (first + tensor_parallel, pair)
        if rank == first + tensor_parallel:
            before = (first, pair)
    return Ranks(group, StageLinks(before, after, num_stages), stage, num_stages, world)


def init_group(
    rank: int,
    size: int,
    address: str,
    device: torch.device,
    is_deterministic: bool = False,
    meeting: socket.socket | None = None,
) -> Group:
    """Join the ranks at the rendezvous `address` ("tcp://127.0.0.1:29500" or "file:///…"): gloo on the CPU, NCCL on GPUs.
    `is_deterministic`: a sum does not depend on how much is summed at once; always so on the CPU."""
    if size == 1:
        return Group.single()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed; use one rank")
    store = None
    if address.startswith("tcp://"):
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            int(port),
            size,
            is_master=rank == 0,
            timeout=_TIMEOUT,
            wait_for_workers=False,
            master_listen_fd=None if meeting is None else meeting.detach(),
        )
    dist.init_process_group(
        backend,
        init_method=address if store is None else None,
        store=store,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    host_group = dist.new_group(backend="gloo") if backend == "nccl" else None
    return Group(rank, size, dist.group.WORLD, is_deterministic or device.type == "cpu", host_group)
