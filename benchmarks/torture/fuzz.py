"""The fuzz campaign: thousands of hostile requests while good clients run: no 5xx, no crash, the good clients' answers unchanged."""

import asyncio
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from benchmarks.torture.hostile import Hostile, hostile
from benchmarks.torture.house import House, Load

_ANSWER_LIMIT_S = 30.0
_NUM_SLOW = 32
_ID = re.compile(rb'"id": ?"((?:file|batch|resp|msg|cmpl|chatcmpl)[-_][\w-]+)"')
_KEPT_IDS = 64
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass(slots=True)
class Tally:
    sent: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    slow: Counter[int] = field(default_factory=Counter)  # statuses of the requests sent a byte a second
    left: int = 0  # clients that disconnected without waiting
    faults: list[str] = field(default_factory=list)  # 5xx, missing answers, connections closed without an answer
    ids: list[str] = field(default_factory=list)  # of objects that answers have named


async def fuzz(
    house: House, num_requests: int, seed: int, num_good: int = 16, num_connections: int = 24
) -> tuple[Tally, int, float]:
    """Return (tally, number of changed answers of good clients, seconds)."""
    untroubled = await Load(house, num_good, 48).run()
    tally, left = Tally(), iter(range(num_requests))
    began = time.monotonic()
    slow = [
        asyncio.create_task(_dribble(house.port, random.Random(seed - number), tally)) for number in range(_NUM_SLOW)
    ]
    attackers = asyncio.gather(
        *(_attack(house.port, random.Random(seed * 1000 + number), left, tally) for number in range(num_connections))
    )
    changed = 0
    while not attackers.done():
        answers = await Load(house, num_good, 48).run()
        changed += sum(ours.content != theirs.content for ours, theirs in zip(answers, untroubled, strict=True))
    await attackers
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    return tally, changed, time.monotonic() - began


async def _attack(port: int, dice: random.Random, left: Iterator[int], tally: Tally) -> None:
    connection: Streams | None = None
    for _ in left:
        each = hostile(dice, tally.ids)
        tally.sent[each.kind] += 1
        is_kept = False
        try:
            if connection is None:
                connection = await asyncio.open_connection("127.0.0.1", port)
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                is_kept = await _throw(connection, each, dice, tally)
        except TimeoutError:
            tally.faults.append(f"no answer: {each.kind}: {each.request[:300]!r}")
        except (OSError, asyncio.IncompleteReadError, ValueError) as error:
            tally.faults.append(f"closed ({error!r}): {each.kind}: {each.request[:300]!r}")
        if not is_kept and connection is not None:
            connection[1].transport.abort()
            connection = None
    if connection is not None:
        connection[1].transport.abort()


async def _throw(connection: Streams, each: Hostile, dice: random.Random, tally: Tally) -> bool:
    """Return whether the connection can be used again."""
    reader, writer = connection
    writer.write(each.request)
    if each.waits == "nothing":
        await asyncio.sleep(dice.choice([0.0, 0.0, 0.05]))  # some disconnect at once, some a moment later
        tally.left += 1
        return False
    status = await _status(reader)
    tally.statuses[status] += 1
    if status >= 500 and not (
        status == 504 and b'"deadline_ms"' in each.request
    ):  # 504 is right where the request set a deadline
        tally.faults.append(f"{status}: {each.kind}: {each.request[:600]!r}")
    if each.waits == "status":
        return False
    length, is_kept = 0, True
    while (line := await reader.readline()) not in (b"\r\n", b""):
        name, _, value = line.lower().partition(b":")
        length = int(value) if name == b"content-length" else length
        is_kept = is_kept and not (name == b"connection" and b"close" in value) and name != b"transfer-encoding"
    tally.ids += [found.decode() for found in _ID.findall(await reader.readexactly(length))]
    del tally.ids[:-_KEPT_IDS]
    return is_kept


async def _status(reader: asyncio.StreamReader) -> int:
    """Return the answer's status, without 100 Continue."""
    while True:
        line = await reader.readline()
        parts = line.split()
        if len(parts) < 2 or not parts[1].isdigit():
            raise ValueError(f"no status line but {line[:60]!r}")
        if (status := int(parts[1])) != 100:
            return status
        await reader.readline()


async def _dribble(port: int, dice: random.Random, tally: Tally) -> None:
    """Send requests a byte a second, slow in the head or in the body, one after the other; some are complete in time."""
    while True:
        body = b'{"prompt": "a", "max_tokens": 0}'[: dice.choice([9, 32])].ljust(dice.choice([9, 32, 200]))
        head = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: %d\r\n\r\n" % len(body)
        at_once = dice.choice([0, len(head), len(head)])
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            answer = asyncio.create_task(_status(reader))
            writer.write((head + body)[:at_once])
            for at in range(at_once, len(head + body)):
                await asyncio.wait({answer}, timeout=1.0)
                if answer.done():
                    break
                writer.write((head + body)[at : at + 1])
            async with asyncio.timeout(_ANSWER_LIMIT_S):
                status = await answer
            tally.slow[status] += 1
            if status >= 500:
                tally.faults.append(f"{status}: a byte a second")
        except (OSError, ValueError, TimeoutError) as error:
            tally.faults.append(f"{error!r}: a byte a second, {at_once} at once of {len(head)} + {len(body)}")
        finally:
            answer.cancel()
            writer.transport.abort()
