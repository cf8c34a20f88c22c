"""Several ranks of one model in processes of their own, over gloo."""

import functools
import multiprocessing
import socket
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from octavo.parallel import init_group
from tests.models.walk import CPU, build_from, greedy, walk

_LIMIT_S = 120  # of one task; a rank that waits for another would wait for ten minutes


class _Ranks:
    """Processes that go from task to task, since importing torch takes most of one's time. Each task is a group of its own."""

    def __init__(self, size: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        for rank in range(size):
            ours, theirs = context.Pipe()
            context.Process(target=_serve, args=(rank, size, theirs), daemon=True).start()  # ends with this process
            theirs.close()
            self._pipes.append(ours)

    def run(self, folder: Path, address: str) -> None:
        for pipe in self._pipes:
            pipe.send((address, str(folder)))
        for rank, pipe in enumerate(self._pipes):
            assert pipe.poll(_LIMIT_S), f"rank {rank} does not answer"
            fault = pipe.recv()
            assert fault is None, f"rank {rank}:\n{fault}"


@functools.cache
def _ranks(size: int) -> _Ranks:
    return _Ranks(size)


def run_ranks(
    folder: Path,
    size: int,
    config: dict[str, Any],
    weights: dict[str, torch.Tensor],
    sequences: list[list[int]],
    backend: str = "torch_cpu",
    splits_experts: bool = False,
) -> list[dict[str, Any]]:
    """What each rank computed: logits of the sequences and a greedy continuation. `splits_experts`: ranks have different experts."""
    torch.save((config, weights, sequences, backend, splits_experts), folder / "task.pt")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    try:
        _ranks(size).run(folder, address)
    except BaseException:
        _ranks.cache_clear()  # others of them may be in the middle of it: the next task begins with new ones
        raise
    return [torch.load(folder / f"rank{rank}.pt") for rank in range(size)]


def _serve(rank: int, size: int, pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            address, folder = pipe.recv()
        except (EOFError, OSError):  # nobody asks any more
            return
        try:
            _compute(rank, size, address, folder)
        except Exception:
            pipe.send(traceback.format_exc())
        else:
            pipe.send(None)


def _compute(rank: int, size: int, address: str, folder: str) -> None:
    config, weights, sequences, backend, splits_experts = torch.load(f"{folder}/task.pt")
    group = init_group(rank, size, address, CPU)
    try:
        ours, store = build_from(config, iter(weights.items()), backend, group=group, splits_experts=splits_experts)
        found = {
            "logits": walk(ours, store, sequences, seed=2),
            "tokens": greedy(ours, store, sequences, 8),
            "weights_bytes": ours.weights_bytes,
        }
        torch.save(found, f"{folder}/rank{rank}.pt")
    finally:
        group.close()
