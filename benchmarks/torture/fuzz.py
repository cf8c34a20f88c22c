"""The fuzz campaign: hostile requests by the thousand while good clients run: no 5xx, no crash, the good ones' answers unchanged.
Knows nothing of what a hostile request is made of."""

import asyncio
import contextlib
import random
import time
from collections import Counter
from dataclasses import dataclass, field

from benchmarks.torture.hostile import Hostile, hostile
from benchmarks.torture.house import House, Load

_ANSWER_LIMIT_S = 30.0


@dataclass(slots=True)
class Tally:
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)  # 0: the connection was closed without an answer
    faults: list[str] = field(default_factory=list)  # 5xx, and answers that never came


async def fuzz(
    house: House, num_requests: int, seed: int, num_good: int = 16, num_connections: int = 24
) -> tuple[Tally, int, float]:
    """→ what came back, how many answers of good clients were changed, and seconds."""
    untroubled = await Load(house, num_good, 48).run()
    tally, left = Tally(), iter(range(num_requests))
    began = time.monotonic()
    attackers = asyncio.gather(
        *(_attack(house.port, random.Random(seed * 1000 + number), left, tally) for number in range(num_connections))
    )
    changed = 0
    while not attackers.done():
        answers = await Load(house, num_good, 48).run()
        changed += sum(ours.content != theirs.content for ours, theirs in zip(answers, untroubled, strict=True))
    await attackers
    return tally, changed, time.monotonic() - began


async def _attack(port: int, dice: random.Random, left: "object", tally: Tally) -> None:
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    for _ in left:  # type: ignore[attr-defined]
        each = hostile(dice)
        tally.sent[each.kind] += 1
        try:
            if connection is None:
                connection = await asyncio.open_connection("127.0.0.1", port)
            if await _throw(connection, each, dice, tally):
                continue
        except (OSError, asyncio.IncompleteReadError, ValueError):
            tally.statuses[0] += 1
        if connection is not None:
            connection[1].transport.abort()
        connection = None
    if connection is not None:
        connection[1].transport.abort()


async def _throw(
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], each: Hostile, dice: random.Random, tally: Tally
) -> bool:
    """True: the connection can be used again."""
    reader, writer = connection
    writer.write(each.request)
    if not each.is_whole:
        # Some leave at once, some wait a moment for whatever comes.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(dice.choice([0.0, 0.0, 0.05])):
                _note(await reader.readline(), each, tally)
        return False
    try:
        async with asyncio.timeout(_ANSWER_LIMIT_S):
            status = _note(await reader.readline(), each, tally)
            length, is_kept = 0, status is not None
            while (line := await reader.readline()) not in (b"\r\n", b""):
                name, _, value = line.lower().partition(b":")
                length = int(value) if name == b"content-length" else length
                is_kept = is_kept and not (name == b"connection" and b"close" in value)
            await reader.readexactly(length)
            return is_kept
    except TimeoutError:
        tally.faults.append(f"no answer: {each.kind}: {each.request[:200]!r}")
        return False


def _note(line: bytes, each: Hostile, tally: Tally) -> int | None:
    parts = line.split()
    if len(parts) < 2 or not parts[1].isdigit():
        tally.statuses[0] += 1
        return None
    status = int(parts[1])
    tally.statuses[status] += 1
    if status >= 500:
        tally.faults.append(f"{status}: {each.kind}: {each.request[:300]!r}")
    return status
