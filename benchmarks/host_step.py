"""Host time of one step in steady decode, without a model: plan, assemble, commit and hand-off by the real modules.
The executor assembles every batch as a worker does and makes up the sampled tokens.

Usage: python benchmarks/host_step.py [--rows 256] [--steps 1000] [--waiting 0 100000] [--depth 0] [--clock wall] [--lockstep] [--windows 0]
       python benchmarks/host_step.py --adapters …: two engines in turn, one of them with --enable-lora and no request that has an adapter
       python benchmarks/host_step.py --fairness …: two engines in turn, one of them with --fairness key and TENANTS that always wait
       python benchmarks/host_step.py --fairness --churn --rows 16 --waiting 32 --clock cpu: the same with clients that send a request when
       their last one has ended, and prompts that take several steps, as in benchmarks.tenants throughput; it also says what the
       schedules are, on a virtual clock"""

import argparse
import gc
import random
import statistics
import time
from collections import deque
from collections.abc import Callable

import msgspec

from octavo.cache import KVCache
from octavo.cli.bench.report import facts, percentile
from octavo.device import pick
from octavo.engine.adapter_traffic import AdapterTraffic
from octavo.engine.build import build_engine
from octavo.engine.loop import EngineLoop
from octavo.errors import EngineDead
from octavo.messages import (
    AdapterLoaded,
    AdapterRef,
    EngineReport,
    GenerateRequest,
    SamplingParams,
    StepDeltas,
    StepPlan,
    StepResult,
)
from octavo.observe.metrics.engine_metrics import EngineMetrics
from octavo.schedule import Scheduler
from octavo.schedule.fairness import Fairness
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import StepCosts, shape_of
from octavo.worker.assemble import Columns, assemble
from octavo.worker.rows import RowState
from octavo.worker.staging import Staging

PROMPT_LEN, PAGE_SIZE, VOCAB_SIZE, WARMUP = 128, 16, 49152, 50
TENANTS = 3  # with weights 1, 2 and 4
ANSWER_LEN = 64  # with --churn
CHURN_STEP_TOKENS = 512
CHURN_BLOCK = 100  # steps of one engine before those of the other
CHURN_COSTS = StepCosts(step=0.008, row=0.0004, token=0.0004, context=2e-7, pair=1e-7)  # of a small model on two cores


class NoModel:
    """An executor that does only a worker's host work."""

    def __init__(self, report: EngineReport, overlap: bool, clock: Callable[[], float]) -> None:
        self.overlap, self._clock = overlap, clock
        self.virtual_now = 0.0  # seconds: each step takes what CHURN_COSTS say
        self.num_rows = self.num_tokens = 0  # of the last step
        self._report = report
        device = pick("cpu")
        self._staging = Staging(device)
        self._rows = RowState(
            report.max_num_seqs, report.max_model_len, PAGE_SIZE, VOCAB_SIZE, device, self._staging, report.windows
        )
        self._results: deque[StepResult] = deque()
        self.seconds = 0.0  # assembling, in the last step

    def start(self) -> EngineReport:
        return self._report

    def submit(self, plan: StepPlan) -> None:
        started = self._clock()
        self._rows.update(plan)
        num_samples = len(assemble(Columns.of(plan), self._rows, self._staging).sample_rows)
        self.seconds = self._clock() - started
        self._results.append(StepResult(plan.step, [plan.step % 1000 + 1000] * num_samples))
        self.num_rows, self.num_tokens = len(plan.rows), sum(plan.counts)
        self.virtual_now += CHURN_COSTS.seconds(shape_of(plan, self.num_tokens))

    def collect(self) -> StepResult:
        return self._results.popleft()

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        done(0)

    def close(self) -> None:
        pass


