"""What --max-inter-token-ms does on machines that are not here: the real loop, scheduler and measuring of costs, on devices that compute
nothing and whose steps take a time that is given. Clients send one request after the other. No clock is read: the same figures on
every machine.

    python -m benchmarks.stalls_simulated

A GPU's step takes the longer of reading the weights and of its products, so it is not the sum that costs are fitted to. The numbers of
devices are orders of magnitude, not measurements, but for the CPU's: SmolLM2-135M on two cores."""

import heapq
from collections.abc import Callable
from typing import NamedTuple

from octavo.cache import KVCache
from octavo.engine.cost_meter import CostMeter
from octavo.engine.loop import EngineLoop
from octavo.messages import EngineReport, GenerateRequest, SamplingParams, StepPlan, StepResult
from octavo.observe.step_observer import Observers
from octavo.schedule import Scheduler
from octavo.schedule.stall_limit import StallLimit
from octavo.schedule.step_costs import ONE_ROW, StepShape, shape_of


class Machine(NamedTuple):
    name: str
    seconds: Callable[[StepShape], float]
    max_step_tokens: int


class Load(NamedTuple):
    num_clients: int
    prompt_len: int
    max_tokens: int
    seconds: float
    pause: float | None = None  # one more client: prompts of 4,096 tokens, 64 out, with so many seconds between them


def cpu(shape: StepShape) -> float:
    return 0.007 + 58e-5 * shape.rows + 37e-5 * shape.more_tokens + 3e-7 * shape.context + 2.8e-7 * shape.pairs


def gpu(fixed: float, weights: float, token: float, pair: float) -> Callable[[StepShape], float]:
    def seconds(shape: StepShape) -> float:
        products = token * (shape.rows + shape.more_tokens)
        return fixed + max(weights, products) + 3e-8 * shape.context + pair * shape.pairs

    return seconds


MACHINES = (
    Machine("135M, 2 cores", cpu, 512),
    Machine("0.6B, GPU", gpu(0.0015, 0.0005, 2.5e-6, 4e-10), 8192),
    Machine("8B, GPU", gpu(0.001, 0.004, 3.3e-5, 1.7e-9), 8192),
    Machine("70B, 4 GPUs", gpu(0.002, 0.013, 8e-5, 1e-9), 8192),
)
LOADS = {"cpu": (Load(32, 128, 128, 40.0), Load(32, 128, 128, 200.0, 5.0), Load(32, 128, 128, 400.0, 20.0), Load(32, 4096, 64, 1000.0)), "gpu": (Load(64, 1024, 128, 20.0), Load(32, 4096, 64, 30.0))}  # fmt: skip
LONG = (4096, 64)
WARM = 0.3  # share of a run that is not counted


class Device:
    """An executor whose steps take a machine's time."""

    overlap = False

    def __init__(self, seconds: Callable[[StepShape], float]) -> None:
        self.now, self._seconds = 0.0, seconds

    def start(self) -> EngineReport:
        raise AssertionError("it has no model")

    def submit(self, plan: StepPlan) -> None:
        self._plan = plan

    def collect(self) -> StepResult:
        self.now += self._seconds(shape_of(self._plan, sum(self._plan.counts)))
        return StepResult(self._plan.step, [7] * sum(self._plan.samples))

    def prepare(self, grammar: str, forgets: list[str], done: Callable[[int], None]) -> None:
        done(0)

    def close(self) -> None:
        pass


class Figures(NamedTuple):
    p50: float
    p99: float
    first: float
    tokens_per_second: float


def run(machine: Machine, load: Load, limit: StallLimit | None) -> Figures:
    device = Device(machine.seconds)
    meter = CostMeter(machine.seconds(ONE_ROW) if machine.seconds is cpu else 0.0)  # as executors report it
    scheduler = Scheduler(KVCache(100_000, 16, 0, False), 512, machine.max_step_tokens, stall_limit=limit)
    loop = EngineLoop(scheduler, device, Observers([meter], lambda: device.now), meter)
    arrivals, number = [(0.0, load.prompt_len, load.max_tokens, 0.0)] * load.num_clients, 0
    if load.pause is not None:
        arrivals.append((load.pause, *LONG, load.pause))
    clients: dict[str, tuple[int, int, float]] = {}
    started: dict[str, float] = {}
    last: dict[str, float] = {}
    gaps: list[float] = []
    first: list[float] = []
    num_tokens, counts_from = 0, WARM * load.seconds
    while device.now < load.seconds:
        if not loop.has_work:
            device.now = max(device.now, arrivals[0][0])
        while arrivals and arrivals[0][0] <= device.now:
            name = f"r{number}"
            started[name], *client = heapq.heappop(arrivals)
            prompt_len, max_tokens, _ = clients[name] = (client[0], client[1], client[2])
            params = SamplingParams(max_tokens=max_tokens, seed=0)
            loop.add(GenerateRequest(name, [number % 9] * prompt_len, params, []))
            number += 1
        for delta in loop.step():
            now, name = device.now, delta.request_id
            if now >= counts_from:
                num_tokens += 1
                is_short = clients[name][0] == load.prompt_len
                if name in last or is_short:
                    (gaps if name in last else first).append(now - last.get(name, started[name]))
            last[name] = now
            if delta.finish is not None:
                heapq.heappush(arrivals, (now + clients[name][2], *clients[name]))
    gaps.sort()
    first.sort()
    seconds = device.now - counts_from
    return Figures(_at(gaps, 0.5), _at(gaps, 0.99), _at(first, 0.5), num_tokens / seconds)


def _at(values: list[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))] * 1e3


def main() -> None:
    print("in and out tokens, clients          gap p50, ms      gap p99, ms     TTFT p50, ms   tokens/s, auto of off")
    print("                                   off    auto      off    auto      off    auto")
    for machine in MACHINES:
        for load in LOADS["cpu" if machine.seconds is cpu else "gpu"]:
            off, auto = (run(machine, load, StallLimit.of(setting)) for setting in (0, "auto"))
            what = f"{machine.name}: {load.prompt_len}, {load.max_tokens}, {load.num_clients}"
            if load.pause is not None:
                what += f" +4096/{load.pause:.0f}s"
            cells = [f"{a:8,.0f}{b:8,.0f}" for a, b in zip(off[:3], auto[:3], strict=True)]
            ratio = auto.tokens_per_second / off.tokens_per_second
            print(f"{what:35}{' '.join(cells)}   {ratio:8.3f}", flush=True)


if __name__ == "__main__":
    main()
