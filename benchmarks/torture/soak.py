"""The soak: minutes of mixed load with clients that disconnect, pages that run out and an engine that is killed; reports the
memory held at each look."""

import asyncio
import dataclasses
import itertools
import json
import os
import random
import signal
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field

from benchmarks.torture.attacks import CATALOGUE
from benchmarks.torture.attacks.base import Attack, Door, Send, several
from benchmarks.torture.hostile import Hostile, hostile
from benchmarks.torture.house import Held, House, family, held, read_metric
from benchmarks.torture.mixed import ask
from benchmarks.torture.strike import Battle
from octavo.cli.bench.http_stream import Client, HTTPFailure
from octavo.schedule.grammar_cache import MAX_UNUSED

FLAGS = (
    # Few pages, so that long answers preempt each other.
    *("--kv-cache-memory-bytes", "48M", "--max-model-len", "1024", "--api-processes", "2"),
    # Histories of past requests have limits and are full within minutes: growth after that is a leak.
    *("--journey-bytes", "512K", "--max-stored-responses", "20"),
)
HOSTILE_FLAGS = ("--trust-request-chat-template",)
_NUM_HOSTILE = 4
_CANARY = {"prompt": "Once upon a time there was a", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
"""Asked again and again among the load: its answer must never change."""
_REST_S = 2.5
"""Seconds after which an idle engine has returned its freed memory to the system."""
MAX_SLOPE = 0.01
"""Share of the held memory by which it may grow in the steady part, by the slope of its looks."""


@dataclass(frozen=True, slots=True)
class Look:
    minute: float
    engine: int  # its process id: a new engine's memory cannot be compared with the old one's
    held: Held  # while idle
    parts: dict[str, int]  # bytes of `held.private`, by kind of process
    pages: dict[str, int]  # by state, while idle
    most_pages: int  # most pages in use at one time since the last look, sampled every second
    preemptions: int  # since the start


@dataclass(slots=True)
class Count:
    asked: Counter[str] = field(default_factory=Counter)
    answers: int = 0
    left: int = 0
    canaries: int = 0
    changed: int = 0  # canary answers that differed
    errors: list[str] = field(default_factory=list)
    killed: int = 0
    preemptions: int = 0
    attacks: Counter[str] = field(default_factory=Counter)  # by name


class Soak:
    def __init__(self, house: House, minutes: float, seed: int, num_clients: int, is_hostile: bool = False) -> None:
        """`is_hostile`: some more clients attack all the time."""
        self._house, self._minutes, self._num_clients = house, minutes, num_clients
        self._num_hostile = _NUM_HOSTILE if is_hostile else 0
        self._dice = random.Random(seed)
        self._song = ""
        self._most_pages = 0
        self._preempted: dict[int, int] = {}  # by engine
        self.count = Count()

    async def run(self, show: Callable[[Look], None]) -> list[Look]:
        """Look once before the load, once when it is warm, then every minute, or every tenth of the soak if that is shorter."""
        interval = min(60.0, self._minutes * 6)
        num_looks = max(2, round(self._minutes * 60 / interval))
        self._song = await self._sing(client := self._house.client())
        await client.close()
        began = time.monotonic()
        looks = [await self._look(0.0)]
        show(looks[0])
        filled = 0  # the engine whose cache of grammars is full
        for number in range(1, num_looks + 1):
            until = began + number * interval
            if number < num_looks and time.monotonic() + interval / 2 > until:
                continue  # earlier answers took too long
            if filled != self._house.engine():
                await self._fill_grammars()
                filled = self._house.engine()
            # The kill comes after a third of the time: the next engine's caches are full well before the end.
            await self._load(until, kills=not self.count.killed and number >= num_looks // 3)
            looks.append(await self._look((time.monotonic() - began) / 60))
            show(looks[-1])
        return looks

    async def _look(self, minute: float) -> Look:
        await self._house.used_pages()
        await asyncio.sleep(_REST_S)
        text = await self._house.metrics()
        pages = {
            state: read_metric(text, "octavo:kv_pages", f'state="{state}"') for state in ("used", "cached", "free")
        }
        engine = self._house.engine()
        self._note(engine, text)
        most, self._most_pages = self._most_pages, 0
        servers = self._house.servers()
        kinds = {
            "engine": [engine],
            "its grammars": family(engine)[1:],
            "API": servers,
            "its sandboxes": [pid for server in servers for pid in family(server)[1:]],
            "supervisor": [self._house.process.pid],
        }
        parts = {kind: held(pids).private for kind, pids in kinds.items()}
        return Look(minute, engine, self._house.held(), parts, pages, most, self.count.preemptions)

    def _note(self, engine: int, text: str) -> None:
        self._most_pages = max(self._most_pages, read_metric(text, "octavo:kv_pages", 'state="used"'))
        self._preempted[engine] = read_metric(text, "vllm:num_preemptions_total")
        self.count.preemptions = sum(self._preempted.values())

    async def _load(self, until: float, kills: bool) -> None:
        clients = [random.Random(self._dice.random()) for _ in range(self._num_clients)]
        watching = asyncio.create_task(self._watch())
        killing = asyncio.create_task(self._kill((until - time.monotonic()) / 2)) if kills else None
        attackers = [random.Random(self._dice.random()) for _ in range(self._num_hostile)]
        await asyncio.gather(
            self._canary(until),
            *(self._client(dice, until) for dice in clients),
            *(self._attacker(dice, until) for dice in attackers),
        )
        watching.cancel()
        await asyncio.wait({watching})
        if killing is not None:
            await killing

    async def _fill_grammars(self) -> None:
        """Have the engine keep as many processes of unused grammars as it may. The load alone brings new grammars so seldom that their
        number would still rise in the steady part."""
        client = self._house.client()
        for number in range(MAX_UNUSED + 4):
            body = {"prompt": "A number:", "max_tokens": 8, "structured_outputs": {"regex": f"[0-9]{{1,{number + 1}}}"}}
            await client.post("/v1/completions", json.dumps(body).encode())
        await client.close()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(1)
            try:
                engine, text = self._house.engine(), await self._house.metrics()
                self._note(engine, text)
            except (OSError, HTTPFailure, ValueError):  # no engine or API process at this moment
                continue

    async def _kill(self, delay: float) -> None:
        await asyncio.sleep(delay)
        os.kill(self._house.engine(), signal.SIGKILL)
        self.count.killed += 1

    async def _canary(self, until: float) -> None:
        client = self._house.client()
        while time.monotonic() < until:
            try:
                self.count.changed += await self._sing(client) != self._song
                self.count.canaries += 1
            except (OSError, HTTPFailure) as error:
                self.count.errors.append(f"canary: {error}")
            await asyncio.sleep(0.2)
        await client.close()

    async def _sing(self, client: Client) -> str:
        answer = json.loads(await client.post("/v1/completions", json.dumps(_CANARY).encode()))
        text: str = answer["choices"][0]["text"]
        return text

    async def _client(self, dice: random.Random, until: float) -> None:
        client = self._house.client()
        while time.monotonic() < until:
            asked = ask(dice)
            self.count.asked[asked.kind] += 1
            leaves_after = dice.choice([None, None, 1, 20]) if asked.is_stream else None
            patience = 0.05 if not asked.is_stream and dice.random() < 0.2 else None  # disconnects before any answer
            try:
                if asked.is_stream:
                    await self._read(client, asked.kind, asked.path, asked.body, leaves_after)
                else:
                    async with asyncio.timeout(patience):
                        await client.post(asked.path, asked.body)
                    self.count.answers += 1
            except TimeoutError:
                self.count.left += 1
            except (OSError, HTTPFailure) as error:
                self.count.errors.append(f"{asked.kind}: {type(error).__name__}: {error}"[:300])
        await client.close()

    async def _attacker(self, dice: random.Random, until: float) -> None:
        door = Door(self._house.port)
        while time.monotonic() < until:
            attack = dice.choice(_CHEAP) if dice.random() < 0.5 else _as_attack(hostile(dice, []))
            battle = Battle(dataclasses.replace(attack, is_flood=True), door, dice)
            await battle.fight()
            self.count.attacks[attack.name] += 1
            if problem := battle.problem:
                self.count.errors.append(f"{attack.name}: {problem}"[:300])
            await asyncio.sleep(dice.random())

    async def _read(self, client: Client, kind: str, path: str, body: bytes, leaves_after: int | None) -> None:
        num_events = 0
        async with aclosing(client.post_events(path, body)) as events:
            async for event in events:
                num_events += 1
                if b'"error"' in event and _is_error(event):
                    self.count.errors.append(f"{kind}: {event.decode()}"[:300])
                if num_events == leaves_after:
                    self.count.left += 1
                    return
        self.count.answers += 1


_CHEAP = [attack for attack in CATALOGUE if attack.is_cheap and attack.check is None and attack.needs == "any"]


def _as_attack(made: Hostile) -> Attack:
    return several(
        made.kind.replace(" ", "-"),
        lambda door: [Send([made.request], "leave" if made.waits == "nothing" else "answer")],
        seconds=30.0,
    )


def _is_error(event: bytes) -> bool:
    decoded = json.loads(event)
    return bool(decoded.get("error")) or decoded.get("type") == "error"


def steady(looks: list[Look]) -> list[Look]:
    """Return the last engine's looks without their first half: rings and caches fill up to their size once."""
    last = [look for look in looks if look.engine == looks[-1].engine]
    return last[len(last) // 2 :] if len(last) > 3 else last


def slope(looks: list[Look]) -> float:
    """Return bytes a minute: the median over all pairs of looks, which one jump does not move."""
    pairs = [(a, b) for a, b in itertools.combinations(looks, 2) if b.minute > a.minute]
    return statistics.median((b.held.private - a.held.private) / (b.minute - a.minute) for a, b in pairs)


def verdict(looks: list[Look], count: Count) -> list[str]:
    """Return the faults found; empty: none."""
    part = steady(looks)
    risen = slope(part) * (part[-1].minute - part[0].minute)
    first, last = part[0].held, part[-1].held
    total = sum(looks[0].pages.values())
    found = [
        (risen > MAX_SLOPE * first.private, f"memory rises: {risen / 2**20:+.1f} MiB in the steady part"),
        (last.open_files > first.open_files + 8, f"open files: {first.open_files} → {last.open_files}"),
        (last.threads > first.threads + 4, f"threads: {first.threads} → {last.threads}"),
        (any(look.pages["used"] for look in looks), "pages are in use when nothing runs"),
        (any(sum(look.pages.values()) != total for look in looks), "used, cached and free pages do not add up"),
        (bool(count.errors), f"{len(count.errors)} errors"),
        (bool(count.changed), f"{count.changed} of {count.canaries} canaries changed"),
        (not count.killed or looks[0].engine == looks[-1].engine, "no engine was killed and replaced"),
        (not count.preemptions, "no request was preempted: the load is too light"),
    ]
    return [what for is_wrong, what in found if is_wrong]