def build(
    num_rows: int,
    num_steps: int,
    overlap: bool,
    clock: Callable[[], float],
    windows: tuple[int, ...],
    is_fair: bool = False,
) -> tuple[EngineLoop, NoModel]:
    max_model_len = PROMPT_LEN + num_steps + 16
    num_pages = num_rows * (max_model_len // PAGE_SIZE + 2) * len(windows)
    # All prompts in one step, so that all rows decode together afterwards.
    report = EngineReport(
        device="none",
        dtype="float32",
        vocab_size=VOCAB_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=num_rows,
        max_num_batched_tokens=num_rows * PROMPT_LEN,
        page_size=PAGE_SIZE,
        num_pages=num_pages,
        num_host_pages=0,
        weights_bytes=0,
        page_bytes=1,
        windows=windows,
    )
    executor = NoModel(report, overlap, clock)
    cache = KVCache(num_pages, PAGE_SIZE, windows=windows, max_step_tokens=report.max_num_batched_tokens)
    fairness = Fairness(num_rows, report.max_num_batched_tokens) if is_fair else None
    scheduler = Scheduler(cache, num_rows, report.max_num_batched_tokens, fairness=fairness)
    return build_engine(scheduler, executor, EngineMetrics("none", report)).loop, executor


def fill(loop: EngineLoop, num_running: int, num_waiting: int, max_tokens: int, lockstep: bool) -> None:
    """Add requests whose rows reach the ends of their pages at different steps, as unrelated requests do; in lockstep at the same."""
    rng = random.Random(0)
    params = SamplingParams(max_tokens=max_tokens, seed=0, ignore_eos=True)
    for i in range(num_running + num_waiting):
        prompt_len = PROMPT_LEN - (0 if lockstep else i % PAGE_SIZE) if i < num_running else 16
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(prompt_len)]
        loop.add(
            GenerateRequest(f"request-{i}", prompt, params, [2], tenant=i % TENANTS, weight=float(1 << i % TENANTS))
        )


class NoAdapters:
    """A loader of adapters that must never be called."""

    def adapter_itemsize(self) -> int:
        return 2

    def check_adapter(self, ref: AdapterRef) -> int:
        raise AssertionError(ref)

    def load_adapter(self, ref: AdapterRef, done: Callable[[AdapterLoaded | str | EngineDead], None]) -> None:
        raise AssertionError(ref)

    def forget_adapters(self, ids: list[str]) -> None:
        raise AssertionError(ids)


def measure_added(arguments: argparse.Namespace, clock: Callable[[], float]) -> None:
    """What --enable-lora adds to a step where it is not used, or --fairness key where several tenants always wait: steps of both engines in
    turn, the first one alternating."""
    num_rows, num_steps = arguments.rows, arguments.steps
    loops = []
    for is_on in (False, True):
        loop, _ = build(
            num_rows,
            num_steps + WARMUP,
            bool(arguments.depth),
            clock,
            tuple(arguments.windows),
            is_fair=is_on and arguments.fairness,
        )
        if is_on and arguments.adapters:
            loop.open_adapters(AdapterTraffic(loop.scheduler, NoAdapters(), 2**30, time.monotonic))
        fill(loop, num_rows, arguments.waiting[0], num_steps + WARMUP + 8, arguments.lockstep)
        loops.append(loop)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    times: tuple[list[float], list[float]] = ([], [])
    for step in range(WARMUP + num_steps):
        for which in (0, 1) if step % 2 else (1, 0):
            started = clock()
            deltas = loops[which].step()
            seconds = clock() - started
            if step >= WARMUP:
                assert len(deltas) == num_rows, "not a steady decode"
                times[which].append(seconds)
    added = sorted(after - before for before, after in zip(*times, strict=True))
    # Of a median: ranks by the normal approximation of the binomial distribution.
    half = 0.98 * len(added) ** 0.5
    low, high = (added[round(len(added) / 2 + side * half)] for side in (-1, 1))
    print(
        f"a step without the flag {1e6 * statistics.median(times[0]):.1f}; with the flag {1e6 * statistics.median(added):+.2f} "
        f"(95 % interval of the median {1e6 * low:+.2f} … {1e6 * high:+.2f})"
    )


