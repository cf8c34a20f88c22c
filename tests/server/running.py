"""A server over the real engine loop, scheduler and cache, without a model: every token is the letter a."""

import time
from collections.abc import Callable
from typing import Any

import httpx
import msgspec

from octavo.cache import KVCache
from octavo.engine.build import Engine, build_engine
from octavo.engine.in_process_client import InProcessClient
from octavo.messages import EngineReport, StepPlan, StepResult
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.server.app import build_app
from tests.doubles import REPORT, byte_text, config


class SaysA:
    """One step takes a few milliseconds, as a model's would."""

    overlap = False

    def __init__(self, seconds: float = 0.002) -> None:
        self._plans: list[StepPlan] = []
        self._seconds = seconds

    def start(self) -> EngineReport:
        return REPORT

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def collect(self) -> StepResult:
        time.sleep(self._seconds)
        plan = self._plans.pop(0)
        return StepResult(plan.step, [ord("a")] * sum(plan.samples))

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        done(0)

    def close(self) -> None:
        pass


def engine(num_pages: int = 64, seconds: float = 0.002, **limits: int) -> Engine:
    report = msgspec.structs.replace(REPORT, num_pages=num_pages, **limits)
    cache = KVCache(num_pages, report.page_size)
    scheduler = Scheduler(cache, report.max_num_seqs, report.max_num_batched_tokens)
    return build_engine(scheduler, SaysA(seconds), EngineMetrics("byte-model", report))


class Served:
    def __init__(self, engine: Engine, **options: Any) -> None:
        self.client = InProcessClient(engine)
        self.app = build_app(self.client, byte_text(), config(**options), "byte-model")
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app=self.app), base_url="http://localhost")

    async def journey(self, request_id: str) -> dict[str, Any]:
        response = await self.http.get(f"/v1/requests/{request_id}")
        assert response.status_code == 200, response.text
        return dict(response.json())

    async def listed(self, **query: str) -> list[str]:
        response = await self.http.get("/v1/requests", params=query)
        assert response.status_code == 200, response.text
        return [journey["id"] for journey in response.json()["data"]]


def ask(prompt: str = "hello", max_tokens: int = 5, **more: Any) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0, **more}
