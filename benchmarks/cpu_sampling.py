"""Times the choice of a step's tokens on this CPU: native kernels against torch's sampler, in µs for all rows.
Logits are drawn from a normal distribution. Run: python -m benchmarks.cpu_sampling --threads 2

For comparison: with native kernels a step of one row takes about 4 ms, one of 32 rows about 30. The spread decides how many
tokens top_p keeps: 3 keeps about 2,000 of 49,152, as an uncertain model does; 6 about ten, as most steps of a trained one."""

import argparse
import statistics
import time

import numpy as np
import torch

from octavo.kernels.cpu.native import Native
from octavo.messages import SamplingParams
from octavo.sampling.sampler import sample
from octavo.sampling.state import SamplingState

ASKED = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=0.8),
    "top_p 0.9": SamplingParams(top_p=0.9),
    "top_k 40, top_p 0.9": SamplingParams(top_k=40, top_p=0.9),
    "top_k 40, repetition": SamplingParams(top_k=40, repetition_penalty=1.1),
}
CONTEXT_LEN = 512  # tokens of a row that are penalised


def microseconds(
    native: Native | None, logits: torch.Tensor, tokens: torch.Tensor, state: SamplingState, position: int
) -> float:
    """Return the microseconds of one call. The logits [S, V] are written just before, as a step's last product does."""
    logits = logits.clone()
    rows = np.arange(len(logits))
    start = time.perf_counter()
    sample(logits, tokens, state, rows, np.full(len(rows), position), native=native)
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--spread", type=float, nargs="+", default=[3.0, 6.0])
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # as the runner does with native kernels: two thread pools would spin on the same cores
    torch.set_grad_enabled(False)
    rng = np.random.default_rng(0)
    native = Native(arguments.threads)
    print(f"{'spread':>6}{'rows':>5}  {'asked for':<22}{'torch µs':>10}{'native µs':>11}{'per row':>9}{'ratio':>7}")
    for spread in arguments.spread:
        for num_rows in arguments.rows:
            logits = torch.from_numpy(rng.normal(0, spread, (num_rows, arguments.vocab_size)).astype(np.float32))
            tokens = torch.from_numpy(rng.integers(0, arguments.vocab_size, (num_rows, 1024)).astype(np.int32))
            for name, params in ASKED.items():
                state = SamplingState(num_rows, arguments.vocab_size)
                for row in range(num_rows):
                    state.enter(row, params, row, 1, [])
                took: dict[bool, list[float]] = {False: [], True: []}
                for repeat in range(arguments.repeats):  # alternating, so that noise affects both
                    for by_native in (False, True):
                        which = native if by_native else None
                        took[by_native].append(microseconds(which, logits, tokens, state, CONTEXT_LEN + repeat))
                torch_us, native_us = (statistics.median(took[by_native]) for by_native in (False, True))
                print(
                    f"{spread:>6}{num_rows:>5}  {name:<22}{torch_us:>10.0f}{native_us:>11.0f}{native_us / num_rows:>9.1f}"
                    f"{torch_us / native_us:>7.1f}"
                )


if __name__ == "__main__":
    main()
