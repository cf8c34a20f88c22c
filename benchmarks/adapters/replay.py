"""What adapters add to one decode step on a CPU: the step's operations alone, replayed with and without adapters in turn, by this library of native
kernels and by others."""

import argparse
import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.adapters.speed import ALL, ATTENTION, shapes_of, write

TARGETS = {"qv": ATTENTION, "all": ALL}
WARM_UP = 2  # replays of one kind before the one that is timed: the caches hold what they would hold while decoding


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="", help="empty: the embedded SmolLM2")
    parser.add_argument(
        "--library", nargs="*", default=[], help="other libraries, of sources with the same structures (native-….so)"
    )
    parser.add_argument("--cases", default="1qv,1all,8qv,8all", help="clients, and which matrices: qv or all")
    parser.add_argument("--pairs", type=int, default=60)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from octavo import LLM, LoRARequest, SamplingParams
    from octavo.kernels.cpu import ops
    from octavo.kernels.cpu.library import library

    sides = {"this": _Side(library()._name)} | {Path(path).name: _Side(path) for path in options.library}
    wanted: dict[str, int] = {}  # tokens of the step to replay, and steps before it
    usual = ops.run

    def replaying(threads: Any, array: Any, step: Any, seconds: Any = None) -> None:
        usual(threads, array, step, seconds)
        if wanted and step.num_tokens == step.num_samples == wanted["tokens"]:
            wanted["before"] -= 1
            if wanted["before"] == 0:
                _compare(sides, array, step, options.pairs)

    ops.run = replaying
    try:
        with (
            tempfile.TemporaryDirectory() as place,
            LLM(
                options.model,
                enable_lora=True,
                lora_memory=2**30,
                max_model_len=512,
                kv_cache_memory_bytes=2**28,
                speculative_config={"method": "none"},
                enable_prefix_caching=False,
            ) as llm,
        ):
            for case in options.cases.split(","):
                clients, which = int(case.rstrip("alqv")), case.lstrip("0123456789")
                adapters = [
                    write(Path(place) / f"{case}-{number}", shapes_of(llm), TARGETS[which], number)
                    for number in range(clients)
                ]
                given = [LoRARequest(path.name, 1, str(path)) for path in adapters]
                prompts = [[5 + number, *range(10, 40)] for number in range(clients)]
                print(f"clients: {clients}; matrices: {' '.join(TARGETS[which])}")
                for length, before in ((2, 0), (24, 10)):  # the first loads the adapters
                    wanted.update(tokens=clients, before=before)
                    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
                    llm.generate(prompts, params, use_tqdm=False, lora_request=given)
    finally:
        ops.run = usual
    return 0


class _Side:
    """A library, with threads of its own."""

    def __init__(self, path: str) -> None:
        opened = ctypes.CDLL(path)
        opened.octavo_threads_new.restype = ctypes.c_void_p
        self._run = opened.octavo_run
        self._run.restype = ctypes.c_int64
        self._run.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p)
        self._threads = opened.octavo_threads_new(len(os.sched_getaffinity(0)), -1)

    def timer(self, array: Any, step: Any) -> Callable[[], float]:
        def once() -> float:
            started = time.perf_counter()
            failed = self._run(self._threads, ctypes.addressof(array), len(array), ctypes.addressof(step), None)
            seconds = time.perf_counter() - started
            assert not failed, f"operation {failed - 1} cannot run"
            return seconds

        def last() -> float:
            for _ in range(WARM_UP):
                once()
            return once()

        return last


def _compare(sides: dict[str, _Side], array: Any, step: Any, num_pairs: int) -> None:
    plain = type(step).from_buffer_copy(step)
    plain.adapter_of = None
    timers = {name: (side.timer(array, plain), side.timer(array, step)) for name, side in sides.items()}
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in timers}
    started, used = _busy_seconds(), time.process_time()
    for _ in range(num_pairs):
        for name, (base, adapted) in timers.items():
            pairs[name].append((base(), adapted()))
    others = _busy_seconds() - started - (time.process_time() - used)
    for name, found in pairs.items():
        base, adapted = (statistics.median(side) for side in zip(*found, strict=True))
        ratio = statistics.median(mine / alone for alone, mine in found)
        print(f"  {name}: {1e3 * base:.3f} ms, with adapters {1e3 * adapted:.3f} ms, median of ratios {ratio - 1:+.1%}")
    print(f"  other programs used {max(0.0, others):.2f} s of the processors meanwhile", flush=True)


def _busy_seconds() -> float:
    """CPU seconds of all programs since the start of this machine."""
    user, nice, system, _idle, _waiting, *interrupts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
    return sum(map(int, (user, nice, system, *interrupts))) / 100
