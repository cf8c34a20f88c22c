"""GET /health: 200 only if a token could be produced now. /health/live, /health/ready, /health/progress: the parts of that. /ping: the
same as /health, as Amazon SageMaker asks for it.

live: this process answers. ready: new requests are accepted, and there is an engine whose step does not take far longer than usual.
/health: ready, and the engine's loop runs. progress: what the engine is doing, which requests wait and why; 200 or 503 as
/health, with the reasons in its body."""

import asyncio
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec
from fastapi import APIRouter, Request, Response

from octavo.engine.progress import Progress, Quiet, Status
from octavo.errors import EngineDead, EngineError, EngineUnavailable
from octavo.ipc.heartbeat import Heartbeat
from octavo.messages import FleetState, Ping, ReadProgress
from octavo.server.http.sse import viewer_of
from octavo.server.schema.shapes import Shape
from octavo.server.state.service import Service

FRESH_SECONDS = 1.0
"""Seconds: tokens this recent prove that the loop runs, without a query."""
PING_SECONDS = 5.0
"""Seconds: a loop that does not answer in this time, and is not seen to compute, is stuck."""
STALLED_SECONDS = 2.0
"""Seconds within which a healthy engine has beaten, or at least computed something."""
SLOW_TIMES = 10
"""A step that takes this many times as long as usual is too slow, after --slow-step-seconds."""
FIRST_TIMES = 6
"""This many times --slow-step-seconds for a step of a new size: kernels are compiled, weights read from disk."""
ANSWER_SECONDS = 1.0
"""Seconds to wait for the engine's progress report; after that only what this process sees is reported."""

_OK = Shape(dict[Literal["status"], Literal["ok"]])
SHAPES = {
    **dict.fromkeys(("GET /health", "GET /health/live", "GET /health/ready", "GET /ping", "POST /ping"), _OK),
    "GET /health/progress": Shape(Progress, error={"type": "object"}),
}


def router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health/live")
    async def live() -> Response:
        return _ok()

    @router.get("/health/ready")
    async def ready() -> Response:
        check_ready(service)
        return _ok()

    @router.get("/health")
    async def health() -> Response:
        check_ready(service)
        await check_loop(service)
        return _ok()

    @router.get("/ping")
    @router.post("/ping")
    async def ping() -> Response:
        return await health()

    @router.get("/health/progress")
    async def progress(request: Request) -> Response:
        progress = await read_progress(service, viewer_of(service, request).only)
        return Response(
            msgspec.json.encode(progress), 200 if progress.status == "ok" else 503, media_type="application/json"
        )

    return router


def check_ready(service: Service) -> None:
    service.accept()
    if service.engine.is_recovering:
        raise EngineUnavailable("the engine has ended and is being restarted; requests wait for it", 2)
    check_step(service)


def check_step(service: Service) -> None:
    """Raise EngineUnavailable where a step takes far longer than usual, in each replica that takes requests. The supervisor acts on its
    own limit."""
    problems = [
        _slow_step(heartbeat, service.config.server.slow_step_seconds) for heartbeat in service.engine.heartbeats()
    ]
    if problems and all(problems):
        raise EngineUnavailable(problems[0], 5)


def _slow_step(heartbeat: Heartbeat, seconds: float) -> str:
    """Describe a step that takes too long. Empty: there is none."""
    if not seconds or not heartbeat.is_stepping or (usual := heartbeat.usual()) is None:
        return ""
    longest, is_known = usual
    age = _age(heartbeat.beat)
    if age <= max(seconds if is_known else FIRST_TIMES * seconds, SLOW_TIMES * longest):
        return ""
    return f"step {heartbeat.num_steps} has been running for {age:.1f} s; usually it takes at most {longest:.1f} s"


async def check_loop(service: Service) -> None:
    """Raise EngineUnavailable unless the step loop runs; of a fleet, one of them."""
    if time.monotonic() - service.last_heard <= FRESH_SECONDS:
        return
    problem: EngineUnavailable | None = None
    for heartbeat in service.engine.heartbeats():
        try:
            if _is_seen_running(heartbeat, service.config.server.step_timeout):
                return
        except EngineUnavailable as error:
            problem = problem or error
        else:
            problem = None
            break
    if problem is not None:
        raise problem
    await service.query(Ping(call=0), PING_SECONDS)
    service.heard()


