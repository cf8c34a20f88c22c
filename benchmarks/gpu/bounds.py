"""The chip's limit for each workload, computed without a GPU, and the targets as shares of it.
Rows, tokens a step and bytes are assumed, and printed."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import limits, workloads
from benchmarks.gpu.show import Results, share, table
from benchmarks.gpu.subject import chip_of, engine_options, model_of, spec_of
from benchmarks.gpu.targets import TARGETS

ROWS, STEP_TOKENS = 512, 8192


def run(arguments: argparse.Namespace, seeds: Sequence[int], results: Results) -> None:
    options = engine_options(arguments, max_num_seqs=ROWS, max_num_batched_tokens=STEP_TOKENS)
    spec = spec_of(options["model"])
    kv_element = 1 if options.get("kv_cache_dtype") == "fp8" else 2
    model = model_of(options, spec.kv_bytes_per_token(kv_element))
    chip = chip_of(arguments, options)
    name = Path(options["model"]).name
    figures: dict[str, Any] = {}
    rows = []
    for workload in workloads.NAMES:
        loads = [workloads.make(workload, seed, arguments.scale) for seed in seeds]
        figure = figures[workload] = _bounds(workload, loads, model, chip, options)
        target = TARGETS.get(name, {}).get(workload)
        asked = [share(rate / figure["limit_rate"]) for rate in target] if target else ["–"] * 3
        names = ("limit_rate", "unshared_limit_rate", "kv_only_rate")
        rows.append([workload, *(f"{figure[key]:,.0f}" for key in names), *asked])
    results.put("bounds", figures)
    print(
        f"{name}: {options['max_num_seqs']} rows, {options['max_num_batched_tokens']} tokens a step, {model.kv_bytes:,.0f} "
        f"bytes of KV a token, {_weights(model)}, {chip.bandwidth / 1e12:g} TB/s, {chip.flops / 1e12:g} TFLOP/s; mean of seeds {list(seeds)}"
    )
    titles = ("tokens/s", "limit", "prefix read by each row", "KV reads alone", "vLLM / limit", "must / limit", "aim / limit")  # fmt: skip
    print(table(titles, rows))


def _weights(model: limits.Model) -> str:
    held = model.layer_parameters * model.layer_bytes + model.head_parameters * model.head_bytes
    if (experts := model.experts) is None:
        return f"{held / 1e9:.2f} GB of weights read a step"
    all_of_them = experts.num_layers * experts.num_experts * experts.parameters * experts.bytes_each
    return f"{held / 1e9:.2f} GB of weights read a step and those reached of {all_of_them / 1e9:.2f} GB of experts"


def _bounds(
    workload: str,
    loads: Sequence[Sequence[workloads.Item]],
    model: limits.Model,
    chip: limits.Chip,
    options: dict[str, Any],
) -> dict[str, float]:
    """Rates over all loads together. `kv_only_rate`: only reading keys and values costs time, and each row reads its own."""
    tokens, least, unshared, kv_only = 0, 0.0, 0.0, 0.0
    for items in loads:
        steps = list(limits.steps_of(items, options["max_num_seqs"], options["max_num_batched_tokens"], model.window))
        counts_inputs = workloads.counts_inputs(workload)
        tokens += sum(len(item.prompt) if counts_inputs else item.output_len for item in items)
        least += limits.total_seconds(steps, model, chip)
        unshared += limits.total_seconds(steps, model, chip, shared_once=False)
        kv_only += (
            sum(limits.kv_tokens(work, model, shared_once=False) for work in steps) * model.kv_bytes / chip.bandwidth
        )
    return {"limit_rate": tokens / least, "unshared_limit_rate": tokens / unshared, "kv_only_rate": tokens / kv_only}
