"""The reference figures: vLLM on the same chip, the required and the desired rates, and the chip's ceilings."""

from typing import NamedTuple


class Target(NamedTuple):
    """Tokens per second: output tokens, for prefill_heavy input tokens."""

    vllm: int
    must: int
    aim: int


BANDWIDTH = 4.26e12
"""Bytes per second that a copy or a read reached on the H200 the targets were set on."""

FLOPS = 795e12
"""FLOP per second of an 8192³ bf16 matrix product in the same run."""

TARGETS: dict[str, dict[str, Target]] = {
    # vLLM 0.24.0 (torch 2.11.0+cu130, FlashAttention 3, async scheduling, CUDA graphs, torch.compile, prefix caching) on
    # one H200, 2026-11-15: random weights, bf16, greedy, end of sequence ignored, seeds 100 to 102, median of three runs.
    "qwen3-0.6b": {
        "single_stream": Target(420, 840, 1_500),
        "mixed": Target(21_070, 36_000, 45_000),
        "decode_heavy": Target(33_000, 55_000, 65_000),
        "prefill_heavy": Target(315_000, 330_000, 450_000),
        "shared_prefix": Target(13_400, 20_000, 27_000),
    },
    "llama-3.1-8b": {
        "single_stream": Target(204, 230, 265),
        "mixed": Target(10_250, 12_000, 14_000),
        "decode_heavy": Target(20_660, 25_500, 28_500),
        "prefill_heavy": Target(41_080, 41_500, 45_000),
        "shared_prefix": Target(8_250, 10_000, 12_500),
    },
}

COLD_START_SECONDS = {"first": 30.0, "afterwards": 12.0, "vllm_first": 105.0}
"""Seconds from process start to first token of an 8B model with random weights: the two required ones, and vLLM's."""

BUSY_SHARE = 0.97
"""Required share of GPU busy time in wall time for steady decode."""

SERVED_SHARE = 0.95
"""Required share of the offline output tokens per second for the HTTP server at 256 streams."""

WAKE_UP_SECONDS = 0.26
"""Seconds from POST /wake_up to a model that takes requests, of a 0.6B: vLLM's published figure, with weights kept in memory."""
