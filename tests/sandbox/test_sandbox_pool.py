"""The sandbox: whatever a job does costs that job alone, owners take turns, and nothing outlives its use."""

import asyncio
import contextlib
import marshal
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import EngineUnavailable, Overloaded, Unsupported
from octavo.sandbox.pool import JobEnded, JobFailed, SandboxPool
from octavo.sandbox.seccomp import restrict_system_calls
from tests.descriptors import many_descriptors
from tests.sandbox import probe_jobs

MIB = 2**20
LIMITS: dict[str, Any] = {
    "num_processes": 2, "seconds": 30.0, "memory_bytes": 256 * MIB, "stack_bytes": MIB, "max_waiting": 64,
}  # fmt: skip
Start = Callable[..., SandboxPool]
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    pools: list[SandboxPool] = []

    def start(data: bytes = b"", **limits: Any) -> SandboxPool:
        pools.append(SandboxPool(probe_jobs.MODULE, data, **{**LIMITS, **limits}))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()


async def run(pool: SandboxPool, name: str, *arguments: Any, owner: bytes = b"") -> Any:
    return await pool.run(marshal.dumps((name, arguments)), owner)


def children(pool: SandboxPool) -> list[int]:
    server = pool.server_process
    if server is None:
        return []
    return [int(child) for child in Path(f"/proc/{server}/task/{server}/children").read_text().split()]


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 (of other processes)
            await asyncio.sleep(0.01)


def computing(pool: SandboxPool) -> list[int]:
    """The processes that have computed for a while, and live."""
    found = []
    for child in children(pool):
        with contextlib.suppress(OSError):
            state, *fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            if state != "Z" and int(fields[10]) / os.sysconf("SC_CLK_TCK") >= 0.2:
                found.append(child)
    return found


async def test_a_job_runs_in_another_process_and_returns_plain_data(start: Start) -> None:
    pool = start()
    assert pool.server_process is None, "it starts with the first job"
    value = {"a": [1, 2.5, None, "ß", b"\xff"], "b": True}
    assert await run(pool, "echo", value) == value
    assert pool.server_process not in (None, os.getpid())
    assert await asyncio.gather(*[run(pool, "echo", number) for number in range(20)]) == list(range(20))


async def test_a_large_job_and_a_large_result(start: Start) -> None:
    text = "x" * (8 * MIB)
    assert await run(start(), "echo", text) == text


async def test_errors_about_the_input_arrive_with_their_fields(start: Start) -> None:
    with pytest.raises(Unsupported) as caught:
        await run(start(), "refuse", "lone \ud800")
    error = caught.value
    assert error.message == "tools[0].lone \\ud800 is not supported beside n" and len(error.sentence.fields) == 2
    assert error.param == "tools[0].lone \\ud800"


async def test_a_mistake_of_ours_arrives_with_its_traceback(start: Start) -> None:
    pool = start()
    with pytest.raises(JobFailed, match="a mistake of ours"):
        await run(pool, "fail")
    assert await run(pool, "echo", 1) == 1


ENDS = {
    "spin": ("time", "SIGPROF|killed"),  # the latter where it got too little of a busy machine
    "hoard": ("memory", "no memory"),
    "overflow": ("crash", "SIGSEGV"),
}
SECONDS = {"spin": 0.5, "hoard": 30.0, "overflow": 30.0}  # touching memory up to its limit takes processor time, too


@pytest.mark.parametrize("name", ENDS)
async def test_what_a_job_does_costs_that_job_alone(start: Start, name: str) -> None:
    pool = start(seconds=SECONDS[name])
    cause, detail = ENDS[name]
    beside = asyncio.gather(*[run(pool, "echo", number) for number in range(10)])
    with pytest.raises(JobEnded, match=detail) as caught:
        await run(pool, name)
    assert caught.value.cause == cause
    server = pool.server_process
    assert await beside == list(range(10))
    assert await run(pool, "echo", 1) == 1 and pool.server_process == server


async def test_a_job_that_only_waits_is_ended_too(start: Start) -> None:
    with pytest.raises(JobEnded) as caught:
        await run(start(seconds=0.1), "doze", 600.0)
    assert caught.value.cause == "time"


