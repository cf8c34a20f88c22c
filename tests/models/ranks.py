"""Several ranks of one model in processes of their own, over gloo.
Knows nothing of executors: this is the layers' sharding alone."""

import socket
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as multiprocessing

from octavo.parallel import init_group
from tests.models.walk import CPU, build_from, greedy, walk


def run_ranks(
    folder: Path,
    size: int,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    sequences: list[list[int]],
    backend: str = "torch_cpu",
) -> list[dict[str, Any]]:
    """What each rank computed: logits of the sequences and a greedy continuation."""
    torch.save((config, weights, sequences, backend), folder / "task.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    multiprocessing.spawn(_rank, args=(size, address, str(folder)), nprocs=size)
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def _rank(rank: int, size: int, address: str, folder: str) -> None:
    torch.set_num_threads(1)
    config, weights, sequences, backend = torch.load(f"{folder}/task.pt")
    group = init_group(rank, size, address, CPU)
    ours, store = build_from(config, iter(weights.items()), backend, group=group)
    found = {
        "logits": walk(ours, store, sequences, seed=2),
        "tokens": greedy(ours, store, sequences, 8),
        "weights_bytes": ours.weights_bytes,
    }
    torch.save(found, f"{folder}/rank{rank}.pt")
    group.close()
