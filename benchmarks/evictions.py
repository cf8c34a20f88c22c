"""Measures how much of prompts the prefix cache finds, by eviction policy: the real bookkeeping of pages over traces, without a model.

    python -m benchmarks.evictions                                      made-up traces: agents in turn, shuffled and at random; system prompts; chats
    python -m benchmarks.evictions --trace mooncake_synthetic_trace.jsonl    … and a file of requests with the ids of their blocks (Mooncake's format)

A page stands for a block of a prompt. Every trace runs in stores of several sizes, as shares of all its different blocks, with one request at a time
and with several open ones. The last line counts where the policy found less than lru."""

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

from octavo.cache.eviction import POLICIES
from octavo.plan.content import SimulatedCache

Blocks = list[int]  # ids; a block's id stands for all of the prompt up to its end
SHARES = (0.02, 0.05, 0.125, 0.25, 0.5)


def agents(seed: int, *, sessions: int = 8, turns: int = 13, order: str = "in turn") -> list[Blocks]:
    """Sessions that begin with 31 blocks and grow by 16 each turn."""
    dice = random.Random(seed)
    lens = [15] * sessions
    who: list[int] = []
    for _ in range(turns):
        names = list(range(sessions))
        if order == "shuffled":
            dice.shuffle(names)
        who += [dice.randrange(sessions) for _ in names] if order == "random" else names
    trace = []
    for session in who:
        lens[session] += 16
        trace.append([session * 10**6 + at for at in range(lens[session])])
    return trace


def system_prompts(seed: int, *, num_requests: int = 1500, num_prompts: int = 20) -> list[Blocks]:
    """System prompts of 40 blocks, some much more frequent than others, and a question that never comes again."""
    dice, unique = random.Random(seed), count(10**9)
    weights = [1 / (at + 1) ** 1.1 for at in range(num_prompts)]
    trace = []
    for _ in range(num_requests):
        prompt = dice.choices(range(num_prompts), weights)[0]
        trace.append([prompt * 1000 + at for at in range(40)] + [next(unique) for _ in range(dice.randrange(4, 40))])
    return trace


def chats(seed: int, *, num_requests: int = 1500, users: int = 300) -> list[Blocks]:
    """Conversations that grow, with five system prompts; most turns are of those that were active lately."""
    dice, unique = random.Random(seed), count(10**9)
    open_chats: dict[int, Blocks] = {}
    trace = []
    for _ in range(num_requests):
        active = list(open_chats)[-30:]
        user = dice.choice(active) if active and dice.random() < 0.7 else dice.randrange(users)
        blocks = open_chats.pop(user, [user % 5 * 100 + at for at in range(30)])
        blocks = blocks + [next(unique) for _ in range(dice.randrange(5, 30))]
        trace.append(blocks)
        if dice.random() < 0.85:
            open_chats[user] = blocks
    return trace


def of_file(path: Path) -> list[Blocks]:
    return [json.loads(line)["hash_ids"] for line in path.read_text().splitlines()]


MADE_UP: dict[str, Callable[[int], list[Blocks]]] = {
    "agents in turn": lambda seed: agents(seed),
    "agents, shuffled": lambda seed: agents(seed, order="shuffled"),
    "agents at random": lambda seed: agents(seed, order="random"),
    "24 agents at random": lambda seed: agents(seed, sessions=24, order="random"),
    "system prompts": system_prompts,
    "chats": chats,
}


def share_found(trace: Sequence[Blocks], num_pages: int, policy: str, num_open: int) -> float:
    """Of all blocks, how many were found."""
    cache = SimulatedCache(num_pages, 1, eviction=policy)
    running: deque[int] = deque()
    for sequence, blocks in enumerate(trace):
        tokens = [*blocks, 2**60 + sequence]  # the last token is always computed
        while len(running) >= num_open or cache.admit(sequence, tokens) is None:
            cache.release(running.popleft())
        cache.publish(sequence, tokens, len(blocks))
        running.append(sequence)
    return cache.hit_tokens / sum(map(len, trace))


def sizes(trace: Sequence[Blocks], num_open: int) -> Iterator[tuple[float, int]]:
    num_blocks = len({block for blocks in trace for block in blocks})
    least = max(map(len, trace)) + 1
    done = set()
    for share in SHARES:
        num_pages = max(int(share * num_blocks), least)
        if num_pages not in done:
            done.add(num_pages)
            yield share, num_pages


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, action="append", default=[], help="a file of requests; several times")
    parser.add_argument("--only", default="", help="names of traces that contain this text")
    parser.add_argument("--seeds", type=int, default=2, help="made-up traces of each kind")
    parser.add_argument("--open", type=int, nargs="*", default=[1, 4], help="requests that hold their pages at a time")
    arguments = parser.parse_args()
    traces = {path.name: of_file(path) for path in arguments.trace if arguments.only in path.name}
    for name, make in MADE_UP.items():
        if arguments.only in name:
            traces |= {f"{name}, {seed}": make(seed) for seed in range(arguments.seeds)}
    below = total = 0
    worst = 0.0
    for name, trace in traces.items():
        for num_open in arguments.open:
            for share, num_pages in sizes(trace, num_open):
                found = {policy: share_found(trace, num_pages, policy, num_open) for policy in POLICIES}
                gain = found["adaptive"] - found["lru"]
                below, total, worst = below + (gain < 0), total + 1, min(worst, gain)
                said = ", ".join(f"{policy} {100 * each:.1f} %" for policy, each in found.items())
                print(f"{name:36} {num_open} open, {num_pages:6} pages ({share:.3f}): {said}", flush=True)
    print(f"below lru in {below} of {total}; the worst by {-100 * worst:.2f} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