async def test_a_result_that_is_too_large_is_not_read(start: Start) -> None:
    with pytest.raises(JobEnded) as caught:
        await run(start(), "talk", 65 * MIB)
    assert caught.value.cause == "memory"


@on_linux
async def test_a_killed_process_costs_nothing_and_a_second_one_the_job(start: Start) -> None:
    """The system may kill it for its memory, which is not the job's fault."""
    pool = start(num_processes=1)
    for seconds, num_kills in ((1.0, 1), (1e9, 2)):
        await until(lambda: not computing(pool))
        job = asyncio.create_task(run(pool, "spin", seconds))
        for _ in range(num_kills):
            await until(lambda: bool(computing(pool)))
            (child,) = computing(pool)
            os.kill(child, signal.SIGKILL)
            await until(lambda child=child: child not in computing(pool))  # type: ignore[misc]
        if num_kills == 1:
            assert await job == 1.0
    with pytest.raises(EngineUnavailable, match="SIGKILL"):
        await job
    assert await run(pool, "echo", 1) == 1


async def test_a_process_with_many_descriptors_has_jobs(start: Start) -> None:
    with many_descriptors():
        pool = start()
        assert await asyncio.gather(*[run(pool, "echo", number) for number in range(5)]) == list(range(5))


@on_linux
async def test_a_killed_fork_server_is_replaced(start: Start) -> None:
    pool = start()
    assert await run(pool, "echo", 1) == 1
    jobs = asyncio.gather(*[run(pool, "doze", 0.5) for _ in range(4)])
    await until(lambda: pool.num_running == 2)
    server = pool.server_process
    assert server is not None
    os.kill(server, signal.SIGKILL)
    assert await jobs == [0.5] * 4
    assert pool.server_process not in (None, server)


