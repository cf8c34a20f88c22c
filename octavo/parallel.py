"""Group: the ranks that share every layer, and what they say to each other.
Knows nothing of layers or models: only tensors to add up or to join."""

from datetime import timedelta

import torch
import torch.distributed as dist

from octavo.errors import ConfigError

_TIMEOUT = timedelta(minutes=10)


class Group:
    """`size` ranks; this process is number `rank`. Every rank makes the same calls in the same order."""

    def __init__(self, rank: int, size: int, process_group: dist.ProcessGroup | None = None) -> None:
        assert 0 <= rank < size, f"rank {rank} of {size}"
        assert size == 1 or process_group is not None, "several ranks need a process group"
        self.rank = rank
        self.size = size
        self._process_group = process_group

    @classmethod
    def single(cls) -> "Group":
        return cls(0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self._process_group)
        return tensor

    def all_gather_last(self, tensor: torch.Tensor) -> torch.Tensor:
        """Every rank's tensor, joined along the last dimension in rank order."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        dist.all_gather(parts, tensor.contiguous(), group=self._process_group)
        return torch.cat(parts, dim=-1)

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier(group=self._process_group)

    def close(self) -> None:
        """Leave the group; idempotent."""
        if self._process_group is not None:
            dist.destroy_process_group(self._process_group)
            self._process_group = None


def init_group(rank: int, size: int, address: str, device: torch.device) -> Group:
    """Join the ranks that meet at `address` ("tcp://127.0.0.1:29500" or "file:///…"): gloo on the CPU, NCCL on GPUs."""
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
    return Group(rank, size, dist.group.WORLD)
