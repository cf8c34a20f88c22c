"""The engine under test, as the in-process benchmarks use it: its model's limits, its memory, and the times of its steps.
Of the engine's inside it uses one method, the loop's step()."""

import argparse
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.gpu.limits import Chip, Model
from benchmarks.gpu.targets import BANDWIDTH, FLOPS
from benchmarks.gpu.workloads import Item, folded
from octavo import LLM, SamplingParams
from octavo.cli.flags import options_from
from octavo.errors import ConfigError
from octavo.messages import TokenDelta
from octavo.spec import ModelSpec

MODELS = Path(__file__).resolve().parent.parent / "models"

NO_DRAFTS = '{"method": "none"}'
"""Models with random weights repeat themselves, so drafts would gain more than with any text, and a step would give several tokens."""


def engine_options(arguments: argparse.Namespace, **otherwise: Any) -> dict[str, Any]:
    """Return LLM()'s options: the flags, a known model's folder for its name, random weights where the folder has none."""
    options = {"speculative_config": NO_DRAFTS} | otherwise | options_from(arguments)
    name = options.get("model", "")
    if not name:
        raise ConfigError(f"--model is missing: give one of {', '.join(known_models())}, or a folder")
    path = MODELS / name if name in known_models() else Path(name).expanduser()
    options["model"] = str(path)
    if path.is_dir() and not any(path.glob("*.safetensors")):
        options.setdefault("load_format", "dummy")
    return options


def known_models() -> list[str]:
    return sorted(path.parent.name for path in MODELS.glob("*/config.json"))


def is_fp8(options: dict[str, Any]) -> bool:
    """Return whether the layers' weights, and the inputs of their products, have 8 bits."""
    return options.get("quantization") == "fp8"


def chip_of(arguments: argparse.Namespace, options: dict[str, Any]) -> Chip:
    # fp8 products run at twice the rate of bf16 by the chip's data sheet; no ceiling was measured for them.
    return Chip(arguments.bandwidth or BANDWIDTH, arguments.flops or FLOPS * (2 if is_fp8(options) else 1))


def config_of(model: str) -> dict[str, Any]:
    from octavo.weights.formats.checkpoint import open_checkpoint
    from octavo.weights.sources.source import resolve

    return open_checkpoint(resolve(model, allow_missing_weights=True), allow_missing_weights=True).config


def spec_of(model: str) -> ModelSpec:
    from octavo.models import load_family

    config = config_of(model)
    spec: ModelSpec = load_family(config["model_type"]).spec(config)
    return spec


def model_of(options: dict[str, Any], kv_bytes: float, itemsize: int = 2) -> Model:
    """The model as far as limits go. `itemsize`: of weights that are not packed."""
    from benchmarks.gpu import sizes

    name = options["model"]
    return sizes.model_of(config_of(name), spec_of(name), kv_bytes, itemsize, options.get("quantization", "auto"))


class Subject:
    """One engine in this process, for any number of measurements: a start costs more than a run."""

    def __init__(self, arguments: argparse.Namespace, **otherwise: Any) -> None:
        self.options = engine_options(arguments, **otherwise)
        started = time.perf_counter()
        self.llm = LLM(**self.options)
        self.start_seconds = time.perf_counter() - started
        self.report = self.llm.report
        size = 4 if self.report.dtype == "float32" else 2
        self.model = model_of(self.options, self.report.page_bytes / self.report.page_size, size)
        self.chip = chip_of(arguments, self.options)

    def generate(self, items: Sequence[Item], *, keep_cache: bool = False) -> float:
        """Return the seconds from submitting the whole load at once to its last token, with nothing cached before."""
        items = folded(items, self.report.vocab_size)
        prompts = [item.prompt for item in items]
        params = [exactly(item.output_len) for item in items]
        if not keep_cache:
            self.llm.reset_prefix_cache()
        started = time.perf_counter()
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        wrong = sum(len(o.outputs[0].token_ids) != i.output_len for o, i in zip(outputs, items, strict=True))
        if wrong:
            raise RuntimeError(f"{wrong} of {len(items)} answers have the wrong length")
        return seconds

    def describe(self) -> dict[str, Any]:
        report = self.report
        return {
            "model": self.llm.model_name,
            "options": {name: value for name, value in self.options.items() if name != "model"},
            "device": report.device,
            "dtype": report.dtype,
            "max_model_len": report.max_model_len,
            "max_num_seqs": report.max_num_seqs,
            "max_num_batched_tokens": report.max_num_batched_tokens,
            "page_size": report.page_size,
            "num_pages": report.num_pages,
            "weights_bytes": report.weights_bytes,
            "kv_store_bytes": report.num_pages * report.page_bytes,
            "start_seconds": round(self.start_seconds, 2),
            "notes": list(report.notes),
            "ceilings": {"bytes_per_second": self.chip.bandwidth, "flop_per_second": self.chip.flops},
            **gpu_facts(),
        }

    def headline(self) -> str:
        report = self.report
        return (
            f"{self.llm.model_name} on {report.device}, {report.dtype}; {report.max_num_seqs} rows, "
            f"{report.max_num_batched_tokens} tokens a step, {report.num_pages * report.page_size:,} tokens of KV pages; "
            f"started in {self.start_seconds:.1f} s"
        )


def exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=num_tokens)


class StepTimes:
    """While entered, records when each turn of the loop ended and how many rows got a token in it.

    With a step in flight beyond the one collected, a turn ends when the step before last is known: the time between two
    turns is still one step's."""

    def __init__(self, llm: LLM) -> None:
        self._loop = llm._loop
        self.ended: list[float] = []
        self.num_tokens: list[int] = []

    def __enter__(self) -> Self:
        step, clock = self._loop.step, time.perf_counter

        def timed() -> list[TokenDelta]:
            deltas = step()
            self.ended.append(clock())
            self.num_tokens.append(len(deltas))
            self.after_step()
            return deltas

        self._loop.step = timed  # type: ignore[method-assign]
        return self

    def after_step(self) -> None:
        """A hook for subclasses: runs after every step."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del self._loop.step  # the class's own again


# ── the GPU, where there is one ─────────────────────────────────────────────────────────────────────


def gpu_facts() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {}
    facts: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    try:
        facts["triton"] = importlib.import_module("triton").__version__
    except ImportError:
        facts["triton"] = None
    return facts


def reset_peak() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int | None:
    """Return the most bytes that tensors have held since the last reset, the whole KV store included; None without a GPU."""
    import torch

    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
