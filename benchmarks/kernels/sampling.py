"""Sampling on a GPU: checks the kernels against plain torch and the CPU's sampler, then times them against sorting.
`python -m benchmarks.kernels.sampling`; without a GPU a tiny warmup in Triton's interpreter.

Times are of one call inside a CUDA graph of several. Logits of few rows fit into L2, where the product that made them
leaves them; from 256 rows on they do not. Two kinds of logits: "model", which fall with the logarithm of a token's rank
as a language model's do, and "flat", normally distributed, of which top_p keeps tens of thousands."""

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

IS_REHEARSAL = not torch.cuda.is_available()
if IS_REHEARSAL:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from octavo.kernels.triton.sampling import draw, greedy  # noqa: E402
from octavo.kernels.triton.sampling import records as columns  # noqa: E402
from octavo.messages import SamplingParams  # noqa: E402
from octavo.sampling.randomness import uniforms  # noqa: E402
from octavo.sampling.sampler import sample  # noqa: E402
from octavo.sampling.state import SamplingState  # noqa: E402

START = time.monotonic()
CEILING = 4.26e12  # bytes a second, read
DEVICE = torch.device("cpu" if IS_REHEARSAL else "cuda")
VOCAB_SIZES = (700,) if IS_REHEARSAL else (151936, 128256)
NUM_ROWS = (1, 2) if IS_REHEARSAL else (1, 32, 256, 512)
KINDS = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "top_k 50": {"top_k": 50},
    "top_p 0.9": {"top_p": 0.9},
    "min_p 0.1": {"min_p": 0.1},
    "all three": {"top_k": 50, "top_p": 0.9, "min_p": 0.1},
}
# (chunks per group, warps, most registers)
CHOICES: list["Choice"] = [(32, 16, None), (32, 16, 64), (64, 32, 64), (16, 8, 128), (16, 8, None), (16, 16, 64)]
TILES = [(2048, 4, 528), (4096, 4, 528), (4096, 4, 1056), (8192, 8, 264), (8192, 8, 528)]
Choice = tuple[int, int, int | None]
TABLE = torch.zeros(1, 8, dtype=torch.int32, device=DEVICE)


def make_logits(num_rows: int, vocab_size: int, kind: str) -> torch.Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(num_rows)
    noise = torch.randn(num_rows, vocab_size, device=DEVICE, generator=generator)
    if kind == "flat":
        return (2 * noise).to(torch.bfloat16)
    rank = torch.rand(num_rows, vocab_size, device=DEVICE, generator=generator).argsort(-1) + 1
    return (18 - 1.8 * rank.float().log() + 0.5 * noise).to(torch.bfloat16)


def make_state(num_rows: int, vocab_size: int, kinds: list[dict[str, float]]) -> SamplingState:
    state = SamplingState(num_rows, vocab_size)
    for row in range(num_rows):
        state.enter(row, SamplingParams(**kinds[row % len(kinds)]), row, 1, [])
    return state


def make_records(state: SamplingState, num_rows: int) -> torch.Tensor:
    records = state.records[:num_rows].copy()
    records[:, columns.SOURCE] = records[:, columns.TARGET] = np.arange(num_rows)
    records[:, columns.UNIFORM] = uniforms(state.seed[:num_rows], np.full(num_rows, 5))
    return torch.from_numpy(records).to(DEVICE)


def draw_by(choice: Choice, logits: torch.Tensor, records: torch.Tensor, out: torch.Tensor) -> None:
    group, num_warps, max_registers = choice
    draw.draw(logits, records, out, group=group, num_warps=num_warps, max_registers=max_registers)


def compile_all() -> None:
    """Compile concurrently: one after the other would take half of the time limit."""
    if IS_REHEARSAL:
        return
    from octavo.kernels.triton.runtime.warmup import warmup

    with warmup(os.cpu_count() or 1):
        for vocab_size in VOCAB_SIZES:
            logits, out = make_logits(1, vocab_size, "flat"), torch.zeros(1, dtype=torch.int64, device=DEVICE)
            records = make_records(make_state(1, vocab_size, [{}]), 1)
            for choice in CHOICES if vocab_size == VOCAB_SIZES[0] else CHOICES[:1]:
                draw_by(choice, logits, records, out)
            draw.draw(logits.float(), records, out)
            for num_rows in NUM_ROWS:
                many, ids = logits.expand(num_rows, -1), torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
                for tile in TILES:
                    greedy._launch_argmax(many, ids, *tile)


def by_sorting(logits: torch.Tensor, params: dict[str, float], uniform: torch.Tensor) -> torch.Tensor:
    """Sample as one would in plain torch: sort, cut, cumulate. Returns [S]."""
    if params.get("temperature") == 0.0:
        return logits.argmax(-1)
    values, ids = (logits.float() / params.get("temperature", 1.0)).sort(-1, descending=True)
    shares = values.softmax(-1)
    shares = shares * (shares >= params.get("min_p", 0.0) * shares[:, :1])
    if "top_k" in params:
        shares[:, int(params["top_k"]) :] = 0.0
    shares = shares / shares.sum(-1, keepdim=True)
    if "top_p" in params:
        shares = shares * ((shares.cumsum(-1) - shares) < params["top_p"])
    cdf = shares.cumsum(-1)
    index = torch.searchsorted(cdf, (uniform * cdf[:, -1])[:, None].float(), right=True).clamp(max=ids.shape[1] - 1)
    return ids.gather(1, index).squeeze(1)


