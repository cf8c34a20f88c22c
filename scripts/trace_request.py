"""Counts what one streamed chat request of four tokens runs through: files, functions, calls, and the share that only observes.

No sockets and no model: the real application, client, loop, scheduler and cache, with an executor that samples one letter.
A first request warms everything up; the second is counted, in every thread. `python -m scripts.trace_request [--table]`.
"""

import argparse
import asyncio
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import octavo
from tests.server import running

ROOT = Path(octavo.__file__).resolve().parent
OBSERVING = (  # folders and files whose only purpose is to measure, record or show
    "observe/", "recording/", "ipc/heartbeat.py", "admission/queue_limit.py", "engine/step_heartbeat.py", "engine/live_view.py",
    "engine/progress.py", "server/state/journeys.py", "server/state/live_feed.py", "server/state/traces.py",
)  # fmt: skip
BODY = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "ignore_eos": True, "stream": True}

NOW_AND_THEN = {("observe/history.py", "History.note"), ("schedule/step_costs.py", "StepSamples.fit")}
"""Done for all requests together: once a second, and after some steps."""
MAX_TRIES = 40
"""A request is counted only if each token comes in an event of its own and none of these falls into its time. On a busy machine several tokens may
come together."""


class Trace:
    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()  # (file, function) → calls, in the order of the first
        self.is_on = False

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if self.is_on and event == "call" and code.co_filename.startswith(str(ROOT)):
            self.calls[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1


async def traced() -> Trace:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    served = running.Served(running.engine(seconds=0.05))
    try:
        for trace.is_on in (False, *[True] * MAX_TRIES):
            trace.calls.clear()
            response = await served.http.post("/v1/chat/completions", json=BODY)
            assert response.status_code == 200, response.text
            await asyncio.sleep(0.1)  # what follows the last byte: journeys, counters
            is_apart = response.text.count('"content":"a"') == 4
            if trace.is_on and is_apart and NOW_AND_THEN.isdisjoint(trace.calls):
                break
        else:
            raise SystemExit(f"none of {MAX_TRIES} requests could be counted: the machine is too busy")
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
        await served.http.aclose()
        served.client.close()
    return trace


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table", action="store_true", help="also print every function in the order of its first call")
    arguments = parser.parse_args()
    calls = asyncio.run(traced()).calls
    if arguments.table:
        for (file, function), count in calls.items():
            print(f"{count:5} {file}:{function}")
    functions = [
        key for key in calls if "<" not in key[1].rsplit(".", 1)[-1]
    ]  # lambdas and comprehensions are calls, not functions
    observing = {key: count for key, count in calls.items() if key[0].startswith(OBSERVING)}
    share = sum(observing.values()) / sum(calls.values())
    print(f"{len({file for file, _ in calls})} files, {len(functions)} functions, {sum(calls.values())} calls")
    print(f"observing: {len({file for file, _ in observing})} files, {sum(observing.values())} calls, {share:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