def _is_seen_running(heartbeat: Heartbeat, step_timeout: float) -> bool:
    """Whether the heartbeat proves it. False: the engine must be queried. Raises EngineUnavailable where that is in vain."""
    if (stalled := heartbeat.stalled_seconds) > STALLED_SECONDS:
        raise EngineUnavailable(f"the engine has made no progress for {stalled:.1f} s", 5)
    age = _age(heartbeat.beat)
    if age <= FRESH_SECONDS:
        return True
    # A long step: the supervisor notices where nothing is computed, if the kernel reports it.
    return heartbeat.is_stepping and sys.platform == "linux" and age < (step_timeout or float("inf"))


async def read_progress(service: Service, owner: bytes | None = None) -> Progress:
    """How the engine is doing. Names the requests of one owner (None: of all)."""
    engine, heartbeat = service.engine, service.engine.heartbeat
    progress = Progress()
    status: Status = "ok"
    problem = ""
    try:
        service.accept()
        if engine.is_recovering:
            status = "recovering"
        else:
            async with asyncio.timeout(ANSWER_SECONDS):
                progress = msgspec.json.decode(await engine.control(ReadProgress(call=0, owner=owner)), type=Progress)
    except EngineDead:
        status = "dead"
    except EngineError:
        status = "draining" if service.draining else "recovering" if engine.is_recovering else "starting"
    except TimeoutError:  # in a long step, or stuck
        try:
            check_step(service)
            await check_loop(service)
        except EngineError as error:
            status, problem = "stuck", error.message
    seen = {} if heartbeat is None else _seen(heartbeat)
    if engine.fleet is not None:
        seen = _fleet_seen(engine.fleet, engine.heartbeats(), seen)
    if status == "stuck" and heartbeat is not None and heartbeat.is_stepping and owner is None:
        running = _age(heartbeat.beat)
        why = f"its step has not ended for {running:.1f} s: {problem}"
        seen["without_progress"] = [Quiet(name, round(running, 3), why) for name in heartbeat.seated()]
    if status == "recovering":
        waiting = engine.num_open
        seen |= {"waiting": waiting, "running": 0, "step_running_s": None, "stalled_s": 0.0}
    return msgspec.structs.replace(progress, status=status, **{"restarts": engine.num_restarts, **seen})


def _seen(heartbeat: Heartbeat) -> dict[str, object]:
    """What the engine's heartbeat shows, whether it answers or not."""
    restarts = Counter[str]()
    for (process, _), count in heartbeat.restarts().items():
        restarts[process] += count
    return {
        "restarts": restarts["engine"],
        "api_restarts": restarts["api"],
        "steps": heartbeat.num_steps,
        "last_step_age_s": round(_age(heartbeat.last_step), 3) if heartbeat.last_step else None,
        "step_running_s": round(_age(heartbeat.beat), 3) if heartbeat.is_stepping and heartbeat.beat else None,
        "stalled_s": round(heartbeat.stalled_seconds, 3),
        "running": heartbeat.num_running,
        "waiting": heartbeat.num_waiting,
    }


def _fleet_seen(fleet: FleetState, heartbeats: Sequence[Heartbeat], server: dict[str, object]) -> dict[str, object]:
    """The same of all replicas. `server`: of the first block, which has the words of the API processes, too."""
    each = [_seen(heartbeat) for heartbeat in heartbeats]
    return {
        "restarts": sum(replica.restarts for replica in fleet.replicas),
        "api_restarts": server.get("api_restarts", 0),
        "steps": sum(heartbeat.num_steps for heartbeat in heartbeats),
        "last_step_age_s": min(
            (age for seen in each if isinstance(age := seen["last_step_age_s"], float)), default=None
        ),
        "step_running_s": max((age for seen in each if isinstance(age := seen["step_running_s"], float)), default=None),
        "stalled_s": min((heartbeat.stalled_seconds for heartbeat in heartbeats), default=0.0),
        "running": sum(heartbeat.num_running for heartbeat in heartbeats),
        "waiting": sum(heartbeat.num_waiting for heartbeat in heartbeats),
        "replicas": fleet.replicas,
        "target_replicas": fleet.target,
    }


def _age(nanoseconds: int) -> float:
    return (time.monotonic_ns() - nanoseconds) / 1e9


def _ok() -> Response:
    return Response(b'{"status":"ok"}', media_type="application/json")