class Churn:
    """An engine and its clients, as many of each tenant. Each sends a request when its last one has ended. The engine's own clock is
    virtual, so the same plans are made in every run."""

    def __init__(self, arguments: argparse.Namespace, clock: Callable[[], float], is_fair: bool) -> None:
        num_rows = arguments.rows
        max_model_len = PROMPT_LEN + 2 * ANSWER_LEN
        num_pages = 2 * num_rows * (max_model_len // PAGE_SIZE + 2)
        report = EngineReport(
            device="none",
            dtype="float32",
            vocab_size=VOCAB_SIZE,
            max_model_len=max_model_len,
            max_num_seqs=num_rows,
            max_num_batched_tokens=CHURN_STEP_TOKENS,
            page_size=PAGE_SIZE,
            num_pages=num_pages,
            num_host_pages=0,
            weights_bytes=0,
            page_bytes=1,
        )
        executor = NoModel(report, False, clock)
        cache = KVCache(num_pages, PAGE_SIZE)
        fairness = Fairness(num_rows, CHURN_STEP_TOKENS) if is_fair else None
        self.scheduler = Scheduler(
            cache, num_rows, CHURN_STEP_TOKENS, PAGE_SIZE, stall_limit=StallLimit.of("auto"), fairness=fairness
        )
        self._clock, self.executor = clock, executor
        self._loop = build_engine(
            self.scheduler, executor, EngineMetrics("none", report), clock=lambda: executor.virtual_now
        ).loop
        self._random, self._num_sent = random.Random(0), 0
        self._is_unequal = arguments.unequal
        self._next = [self._request(at % TENANTS) for at in range(num_rows + arguments.waiting[0])]
        self.times: list[float] = []  # of each step and of adding what was sent before it
        self.num_tokens: list[int] = []  # of answers, in each step
        self.has_prompts: list[bool] = []

    def _request(self, tenant: int) -> GenerateRequest:
        prompt = [self._random.randrange(VOCAB_SIZE) for _ in range(PROMPT_LEN)]
        name = f"{tenant}-{self._num_sent}"
        length = self._random.randrange(ANSWER_LEN // 2, ANSWER_LEN * 3 // 2) if self._is_unequal else ANSWER_LEN
        params = SamplingParams(max_tokens=length, seed=0, ignore_eos=True)
        self._num_sent += 1
        return GenerateRequest(name, prompt, params, [2], tenant=tenant, weight=float(1 << tenant))

    def step(self) -> None:
        started = self._clock()
        for request in self._next:
            self._loop.add(request)
        deltas = self._loop.step()
        self.times.append(self._clock() - started)
        self.num_tokens.append(sum(len(delta.token_ids) for delta in deltas))
        self.has_prompts.append(self.executor.num_tokens > self.executor.num_rows)
        self._next = [self._request(int(delta.request_id[0])) for delta in deltas if delta.finish is not None]


def measure_churn(arguments: argparse.Namespace, clock: Callable[[], float]) -> None:
    """What --fairness key adds to a step where requests come and end all the time, and what it does to the schedule: blocks of steps of
    both engines in turn, the first one alternating."""
    sides = [Churn(arguments, clock, is_fair) for is_fair in (False, True)]
    for side in sides:
        for _ in range(10 * WARMUP):
            side.step()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    begun = [(side.executor.virtual_now, side.scheduler.num_preemptions) for side in sides]
    skip = 10 * WARMUP
    for block in range(-(-arguments.steps // CHURN_BLOCK)):
        for which in (0, 1) if block % 2 else (1, 0):
            for _ in range(CHURN_BLOCK):
                sides[which].step()
    for what, has_prompts in (("with prompts", True), ("without", False)):
        # Medians of blocks: a few steps take many times as long, whatever they do.
        blocks = [
            [
                statistics.median(
                    seconds
                    for seconds, has in zip(
                        side.times[at : at + CHURN_BLOCK], side.has_prompts[at : at + CHURN_BLOCK], strict=True
                    )
                    if has is has_prompts
                )
                for at in range(skip, len(side.times), CHURN_BLOCK)
            ]
            for side in sides
        ]
        added = [on - off for off, on in zip(*blocks, strict=True)]
        mean, without = statistics.fmean(added), statistics.fmean(blocks[0])
        half = 1.96 * statistics.stdev(added) / len(added) ** 0.5
        print(
            f"a step {what}: without the flag {1e6 * without:.1f}; with it {1e6 * mean:+.1f} (95 % interval {1e6 * (mean - half):+.1f} … "
            f"{1e6 * (mean + half):+.1f}), {mean / without:+.1%}"
        )
    for name, side, (since, preempted) in zip(("none", "key"), sides, begun, strict=True):
        seconds, num_steps = side.executor.virtual_now - since, len(side.times) - skip
        num_tokens = sum(side.num_tokens[skip:])
        print(
            f"fairness {name}: {num_steps} steps of {1e3 * seconds / num_steps:.3f} virtual ms, {num_tokens / num_steps:.3f} tokens of answers in each, "
            f"{sum(side.has_prompts[skip:]) / num_steps:.1%} with prompts, "
            f"{num_tokens / seconds:.2f} in a virtual second; {side.scheduler.num_preemptions - preempted} preemptions"
        )


def measure(arguments: argparse.Namespace, num_waiting: int, clock: Callable[[], float]) -> None:
    num_rows, num_steps = arguments.rows, arguments.steps
    windows = tuple(arguments.windows)
    loop, executor = build(num_rows, num_steps + WARMUP, bool(arguments.depth), clock, windows)
    fill(loop, num_rows, num_waiting, num_steps + WARMUP + 8, arguments.lockstep)
    # As the engine process does before its first step.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
    encoder = msgspec.msgpack.Encoder()
    whole, assembling, handing = [], [], []
    for step in range(WARMUP + num_steps):
        started = clock()
        deltas = loop.step()
        stepped = clock()
        encoder.encode(StepDeltas(deltas))
        ended = clock()
        if step >= WARMUP:
            assert len(deltas) == num_rows, "not a steady decode"
            whole.append(ended - started)
            assembling.append(executor.seconds)
            handing.append(ended - stepped)
    deciding = [w - a - h for w, a, h in zip(whole, assembling, handing, strict=True)]
    cells = [f"{num_waiting:>8,}"]
    for seconds in (whole, deciding, assembling, handing):
        cells.append(f"{percentile(seconds, 50) * 1e6:7.0f} {percentile(seconds, 99) * 1e6:7.0f}")
    print("  ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--waiting", type=int, nargs="+", default=[0, 100_000])
    parser.add_argument("--depth", type=int, choices=(0, 1), default=0, help="1: plan while a step is in flight")
    parser.add_argument(
        "--clock", choices=("wall", "cpu"), default="wall", help="cpu: leave out what others on a busy machine take"
    )
    parser.add_argument("--lockstep", action="store_true", help="all rows fill their pages at the same step")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[0], help="of each group of layers; 0: it keeps everything"
    )
    parser.add_argument(
        "--adapters", action="store_true", help="what --enable-lora adds to a step where it is not used"
    )
    parser.add_argument(
        "--fairness",
        action="store_true",
        help=f"what --fairness key adds with {TENANTS} keys and --waiting more requests",
    )
    parser.add_argument("--churn", action="store_true", help="with --fairness: requests come and end all the time")
    parser.add_argument(
        "--unequal",
        action="store_true",
        help=f"with --churn: answers of {ANSWER_LEN // 2} to {ANSWER_LEN * 3 // 2} tokens. Those of one length end in the order in which they began",
    )
    arguments = parser.parse_args()
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    machine = facts()["machine"]
    print(
        f"{machine['processor']}, {machine['cores']} cores; {arguments.rows} rows, {arguments.steps} steps, {arguments.clock} microseconds"
    )
    if arguments.churn:
        measure_churn(arguments, clock)
        return
    if arguments.adapters or arguments.fairness:
        measure_added(arguments, clock)
        return
    titles = ("whole step", "plan + commit", "assemble", "hand-off")
    print(f"{'waiting':>8}  " + "  ".join(f"{title:>15}" for title in titles))
    print(f"{'':>8}  " + "  ".join(f"{'p50':>7} {'p99':>7}" for _ in titles))
    for num_waiting in arguments.waiting:
        measure(arguments, num_waiting, clock)


if __name__ == "__main__":
    main()
