"""What --deterministic costs: the workloads with and without it, one engine after the other, in one run; then the self-test."""

import argparse
import gc
from collections.abc import Sequence
from typing import Any

from benchmarks.gpu import throughput
from benchmarks.gpu.show import Results, table
from benchmarks.gpu.subject import Subject, engine_options
from octavo.cli.doctor import determinism
from octavo.config import Config, replace


def run(arguments: argparse.Namespace, names: Sequence[str], seeds: Sequence[int], results: Results) -> int:
    """Return how many measurements failed, the self-test with the flag included."""
    medians: dict[bool, dict[str, float]] = {}
    for is_deterministic in (False, True):
        subject = Subject(arguments, deterministic=is_deterministic)
        print(f"{'--deterministic: ' if is_deterministic else ''}{subject.headline()}", flush=True)
        throughput.run(subject, names, seeds, arguments.scale, arguments.warmup, results)
        figures = results.parts.pop("workloads", {})
        results.put("with_deterministic" if is_deterministic else "without_deterministic", figures)
        medians[is_deterministic] = {name: figure["median"] for name, figure in figures.items()}
        subject.llm.close()
        del subject
        _free()
    rows = [
        [name, f"{plain:,.0f}", f"{medians[True][name]:,.0f}", f"{medians[True][name] / plain:.2f}"]
        for name, plain in medians[False].items()
        if name in medians[True]
    ]
    print(table(["tokens/s", "without", "--deterministic", "ratio"], rows), flush=True)
    results.put("determinism_ratio", {name: ratio for name, *_, ratio in rows})
    return 2 * len(names) - len(medians[False]) - len(medians[True]) + _self_test(arguments)


def _self_test(arguments: argparse.Namespace) -> int:
    options: dict[str, Any] = {"kv_cache_memory_bytes": 2**30, **engine_options(arguments)}
    num_wrong = 0
    for is_deterministic in (True, False):
        config = replace(Config(), **options | {"deterministic": is_deterministic})
        code = determinism.run(config, as_json=False)
        num_wrong += code if is_deterministic else 0  # without the flag, differences are expected
        _free()
    return num_wrong


def _free() -> None:
    import torch

    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
