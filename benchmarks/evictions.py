"""Measures how much of prompts the prefix cache finds, by eviction policy: the real bookkeeping of pages over traces, without a model.

    python -m benchmarks.evictions                                      made-up traces: agents in turn, shuffled and at random; system prompts; chats
    python -m benchmarks.evictions --trace mooncake_synthetic_trace.jsonl    … and a file of requests with the ids of their blocks (Mooncake's format)
    python -m benchmarks.evictions --held-out --trace FILE              traces, and the second half of the file, that no threshold was chosen by

A page stands for a block of a prompt. Every trace runs in stores of several sizes, as shares of all its different
blocks, with one request at a time and with several open ones. `best`: what a cache finds that knows the future, and
evicts what is needed last. The last line counts where the policy found less than lru."""

import argparse
import json
import random
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import count
from pathlib import Path

from octavo.cache.eviction import POLICIES
from octavo.plan.content import SimulatedCache

Blocks = list[int]  # ids; a block's id stands for all of the prompt up to its end
SHARES = (0.02, 0.05, 0.125, 0.25, 0.5)
FIRST_HELD_OUT = 100  # seeds from here on were not used to choose thresholds


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


# ── traces that no threshold was chosen by ──


def drifting(seed: int, *, num_requests: int = 1500) -> list[Blocks]:
    """Documents that are asked about for a while, and then no more; questions of a few blocks."""
    dice, unique = random.Random(seed), count(10**9)
    trace = []
    for number in range(num_requests):
        document = int(number / 60 + dice.expovariate(1 / 4))
        trace.append([document * 1000 + at for at in range(60)] + [next(unique) for _ in range(dice.randrange(1, 6))])
    return trace


def flooded(seed: int) -> list[Blocks]:
    """Chats, and every now and then a batch of prompts that never come again."""
    dice, unique = random.Random(seed), count(2 * 10**9)
    trace = []
    for blocks in chats(seed, num_requests=1000):
        trace.append(blocks)
        if dice.random() < 0.02:
            trace += [[next(unique) for _ in range(dice.randrange(20, 120))] for _ in range(30)]
    return trace


def branching(seed: int, *, num_tasks: int = 60) -> list[Blocks]:
    """Agents that start sub-agents: each task has a common beginning, some branches that grow in turn, and ends; two tasks overlap."""
    dice, unique = random.Random(seed), count(10**9)
    trace: list[Blocks] = []
    open_tasks: list[list[Blocks]] = []
    for _ in range(num_tasks):
        start = list(range(20)) + [next(unique) for _ in range(30)]
        open_tasks.append([list(start) for _ in range(dice.randrange(1, 6))])
        for task in open_tasks:
            for _ in range(dice.randrange(1, 5)):
                for at, branch in enumerate(task):
                    task[at] = branch + [next(unique) for _ in range(dice.randrange(4, 20))]
                    trace.append(task[at])
        if len(open_tasks) > 2:
            open_tasks.pop(0)
    return trace


def bursts(seed: int, *, num_requests: int = 1500, tenants: int = 40) -> list[Blocks]:
    """Tenants with a system prompt each, who come in bursts; a burst's requests share a conversation that grows."""
    dice, unique = random.Random(seed), count(10**9)
    trace: list[Blocks] = []
    while len(trace) < num_requests:
        tenant = min(int(dice.paretovariate(0.7)), tenants)
        blocks = [tenant * 1000 + at for at in range(10 + tenant % 7 * 10)]
        for _ in range(dice.randrange(1, 12)):
            blocks = blocks + [next(unique) for _ in range(dice.randrange(2, 12))]
            trace.append(blocks)
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

