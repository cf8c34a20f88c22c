"""The soak: minutes of mixed load with clients that leave and memory that runs out; what was held before and after.
Knows nothing of how the load is answered."""

import asyncio
import json
import random
import time
from contextlib import aclosing
from dataclasses import dataclass

from benchmarks.torture.house import House, children_of, open_files, resident
from octavo.bench.http_stream import HTTPFailure

# So few pages that long answers push one another out.
FLAGS = ("--kv-cache-memory-bytes", "48M", "--max-model-len", "1024", "--api-processes", "2")


@dataclass(frozen=True, slots=True)
class Held:
    resident: int  # bytes, of all of the server's processes
    open_files: int
    pages: int


async def held(house: House) -> Held:
    """When nothing runs."""
    pages = await house.used_pages()
    pids = [house.process.pid, *children_of(house.process.pid)]
    return Held(sum(map(resident, pids)), sum(map(open_files, pids)), pages)


@dataclass(slots=True)
class Count:
    answers: int = 0
    left: int = 0
    errors: int = 0


async def soak(house: House, minutes: float, seed: int, num_clients: int = 48) -> tuple[Count, list[Held]]:
    """→ what was done, and what was held at the start, at each tenth, and at the end."""
    count, dice = Count(), random.Random(seed)
    # What the first requests make the server take for good is no leak.
    await _rounds(house, count, dice, time.monotonic() + min(30.0, minutes * 6), num_clients)
    looks = [await held(house)]
    began = time.monotonic()
    for tenth in range(1, 11):
        await _rounds(house, count, dice, began + minutes * 6 * tenth, num_clients)
        looks.append(await held(house))
    return count, looks


async def _rounds(house: House, count: Count, dice: random.Random, until: float, num_clients: int) -> None:
    clients = [random.Random(dice.random()) for _ in range(num_clients)]
    await asyncio.gather(*(_client(house, count, each, until) for each in clients))


async def _client(house: House, count: Count, dice: random.Random, until: float) -> None:
    client = house.client()
    while time.monotonic() < until:
        body = {
            "prompt": " ".join(dice.choices(("tree", "river", "stone", "cloud", "fish"), k=dice.choice([5, 50, 400]))),
            "max_tokens": dice.choice([4, 40, 300]),
            "temperature": dice.choice([0, 1.0]),
            "n": dice.choice([1, 1, 1, 3]),
            "stop": dice.choice([None, ["."]]),
            "stream": True,
        }
        leaves_after = dice.choice([None, None, 1, 20])
        num_events = 0
        try:
            async with aclosing(client.post_events("/v1/completions", json.dumps(body).encode())) as events:
                async for event in events:
                    num_events += 1
                    count.errors += b'"error"' in event
                    if num_events == leaves_after:
                        count.left += 1
                        break
                else:
                    count.answers += 1
        except (OSError, HTTPFailure):
            count.errors += 1
    await client.close()
