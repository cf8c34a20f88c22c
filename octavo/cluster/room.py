"""Where a replica fits in a cluster: how many cores its ranks get, on which nodes there is room, and what to say if there is none. Pure: it is
given what the cluster has."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class NodeRoom(NamedTuple):
    """A node of the cluster."""

    id: str
    address: str
    total: Mapping[str, float]  # by resource: CPU, GPU
    free: Mapping[str, float]
    port: int = 0  # of Ray's process there

    @property
    def words(self) -> str:
        cores, gpus = ((int(self.free.get(name, 0)), int(self.total.get(name, 0))) for name in ("CPU", "GPU"))
        return (
            f"{self.address} ({self.id[:8]}): {cores[0]} of {cores[1]} cores and {gpus[0]} of {gpus[1]} GPUs are free"
        )


class Wish(NamedTuple):
    """What one replica needs."""

    num_ranks: int
    resource: str  # of which each rank needs `amount`: CPU or GPU
    amount: int

    @property
    def words(self) -> str:
        each = f"{self.amount} {_name(self.resource, self.amount)}"
        if self.num_ranks == 1:
            return f"a replica needs {each}"
        return f"a replica needs {each} for each of its {self.num_ranks} ranks"


def uses_gpus(device: str, nodes: Sequence[NodeRoom]) -> bool:
    return device == "cuda" or (device == "auto" and any(node.total.get("GPU", 0) >= 1 for node in nodes))


def wish_of(num_ranks: int, device: str, cpu_threads: int, num_replicas: int, nodes: Sequence[NodeRoom]) -> Wish:
    """A GPU for each rank, or as many cores as there are threads. `cpu_threads` 0: the smallest node's cores, divided by the ranks that come
    to a node if all replicas are spread evenly. They are the same for all replicas: these must compute alike."""
    if uses_gpus(device, nodes):
        return Wish(num_ranks, "GPU", 1)
    cores = [int(node.total.get("CPU", 0)) for node in nodes if node.total.get("CPU", 0) >= 1]
    if cpu_threads or not cores:
        return Wish(num_ranks, "CPU", cpu_threads or 1)
    ranks_per_node = -(-num_ranks * num_replicas // len(cores))
    return Wish(num_ranks, "CPU", max(1, min(cores) // ranks_per_node))


def neighbours(num_ranks: int, num_replicas: int, nodes: Sequence[NodeRoom]) -> int:
    """Replicas that share a node's memory, if they are spread evenly."""
    usable = sum(1 for node in nodes if node.total.get("CPU", 0) >= 1 or node.total.get("GPU", 0) >= 1)
    return max(1, -(-num_replicas // max(1, usable)))


def ranks_on(wish: Wish, free: Mapping[str, float]) -> int:
    """Ranks that have room."""
    return int(free.get(wish.resource, 0) // wish.amount)


def best_node(wish: Wish, nodes: Sequence[NodeRoom], used: Mapping[str, int]) -> NodeRoom | None:
    """The node for all ranks of a replica: of those with room the one with the fewest replicas, then the one with most room. None: they do
    not fit one node. `used`: replicas by node."""
    able = [node for node in nodes if ranks_on(wish, node.free) >= wish.num_ranks]
    return min(able, key=lambda node: (used.get(node.id, 0), -node.free[wish.resource], node.id), default=None)


def could_fit(wish: Wish, nodes: Sequence[NodeRoom]) -> bool:
    """Whether a cluster that nothing else uses has room for a replica."""
    return sum(ranks_on(wish, node.total) for node in nodes) >= wish.num_ranks


def shortage(wish: Wish, nodes: Sequence[NodeRoom]) -> str:
    """What is asked for, and what there is."""
    found = []
    for node in nodes:
        total, free = int(node.total.get(wish.resource, 0)), int(node.free.get(wish.resource, 0))
        if total:
            found.append(f"{node.address} ({node.id[:8]}) {free} of {total}")
    there = "; ".join(found) if found else "none"
    return f"{wish.words}, and the cluster's free {_name(wish.resource, 2)} are: {there}"


def _name(resource: str, amount: int) -> str:
    name = "GPU" if resource == "GPU" else "core"
    return name if amount == 1 else f"{name}s"
