"""The loads that every server is compared on, sent by this process, and their figures: the same prompts and clock for each."""

import argparse
import asyncio
import time
from dataclasses import dataclass
from typing import Any

from octavo.cli.bench.sending import Sender, client_for, drive, loop_factory
from octavo.cli.bench.serve import judge
from octavo.cli.bench.workload import Workload, word_prompts

MODEL_NAME = "bench"
"""Every server serves its model under this name, so clients need not ask for it."""

_TIMEOUT_S = 600.0
_WARMUP_SEED = 1


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop: when a stream ends, the next request takes its place."""

    name: str
    num_requests: int
    num_streams: int
    input_len: int  # words, one token each in all common vocabularies
    output_len: int
    shared_len: int = 0  # words that all prompts begin with, on top of input_len

    @property
    def longest(self) -> int:
        return self.shared_len + self.input_len + self.output_len


FULL = (
    Load("c1", 6, 1, 128, 128),
    Load("c8", 24, 8, 128, 128),
    Load("c32", 64, 32, 128, 128),
    Load("prefix", 16, 8, 128, 128, 512),
)
QUICK = (
    Load("c1", 2, 1, 16, 16),
    Load("c8", 8, 8, 16, 16),
    Load("c32", 32, 32, 16, 16),
    Load("prefix", 16, 8, 16, 16, 64),
)


def first_token(url: str, fields: dict[str, Any]) -> float | None:
    """Return when (time.perf_counter) the first token of a one-token request arrived; None: the server does not answer yet."""

    async def ask() -> float | None:
        client, sender = _sender(url, 1, fields)
        try:
            record = await sender.send(_warmup_prompt(8))
        finally:
            await client.close()
        return None if record.error else record.first

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(ask())


def send(load: Load, url: str, fields: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the figures of one run. `fields`: extra fields of this server's requests."""

    async def run() -> dict[str, Any]:
        client, sender = _sender(url, load.output_len, fields)
        try:
            # Pays the cost of a first request. It shares nothing with the load, whose prefix must be computed in the run.
            await sender.send(_warmup_prompt(load.input_len))
            prompts = word_prompts(load.num_requests, load.input_len, load.shared_len, seed)
            before, started = time.process_time(), time.perf_counter()
            arrivals = [0.0] * len(prompts)
            records = await drive(sender, Workload([*prompts], arrivals), load.num_streams, lambda: None)
            computing = time.process_time() - before
            return judge(records, {}) | {
                "expected_tokens": load.num_requests * load.output_len,
                "client_cpu_seconds": round(computing, 3),
                "client_share": round(computing / (time.perf_counter() - started), 3),
            }
        finally:
            await client.close()

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        return runner.run(run())


def _warmup_prompt(length: int) -> str:
    return word_prompts(1, length, 0, _WARMUP_SEED)[0]


def _sender(url: str, output_len: int, fields: dict[str, Any]) -> tuple[Any, Sender]:
    arguments = argparse.Namespace(
        base_url=url,
        api_key="",
        endpoint="completions",
        timeout=_TIMEOUT_S,
        output_len=output_len,
        temperature=0.0,
        ignore_eos=True,
    )
    client = client_for(arguments)
    return client, _Sender(client, arguments, fields)


class _Sender(Sender):
    """Adds fields that only one server understands, for servers without ignore_eos."""

    def __init__(self, client: Any, arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
        super().__init__(client, arguments, MODEL_NAME)
        self._fields |= fields
