"""One fresh process of the cold-start benchmark: builds the engine, gets a first token, reports when each stage ended.

Started as `python -m benchmarks.gpu.first_token OPTIONS`, a JSON object of LLM's options; prints one JSON line."""

import time

_INTERPRETER = time.monotonic()  # before anything else is imported

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

PROMPT_LEN = 128
MORE_TOKENS = 16


def main(options: dict[str, Any]) -> dict[str, float]:
    """Stage → CLOCK_MONOTONIC seconds at which it ended."""
    stamps = {"interpreter": _INTERPRETER}
    import torch  # noqa: F401  # timed apart from our own modules

    stamps["torch"] = time.monotonic()
    from octavo import LLM, SamplingParams
    from octavo.worker.load import Loader

    stamps["imports"] = time.monotonic()
    Loader.load = _stamping(Loader.load, stamps, "weights")  # type: ignore[method-assign]
    Loader.allocate = _stamping(Loader.allocate, stamps, "pages")  # type: ignore[method-assign]
    with LLM(**options) as llm:
        stamps["engine"] = time.monotonic()
        lowest = min(1000, llm.report.vocab_size // 2)
        prompt = [lowest + i % lowest for i in range(PROMPT_LEN)]
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
        llm.generate([prompt], params, use_tqdm=False)
        stamps["first token"] = time.monotonic()
        more = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=MORE_TOKENS)
        llm.generate([prompt], more, use_tqdm=False)
        stamps["decode"] = time.monotonic()
    return stamps


def _stamping(method: Callable[..., Any], stamps: dict[str, float], stage: str) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        result = method(*arguments, **named)
        stamps[stage] = time.monotonic()
        return result

    return call


if __name__ == "__main__":
    print(json.dumps(main(json.loads(sys.argv[1]))))