HELD_OUT: dict[str, Callable[[int], list[Blocks]]] = {
    "drifting documents": drifting,
    "chats with floods": flooded,
    "branching agents": branching,
    "tenants in bursts": bursts,
    "12 agents in turn": lambda seed: agents(seed, sessions=12, turns=20),
    "40 agents, shuffled": lambda seed: agents(seed, sessions=40, turns=10, order="shuffled"),
    "5 agents at random": lambda seed: agents(seed, sessions=5, turns=30, order="random"),
    "60 system prompts": lambda seed: system_prompts(seed, num_prompts=60),
    "chats of 60 users": lambda seed: chats(seed, users=60),
}
FILE_TOKENS, MADE_UP_TOKENS = 512, 16  # of a block


def share_found(trace: Sequence[Blocks], num_pages: int, policy: str, num_open: int, block_tokens: int) -> float:
    """Of all blocks, how many were found."""
    cache = SimulatedCache(num_pages, 1, eviction=policy)
    cache.pool.cached.page_tokens = block_tokens
    running: deque[int] = deque()
    for sequence, blocks in enumerate(trace):
        tokens = [*blocks, 2**60 + sequence]  # the last token is always computed
        while len(running) >= num_open or cache.admit(sequence, tokens) is None:
            cache.release(running.popleft())
        cache.publish(sequence, tokens, len(blocks))
        running.append(sequence)
    return cache.hit_tokens / sum(map(len, trace))


def best_found(trace: Sequence[Blocks], num_pages: int) -> float:
    """What a cache finds that evicts the block whose next use is the furthest; one request at a time."""
    next_use: dict[int, int] = {}
    uses: list[list[int]] = []
    for number in range(len(trace) - 1, -1, -1):
        uses.append([next_use.get(block, len(trace)) for block in trace[number]])
        next_use.update(dict.fromkeys(trace[number], number))
    cached: dict[int, tuple[int, int]] = {}
    order: list[tuple[int, int, int]] = []
    num_found = 0
    for blocks, after in zip(trace, reversed(uses), strict=True):
        num_found += next((at for at, block in enumerate(blocks) if block not in cached), len(blocks))
        for at, (block, use) in enumerate(zip(blocks, after, strict=True)):
            cached[block] = (-use, -at)
            heappush(order, (-use, -at, block))
        while len(cached) > num_pages:
            use, at, block = heappop(order)
            if cached.get(block) == (use, at):
                del cached[block]
    return num_found / sum(map(len, trace))


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
    parser.add_argument("--held-out", action="store_true", help="only what no threshold was chosen by")
    arguments = parser.parse_args()
    traces: dict[str, tuple[list[Blocks], int]] = {}
    for path in arguments.trace:
        trace = of_file(path)
        middle = len(trace) // 2
        part, name = (trace[middle:], "2nd half") if arguments.held_out else (trace[:middle], "1st half")
        traces[f"{path.name[:18]}, {name}"] = part, FILE_TOKENS
        if not arguments.held_out:
            traces[f"{path.name[:18]}, whole"] = trace, FILE_TOKENS
    first = FIRST_HELD_OUT if arguments.held_out else 0
    for name, make in (MADE_UP | HELD_OUT if arguments.held_out else MADE_UP).items():
        traces |= {f"{name}, {seed}": (make(seed), MADE_UP_TOKENS) for seed in range(first, first + arguments.seeds)}
    below = total = 0
    worst = 0.0
    for name, (trace, block_tokens) in traces.items():
        if arguments.only not in name:
            continue
        for num_open in arguments.open:
            for share, num_pages in sizes(trace, num_open):
                found = {policy: share_found(trace, num_pages, policy, num_open, block_tokens) for policy in POLICIES}
                gain = found["adaptive"] - found["lru"]
                below, total, worst = below + (gain < 0), total + 1, min(worst, gain)
                said = ", ".join(f"{policy} {100 * each:.1f} %" for policy, each in found.items())
                if num_open == 1:
                    said += f", best {100 * best_found(trace, num_pages):.1f} %"
                print(f"{name:28} {num_open} open, {num_pages:6} pages ({share:.3f}): {said}", flush=True)
    print(f"below lru in {below} of {total}; the worst by {-100 * worst:.2f} points")
    return 0


if __name__ == "__main__":
    sys.exit(main())