def microseconds(call: Callable[[], object], num_calls: int = 10, num_repeats: int = 12) -> float:
    if IS_REHEARSAL:
        call()
        return 0.0
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(num_calls):
            call()
    times = []
    for _ in range(num_repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / num_calls)
    return statistics.median(times)


def host_microseconds(call: Callable[[], object], num_calls: int = 50) -> float:
    times = []
    for _ in range(1 if IS_REHEARSAL else num_calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
        if not IS_REHEARSAL:
            torch.cuda.synchronize()
    return statistics.median(times) * 1e6


def guarded(name: str, call: Callable[[], None]) -> None:
    try:
        call()
    except Exception as error:  # one failing part must not hide the others
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def check() -> None:
    """Check that the kernels' tokens are the CPU sampler's for every division of the work, and that draws follow the softmax."""
    for vocab_size in VOCAB_SIZES:
        for kind in ("model", "flat"):
            num_rows = 4 if IS_REHEARSAL else 36
            state = make_state(num_rows, vocab_size, list(KINDS.values()))
            rows, lens = np.arange(num_rows), np.full(num_rows, 5)
            logits = make_logits(num_rows, vocab_size, kind)
            expected = sample(logits.cpu().float(), TABLE.cpu(), state, rows, lens, by_kernels=False)
            for choice in CHOICES if vocab_size == VOCAB_SIZES[0] and not IS_REHEARSAL else CHOICES[:1]:
                out = torch.full((num_rows,), -1, device=DEVICE)
                draw_by(choice, logits, make_records(state, num_rows), out)
                wrong = (out.cpu() != expected).nonzero().flatten().tolist()
                name = "/".join(map(str, choice))
                print(
                    f"draws V={vocab_size} {kind:5} {name:10} differ from the CPU in {len(wrong)} of {num_rows} {wrong}"
                )
            argmax = greedy.argmax(logits).cpu()
            print(
                f"argmax V={vocab_size} {kind}: right in {(argmax == logits.cpu().float().argmax(-1)).sum()} of {num_rows}"
            )


def check_shares() -> None:
    num_draws, vocab_size = (20, 300) if IS_REHEARSAL else (200_000, 151936)
    logits = make_logits(1, vocab_size, "model")
    state = make_state(1, vocab_size, [{"temperature": 0.7, "top_k": 50, "top_p": 0.95}])
    records = np.repeat(state.records, num_draws, 0)
    records[:, columns.TARGET] = np.arange(num_draws)
    records[:, columns.UNIFORM] = uniforms(np.full(num_draws, 9), np.arange(num_draws))
    out = torch.zeros(num_draws, dtype=torch.int64, device=DEVICE)
    for start in range(0, num_draws, 20_000):
        draw.draw(logits, torch.from_numpy(records[start : start + 20_000]).to(DEVICE), out)
    shares = (logits[0].double() / 0.7).softmax(-1)
    order = shares.sort(descending=True, stable=True).indices[:50]
    top = shares[order] / shares[order].sum()
    top = top * ((top.cumsum(0) - top) < 0.95)
    exact = torch.zeros_like(shares).index_put_((order,), top / top.sum())
    seen = torch.bincount(out, minlength=vocab_size).double() / num_draws
    noise = (exact * (1 - exact) / num_draws).sqrt().sum() * 0.8 / 2  # the expected error of a fair draw
    distance = (seen - exact).abs().sum() / 2
    outside = int((seen[exact == 0] > 0).sum())
    print(f"{num_draws} draws: off by {distance:.5f}, a fair draw by about {noise:.5f}; {outside} tokens that were cut")


def check_waiting() -> None:
    """Check that no part of a step waits for the GPU: torch raises where it would."""
    vocab_size, num_rows = VOCAB_SIZES[0], 8
    kinds = [*KINDS.values(), {"repetition_penalty": 1.2, "frequency_penalty": 0.1}, {"min_tokens": 4, "max_tokens": 8}]
    state = SamplingState(num_rows, vocab_size)
    for row in range(num_rows):
        state.enter(row, SamplingParams(**kinds[row]), row, 2, [3, 4])
    tokens = torch.ones(num_rows, 8, dtype=torch.int32, device=DEVICE)
    rows, lens = np.arange(num_rows), np.full(num_rows, 5)
    logits = make_logits(num_rows, vocab_size, "model")
    sample(logits.clone(), tokens, state, rows, lens, by_kernels=True)
    copy = logits.clone()
    if not IS_REHEARSAL:
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = sample(copy, tokens, state, rows, lens, by_kernels=True)
    finally:
        if not IS_REHEARSAL:
            torch.cuda.set_sync_debug_mode("default")
    expected = sample(logits.cpu().float(), tokens.cpu(), state, rows, lens, by_kernels=False)
    print(
        f"a mixed step waits for nothing; its tokens differ from the CPU's in {int((found.cpu() != expected).sum())} of 8"
    )


def time_kinds() -> None:
    print("\nmicroseconds a step: kernels | sorting in torch")
    print(f"{'V':>7} {'S':>4} {'logits':6}" + "".join(f"{kind:>17}" for kind in KINDS))
    for vocab_size in VOCAB_SIZES:
        for num_rows in NUM_ROWS:
            for kind in ("model", "flat"):
                if kind == "flat" and vocab_size != VOCAB_SIZES[0]:
                    continue
                logits = make_logits(num_rows, vocab_size, kind)
                guarded(f"S={num_rows}", lambda logits=logits, kind=kind: _time_row(logits, kind))


def _time_row(logits: torch.Tensor, kind: str) -> None:
    num_rows, vocab_size = logits.shape
    out = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    cells = []
    for params in KINDS.values():
        records = make_records(make_state(num_rows, vocab_size, [params]), num_rows)
        if params == KINDS["greedy"]:
            ours = microseconds(lambda: greedy.argmax(logits, out))
        else:
            ours = microseconds(lambda records=records: draw.draw(logits, records, out))
        theirs = float("nan")
        if kind == "model" and num_rows <= 256:  # beyond, sorting takes gigabytes and most of a second
            uniform = records[:, columns.UNIFORM]
            theirs = microseconds(lambda p=params, u=uniform: by_sorting(logits, p, u), 1, 3)
        cells.append(f"{ours:8.1f}|{theirs:8.1f}")
    print(f"{vocab_size:7} {num_rows:4} {kind:6}" + "".join(cells), flush=True)


def time_choices() -> None:
    print("\ndividing the work: chunks a group / warps / registers, microseconds")
    vocab_size = VOCAB_SIZES[0]
    cases = [
        (num_rows, kind, name)
        for num_rows in (NUM_ROWS[0], NUM_ROWS[-2])
        for kind in ("model", "flat")
        for name in ("top_k 50", "top_p 0.9", "all three")
    ]
    print(" " * 14 + "".join(f"{f'{num_rows} {kind} {name[:5]}':>16}" for num_rows, kind, name in cases))
    inputs = {(n, kind): make_logits(n, vocab_size, kind) for n, kind, _ in cases}
    best: dict[tuple[int, str, str], tuple[float, str]] = {}
    for choice in CHOICES:
        line = "/".join(map(str, choice))
        cells = []
        for case in cases:
            num_rows, kind, name = case
            records = make_records(make_state(num_rows, vocab_size, [KINDS[name]]), num_rows)
            out = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
            logits = inputs[num_rows, kind]
            try:
                taken = microseconds(partial(draw_by, choice, logits, records, out))
            except Exception as error:
                print(f"FAILED {line} {case}: {str(error)[:200]}")
                taken = float("nan")
            cells.append(f"{taken:16.1f}")
            if taken < best.get(case, (float("inf"), ""))[0]:
                best[case] = (taken, line)
        print(f"{line:14}" + "".join(cells), flush=True)
    print(f"{'best':14}" + "".join(f"{best.get(case, (0.0, '-'))[1]:>16}" for case in cases))


def time_argmax() -> None:
    print("\nargmax: tile / warps / programs, microseconds (TB/s, share of the ceiling)")
    vocab_size = VOCAB_SIZES[0]
    for num_rows in NUM_ROWS:
        logits = make_logits(num_rows, vocab_size, "flat")
        out = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
        cells = []
        for tile, num_warps, num_programs in TILES:
            taken = microseconds(partial(greedy._launch_argmax, logits, out, tile, num_warps, num_programs))
            rate = logits.nbytes / max(taken, 1e-9) * 1e6
            cells.append(f"{tile}/{num_warps}/{num_programs} {taken:6.1f} ({rate / 1e12:.2f}, {rate / CEILING:.0%})")
        print(f"{num_rows:4} " + "  ".join(cells), flush=True)


def time_host() -> None:
    print("\nhost, microseconds a call of sample()")
    vocab_size = VOCAB_SIZES[0]
    for num_rows in (NUM_ROWS[0], NUM_ROWS[-2]):
        logits = make_logits(num_rows, vocab_size, "model")
        rows, lens = np.arange(num_rows), np.full(num_rows, 5)
        cells = []
        for name in ("greedy", "all three"):
            state = make_state(num_rows, vocab_size, [KINDS[name]])
            call = lambda state=state, logits=logits, rows=rows, lens=lens: sample(  # noqa: E731
                logits, TABLE, state, rows, lens, by_kernels=True
            )
            call()
            cells.append(f"{name} {host_microseconds(call):.0f}")
        print(f"{num_rows:4} rows: " + ", ".join(cells), flush=True)


def main() -> None:
    torch.manual_seed(0)
    for part in (compile_all, check, check_shares, check_waiting, time_argmax, time_kinds, time_choices, time_host):
        guarded(part.__name__, part)
        print(f"[{time.monotonic() - START:.0f} s]", flush=True)


if __name__ == "__main__":
    main()
