"""Subject: a model in this process for the offline benchmarks, with random prompts, fixed lengths, greedy sampling and an empty
prefix cache."""

import argparse
import time
from collections.abc import Iterable

from octavo import LLM, SamplingParams
from octavo.cli.bench.workload import id_prompts
from octavo.cli.flags import options_from
from octavo.errors import ConfigError

WARMUP_TOKENS = 8


class Subject:
    """The model under test and its prompts."""

    def __init__(self, arguments: argparse.Namespace, num_prompts: int, shared_len: int = 0) -> None:
        options = options_from(arguments)
        started = time.perf_counter()
        self.llm = LLM(**options)
        self.load_seconds = time.perf_counter() - started
        report, needed = self.llm.report, arguments.input_len + shared_len + arguments.output_len
        if needed > report.max_model_len:
            raise ConfigError(
                f"{needed} tokens per request do not fit the context of {report.max_model_len}: "
                "lower --input-len or --output-len"
            )
        seed = options.get("seed", 0)
        self.prompts = id_prompts(num_prompts, arguments.input_len, shared_len, report.vocab_size, seed)
        self._params = _exactly(arguments.output_len)
        # Never longer than the measured output: only that length was checked against the context.
        self._warmup_params = _exactly(min(WARMUP_TOKENS, arguments.output_len))

    def warm_up(self) -> None:
        """Run one request, to pay for allocations and lazy initialisation before measuring."""
        self.llm.generate([self.prompts[0]], self._warmup_params, use_tqdm=False)

    def time_together(self, use_tqdm: bool = False) -> float:
        """Seconds from submitting all prompts at once to the last token."""
        self.llm.reset_prefix_cache()  # otherwise a second run would measure the cache of the first
        started = time.perf_counter()
        self.llm.generate(self.prompts, self._params, use_tqdm=use_tqdm)
        return time.perf_counter() - started

    def time_one_by_one(self, prompts: Iterable[list[int]] | None = None) -> float:
        """Seconds for the same prompts, each submitted when the one before has ended."""
        self.llm.reset_prefix_cache()
        started = time.perf_counter()
        for prompt in self.prompts if prompts is None else prompts:
            self.llm.generate([prompt], self._params, use_tqdm=False)
        return time.perf_counter() - started

    def describe(self) -> dict[str, str | int | float]:
        report = self.llm.report
        return {
            "model": self.llm.model_name,
            "device": report.device,
            "dtype": report.dtype,
            "max_num_seqs": report.max_num_seqs,
            "max_num_batched_tokens": report.max_num_batched_tokens,
            "page_size": report.page_size,
            "num_pages": report.num_pages,
            "load_seconds": round(self.load_seconds, 3),
        }


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)
