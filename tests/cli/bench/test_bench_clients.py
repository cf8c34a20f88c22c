"""One load over several client processes: how it is split, that nothing is lost or counted twice, what a lost process means."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from octavo.cli.bench import clients
from octavo.cli.bench.clients import RunResult, merge, num_processes, show_share, split
from octavo.cli.bench.sending import RequestResult
from octavo.cli.bench.serve import judge
from octavo.cli.bench.workload import Workload
from octavo.errors import RequestFailed
from tests.cli.bench.test_bench_serve import command, running


@pytest.mark.parametrize(
    ("wanted", "num_streams", "num_cores", "expected"),
    [
        ("auto", 256, 2, 1),
        ("auto", 256, 16, 4),
        ("auto", 256, 256, 8),
        ("auto", 8, 16, 1),
        ("auto", 64, 16, 2),
        (3, 256, 2, 3),
        (8, 3, 16, 3),  # each has at least one stream
    ],
)
def test_how_many(wanted: int | str, num_streams: int, num_cores: int, expected: int) -> None:
    assert num_processes(wanted, num_streams, num_cores) == expected


@pytest.mark.parametrize(
    ("num_requests", "streams", "num"), [(10, 7, 3), (3, 3, 3), (8, None, 4), (5, 2, 2), (4, 4, 1)]
)
def test_parts_make_the_whole(num_requests: int, streams: int | None, num: int) -> None:
    load = Workload([f"prompt {i}" for i in range(num_requests)], [i / 10 for i in range(num_requests)])
    parts = split(load, streams, num)
    if streams is None:
        assert all(limit is None for _, limit in parts)
    else:
        limits = [limit for _, limit in parts if limit is not None]
        assert sum(limits) == streams and min(limits) >= 1 and max(limits) - min(limits) <= 1
    assert sorted(time for part, _ in parts for time in part.arrivals) == load.arrivals
    results = [[RequestResult(started=arrival) for arrival in part.arrivals] for part, _ in parts]
    assert [result.started for result in merge(results)] == load.arrivals


def test_rates_are_over_the_whole_span() -> None:
    """Two processes that ran one after the other were no faster than one."""
    early = RequestResult(100.0, 100.1, 101.0, [0.1], 10, 20, True)
    late = RequestResult(101.0, 101.1, 102.0, [0.3], 10, 20, True)
    figures = judge(merge([[early], [late]]), {})
    assert figures["seconds"] == 2.0 and figures["output_tokens_per_second"] == 20.0
    assert figures["itl_ms"]["mean"] == pytest.approx(200.0)


async def test_several_processes_send_everything_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    extra = ["--num-prompts", "7", "--max-concurrency", "4", "--input-len", "9", "--client-processes", "2"]
    async with running() as (url, scripted):
        assert await command(url, *extra, "--result", str(file)) == 0
    assert len({body["prompt"] for body in scripted.bodies[1:]}) == 7 == len(scripted.bodies) - 1
    assert scripted.open_peak == 4
    assert scripted.connections == 5  # one for the warm-up, then two of each process
    result: dict[str, Any] = json.loads(file.read_text())
    figures = result["figures"]
    assert figures["num_requests"] == 7 and figures["num_errors"] == 0 and figures["output_tokens"] == 21
    assert figures["client_processes"] == 2 and figures["client_cpu_seconds"] > 0
    # Concurrently: the second process sends its first request while the first one's is open.
    first, second, *_ = result["requests"]
    assert second["started"] - first["started"] < first["latency"]
    assert "2 processes, the busiest computing for" in capsys.readouterr().out


def test_a_lost_process_is_a_failure() -> None:
    ours, theirs = multiprocessing.Pipe(duplex=False)
    news: list[int] = []
    theirs.send(1)
    theirs.close()
    with pytest.raises(RequestFailed, match="a client process ended"):
        clients._gather([ours], news.append)
    assert news == [1]


def test_a_busy_client_is_reported() -> None:
    results = [RequestResult(0.0, 0.1, 2.0, [], 1, 1, True)]
    assert "raise --client-processes" not in show_share(RunResult(results, [1.0, 1.5]))
    assert "raise --client-processes" in show_share(RunResult(results, [1.0, 1.9]))
