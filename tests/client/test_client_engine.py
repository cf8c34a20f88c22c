"""The contract of engine clients, on a real loop and scheduler with an executor that needs no model."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from octavo.admission.validate import admit
from octavo.cache import KVCache
from octavo.engine.build import Engine, build_engine
from octavo.engine.in_process_client import InProcessClient
from octavo.errors import ContextTooLong, EngineDead, InvalidRequest
from octavo.messages import EngineReport, Ping, ReadMetrics, ResetPrefixCache, SamplingParams, StepPlan, StepResult
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.supervisor.memory_report import budget_lines

REPORT = EngineReport("cpu", "float32", 100, 64, 4, 32, 4, 50, 0, 1000, 10)


class CountingExecutor:
    """Samples for every row the position of the new token. Fails at step `fail_at`. `overlap` None: alternates from step to
    step."""

    def __init__(self, overlap: bool | None, fail_at: int = -1) -> None:
        self.overlap, self.fail_at = bool(overlap), fail_at
        self.changes = overlap is None
        self.plans: list[StepPlan] = []

    def start(self) -> EngineReport:
        return REPORT

    def submit(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        assert len(self.plans) <= 2
        if self.changes:
            self.overlap = plan.step % 3 != 0

    def collect(self) -> StepResult:
        plan = self.plans.pop(0)
        if plan.step == self.fail_at:
            raise EngineDead("a worker is lost")
        columns = zip(plan.starts, plan.counts, plan.samples, strict=True)
        return StepResult(plan.step, [start + count for start, count, samples in columns if samples])

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        done(0)

    def close(self) -> None:
        pass


def make_engine(
    overlap: bool | None = False,
    fail_at: int = -1,
    report: EngineReport = REPORT,
    executor: CountingExecutor | None = None,
    **parts: Any,
) -> Engine:
    """`parts`: of build_engine."""
    scheduler = Scheduler(KVCache(report.num_pages, report.page_size), report.max_num_seqs, 32)
    executor = CountingExecutor(overlap, fail_at) if executor is None else executor
    return build_engine(scheduler, executor, EngineMetrics("tiny", report), **parts)


@contextlib.asynccontextmanager
async def client_of(engine: Engine):
    client = InProcessClient(engine)
    try:
        yield client
    finally:
        client.close()


def request(name: str, num_tokens: int = 5, n: int = 1):
    return admit(name, [1, 2, 3], SamplingParams(max_tokens=num_tokens, n=n, seed=1), REPORT, eos_ids=())


async def collect(client, name: str) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {}
    async for deltas in client.deltas(name):
        for delta in deltas:
            tokens.setdefault(delta.index, []).extend(delta.token_ids)
    return tokens


@pytest.mark.parametrize("overlap", [False, True, None])
async def test_many_requests_each_get_their_own(overlap):
    async with client_of(make_engine(overlap)) as client:
        requests = [request(f"r{i}", 2 + i % 7, n=1 + i % 3) for i in range(40)]
        for each in requests:
            client.submit(each)
        answers = await asyncio.gather(*(collect(client, each.id) for each in requests))
        for each, answer in zip(requests, answers, strict=True):
            wanted = list(range(3, 3 + each.params.max_tokens))
            assert answer == dict.fromkeys(range(each.params.n), wanted)


async def test_leaving_early_frees_rows_and_pages():
    roomy = msgspec.structs.replace(REPORT, max_model_len=10**7, num_pages=10**6)
    engine = make_engine(report=roomy)
    async with client_of(engine) as client:
        # Enough tokens that it cannot finish before it is aborted.
        client.submit(admit("a", [1, 2, 3], SamplingParams(max_tokens=10**6, seed=1), roomy, eos_ids=()))
        async with contextlib.aclosing(client.deltas("a")) as deltas:
            async for _ in deltas:
                break
        await client.control(Ping(0))
        assert engine.loop.scheduler.is_idle and engine.loop.scheduler.cache.pool.num_used == 0
        text = await client.control(ReadMetrics(0))
        assert any('"abort"' in line and line.endswith(" 1.0") for line in text.splitlines())


async def test_one_choice_can_be_ended_alone():
    async with client_of(make_engine()) as client:
        client.submit(request("a", 30, n=2))
        tokens, ended = {0: 0, 1: 0}, False
        async for deltas in client.deltas("a"):
            assert not ended or all(delta.index == 1 for delta in deltas)
            for delta in deltas:
                tokens[delta.index] += len(delta.token_ids)
            if tokens[0] and not ended:
                client.abort("a", 0, "stop")
                ended = True
        assert ended and tokens[1] == 30


async def test_a_dead_engine_fails_every_stream_and_every_call():
    async with client_of(make_engine(fail_at=3)) as client:
        for name in "ab":
            client.submit(request(name, 50))
        for result in await asyncio.gather(collect(client, "a"), collect(client, "b"), return_exceptions=True):
            assert isinstance(result, EngineDead) and "a worker is lost" in str(result)
        with pytest.raises(EngineDead):
            await client.control(Ping(0))
        with pytest.raises(EngineDead):
            await client.ready()


async def test_controls():
    async with client_of(make_engine()) as client:
        assert await client.ready() == REPORT
        assert await client.control(Ping(0)) == "pong"
        client.submit(request("a"))
        await collect(client, "a")
        assert await client.control(ResetPrefixCache(0)) == "1"


def test_validation_names_the_field_and_the_limit():
    def knock(prompt, **params):
        return admit("x", prompt, SamplingParams(**params), REPORT, eos_ids=(7,))

    with pytest.raises(InvalidRequest, match="prompt is empty"):
        knock([])
    with pytest.raises(InvalidRequest, match=r"prompt\[1\] is 100; token ids go from 0 to 99"):
        knock([1, 100])
    with pytest.raises(ContextTooLong, match="64 tokens; the context holds 64"):
        knock([1] * 64)
    with pytest.raises(ContextTooLong, match="max_tokens can be at most 54, got 60"):
        knock([1] * 10, max_tokens=60)
    with pytest.raises(InvalidRequest, match="n must be at most 4"):
        knock([1], n=5, use_beam_search=True)
    assert knock([1], n=5).params.n == 5, "choices that find no row wait"
    with pytest.raises(InvalidRequest, match=r"stop_token_ids\[0\] is 100"):
        knock([1], stop_token_ids=[100])
    accepted = knock([1] * 10, max_tokens=None, stop_token_ids=[9, 7])
    assert accepted.params.max_tokens == 54 and accepted.params.seed is not None and accepted.stop_ids == [7, 9]
    assert knock([1], ignore_eos=True).stop_ids == []


def test_the_budget_is_in_bytes_tokens_and_requests():
    text = "\n".join(budget_lines(REPORT))
    assert "weights 1,000 bytes" in text and "KV pages 500 bytes: 50 pages of 4 tokens = 200 tokens" in text
    assert "3 requests of the full 64 tokens" in text
