"""What the flight recorder adds to the host time of a step: steady decode with and without it, alternating in one run.
host_step.py has the loop and the executor.

Usage: python benchmarks/recorder_cost.py [--rows 256] [--steps 6000] [--tokens] [--waiting 0]"""

import argparse
import gc
import tempfile
import time
from pathlib import Path

from benchmarks.host_step import WARMUP, build, fill
from octavo.cli.bench.report import facts, percentile
from octavo.engine.loop import EngineLoop
from octavo.messages import EngineReport
from octavo.recording.format import FORMAT, Header
from octavo.recording.recorder import Recorder, Segments
from octavo.recording.ring import RecordingRing

BLOCK = 20  # steps; short, so that noise affects both sides


def start_recorder(report: EngineReport, folder: str, with_tokens: bool) -> Recorder:
    """Start a recorder as the engine process does."""
    options = {"cache": {"enable_prefix_caching": True}}
    header = Header(FORMAT, "none", 0.0, 0.0, "1", with_tokens, "none", "", "folder", options, report, b"")
    return Recorder(Segments(Path(folder), "1", 64 * 2**20), header, RecordingRing())


def measure(loop: EngineLoop, recorder: Recorder, num_steps: int) -> tuple[list[float], list[float]]:
    """Return the CPU time of the stepping thread for each step, (without, with) the recorder."""
    cache = loop.scheduler.cache
    seconds: tuple[list[float], list[float]] = ([], [])
    for step in range(num_steps):
        is_on = step // BLOCK % 2
        if step % BLOCK == 0:
            loop.observers.add(recorder) if is_on else loop.observers.remove(recorder)
            cache.keys_made = [] if is_on and not recorder._with_tokens else None
        started = time.thread_time()
        loop.step()
        ended = time.thread_time()
        if step % BLOCK:  # the first step of a block pays for the switch
            seconds[is_on].append(ended - started)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--waiting", type=int, default=0)
    parser.add_argument("--tokens", action="store_true", help="as with --record-tokens")
    arguments = parser.parse_args()
    loop, executor = build(arguments.rows, arguments.steps + WARMUP, False, time.perf_counter, (0,))
    fill(loop, arguments.rows, arguments.waiting, arguments.steps + WARMUP + 8, False)
    for _ in range(WARMUP):
        loop.step()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    with tempfile.TemporaryDirectory(prefix="octavo-") as folder:
        recorder = start_recorder(executor.start(), folder, arguments.tokens)
        states = []
        loop.record(recorder)
        for _ in range(9):
            started = time.thread_time()
            recorder.take(loop.scheduler)
            states.append(time.thread_time() - started)
        off, on = measure(loop, recorder, arguments.steps)
        recorder.close()
        written = sum(file.stat().st_size for file in Path(folder).iterdir())
    machine = facts()["machine"]
    print(f"{machine['processor']}, {machine['cores']} cores; {arguments.rows} rows, {arguments.waiting} waiting")
    for share in (10, 50):
        without, with_it = percentile(off, share) * 1e6, percentile(on, share) * 1e6
        more = f"{with_it - without:+.1f} µs, {(with_it / without - 1) * 100:+.2f} %"
        print(f"p{share} of {len(off)} steps: {without:.1f} µs without, {with_it:.1f} µs with the recorder: {more}")
    print(f"a state: {percentile(states, 50) * 1e3:.1f} ms; {written / len(on):.0f} bytes a step, states included")


if __name__ == "__main__":
    main()