async def test_a_fork_server_that_does_not_start_is_an_error(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    pool = start(b"broken")
    results = await asyncio.gather(*[run(pool, "echo", 1) for _ in range(3)], return_exceptions=True)
    assert all(isinstance(result, EngineUnavailable) and "not start" in result.message for result in results)
    assert pool.num_waiting == 0
    assert "this server does not start" in capfd.readouterr().err


async def test_owners_take_turns(start: Start) -> None:
    pool = start(num_processes=1)
    finished: list[bytes] = []

    async def one(owner: bytes) -> None:
        await run(pool, "echo", 1, owner=owner)
        finished.append(owner)

    await run(pool, "echo", 0)
    many = [asyncio.create_task(one(b"many")) for _ in range(30)]
    await asyncio.sleep(0)
    few = [asyncio.create_task(one(b"few")) for _ in range(3)]
    await asyncio.gather(*many, *few)
    assert max(at for at, owner in enumerate(finished) if owner == b"few") < 12


async def test_quick_jobs_do_not_wait_for_slow_ones_of_the_same_owner(start: Start) -> None:
    pool = start(seconds=0.6)
    slow = [asyncio.create_task(run(pool, "spin")) for _ in range(4)]
    await until(lambda: pool.num_running == 2)
    for number in range(5):
        assert await run(pool, "echo", number) == number
    assert sum(task.done() for task in slow) < 4
    ends = await asyncio.gather(*slow, return_exceptions=True)
    assert all(isinstance(end, JobEnded) and end.cause == "time" for end in ends)


async def test_a_full_queue_refuses_the_owner_that_fills_it(start: Start) -> None:
    pool = start(num_processes=1, max_waiting=4)
    await run(pool, "echo", 0)
    running = asyncio.create_task(run(pool, "doze", 1.0, owner=b"many"))
    await until(lambda: pool.num_running == 1)
    many = [asyncio.create_task(run(pool, "echo", number, owner=b"many")) for number in range(4)]
    await until(lambda: pool.num_waiting == 4)
    with pytest.raises(Overloaded) as caught:
        await run(pool, "echo", 9, owner=b"many")
    assert caught.value.status == 429 and caught.value.retry_after and "--max-waiting-grammars" in caught.value.message
    assert await run(pool, "echo", 7, owner=b"few") == 7, "the newest of those who have more gives way"
    results = await asyncio.gather(*many, return_exceptions=True)
    assert results[:3] == [0, 1, 2] and isinstance(results[3], Overloaded)
    assert await running == 1.0


@on_linux
async def test_an_abandoned_job_is_ended(start: Start) -> None:
    pool = start(num_processes=1)
    running = asyncio.create_task(run(pool, "spin"))
    waiting = asyncio.create_task(run(pool, "echo", 1))
    await until(lambda: pool.num_running == 1 and len(children(pool)) == 1)
    (child,) = children(pool)
    waiting.cancel()
    running.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert pool.num_waiting == 0
    await until(lambda: child not in children(pool))
    assert await run(pool, "echo", 2) == 2


@on_linux
async def test_nothing_is_left_of_a_closed_pool(start: Start) -> None:
    pool = start()
    running = asyncio.create_task(run(pool, "spin"))
    await until(lambda: pool.num_running == 1 and len(children(pool)) == 2)
    processes = [pool.server_process, *children(pool)]
    pool.close()
    with pytest.raises(EngineUnavailable):
        await running
    await until(lambda: not any(Path(f"/proc/{process}").exists() for process in processes))
    with pytest.raises(EngineUnavailable):
        await run(pool, "echo", 1)


@on_linux
async def test_jobs_end_with_the_process_that_asked_for_them(tmp_path: Path) -> None:
    """The pool's process is killed: nothing else remains."""
    script = (
        "import asyncio, marshal, os\n"
        "from octavo.sandbox.pool import SandboxPool\n"
        "async def main():\n"
        f"    pool = SandboxPool({probe_jobs.MODULE!r}, num_processes=1, seconds=600.0, memory_bytes=2**28,"
        " stack_bytes=2**20, max_waiting=4)\n"
        "    await pool.run(marshal.dumps(('echo', (1,))))\n"
        "    job = asyncio.ensure_future(pool.run(marshal.dumps(('spin', ()))))\n"
        "    await asyncio.sleep(0.5)\n"
        "    server = pool.server_process\n"
        "    found = open(f'/proc/{server}/task/{server}/children').read().split()\n"
        "    os.write(1, ' '.join([str(server), *found]).encode() + b'\\n')\n"
        "    await job\n"
        "asyncio.run(main())\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    others = (await process.stdout.readline()).decode().split()
    assert len(others) >= 2
    process.kill()
    await process.wait()
    await until(lambda: not any(_lives(other) for other in others))


def _lives(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False


def test_this_system_has_what_the_next_test_needs() -> None:
    """The filter is installed in a child, for it cannot be removed."""
    child = os.fork()
    if child == 0:
        os._exit(0 if restrict_system_calls() else 1)
    has_filter = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert has_filter or sys.platform != "linux"


async def test_a_job_can_leave_its_process_in_no_way(start: Start, tmp_path: Path) -> None:
    if sys.platform != "linux":
        pytest.skip("only Linux restricts system calls")
    secret = tmp_path / "secret"
    secret.write_text("secret")
    found = await run(start(), "attempts", str(secret))
    assert found.pop("start a thread") == "allowed"
    assert set(found.values()) == {"EPERM"}, found
    assert os.listdir(tmp_path) == ["secret"]


async def test_a_job_sees_no_secret_of_its_server(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert "secret" not in (await run(start(), "environment")).values()


@on_linux
async def test_without_the_filter_the_other_limits_hold(start: Start, tmp_path: Path) -> None:
    """As on macOS, or in a container that forbids the filter."""
    (tmp_path / "file").write_text("text")
    assert await run(start(b"no filter"), "read", str(tmp_path / "file")) == "text"
    for name, (cause, _) in ENDS.items():
        with pytest.raises(JobEnded) as caught:
            await run(start(b"no filter", seconds=SECONDS[name]), name)
        assert caught.value.cause == cause


async def test_closing_before_a_job_has_begun_closes_its_channel(start: Start) -> None:
    pool = start()
    await run(pool, "echo", "first")
    waiting = asyncio.ensure_future(run(pool, "echo", "second"))
    await asyncio.sleep(0)  # its talk is a task now, which has not begun
    assert pool.num_running == 1
    (talk,), channels = pool._talks, [child.channel for child in pool._children.values()]
    pool.close()
    with pytest.raises(EngineUnavailable):
        await waiting
    await asyncio.wait([talk])
    assert channels and all(channel.fileno() == -1 for channel in channels)
