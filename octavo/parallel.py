"""Group: the tensor-parallel ranks and their collectives."""

from datetime import timedelta

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


def init_group(rank: int, size: int, address: str, device: torch.device, is_deterministic: bool = False) -> Group:
    """Join the ranks at the rendezvous `address` ("tcp://127.0.0.1:29500" or "file:///…"): gloo on the CPU, NCCL on GPUs.
    `is_deterministic`: a sum does not depend on how much is summed at once; always so on the CPU."""
    if size == 1:
        return Group.single()
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_available():
        raise ConfigError("this torch was built without torch.distributed; use --tensor-parallel-size 1")
    dist.init_process_group(
        backend,
        init_method=address,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )
    host_group = dist.new_group(backend="gloo") if backend == "nccl" else None
    return Group(rank, size, dist.group.WORLD, is_deterministic or device.type == "cpu", host_group)
