"""`octavo bench throughput`: measures tokens per second with all requests submitted at once, and the gain from batching."""

import argparse
import sys
from typing import Any

from tqdm import tqdm

from octavo.cli.bench import report
from octavo.cli.bench.offline import Subject


def run(arguments: argparse.Namespace) -> int:
    report.check_writable(arguments.result)
    subject = Subject(arguments, arguments.num_prompts, arguments.shared_prefix)
    subject.warm_up()
    before = subject.llm.engine_stats()
    seconds = subject.time_together(use_tqdm=sys.stderr.isatty())
    figures = _rates(arguments, seconds)
    figures["pages"] = page_facts(before, subject.llm.engine_stats())
    if arguments.compare_sequential:
        with tqdm(subject.prompts, unit="request", file=sys.stderr, disable=not sys.stderr.isatty()) as prompts:
            one_by_one = _rates(arguments, subject.time_one_by_one(prompts))
        ratio = figures["output_tokens_per_second"] / one_by_one["output_tokens_per_second"]
        figures |= {"sequential": one_by_one, "ratio": round(ratio, 3)}
    facts = subject.describe()
    print(
        f"{facts['model']} on {facts['device']}, {facts['dtype']}: {arguments.num_prompts} requests, "
        f"{arguments.input_len + arguments.shared_prefix} tokens in ({arguments.shared_prefix} shared), "
        f"{arguments.output_len} out\n"
    )
    print("\n".join(report.show_figures(_shown(figures))))
    names = ("num_prompts", "input_len", "output_len", "shared_prefix")
    settings = {name: getattr(arguments, name) for name in names}
    report.write(arguments.result, {"engine": facts, "settings": settings, "figures": figures})
    return 0


def _rates(arguments: argparse.Namespace, seconds: float) -> dict[str, Any]:
    output = arguments.num_prompts * arguments.output_len
    total = output + arguments.num_prompts * (arguments.input_len + arguments.shared_prefix)
    return {
        "seconds": round(seconds, 3),
        "requests_per_second": round(arguments.num_prompts / seconds, 3),
        "output_tokens_per_second": round(output / seconds, 3),
        "total_tokens_per_second": round(total / seconds, 3),
    }


def page_facts(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Statistics of the KV pages during the run. Slot use covers all steps since the start, most of which are the run's."""
    hits = after["prefix_hit_tokens"] - before["prefix_hit_tokens"]
    return {
        "num_pages": after["num_pages"],
        "peak": after["pages_used_peak"],
        "waste_ratio": round(1 - after["slot_use_ratio"], 4),
        "preemptions": after["preemptions"] - before["preemptions"],
        "steps": after["steps"] - before["steps"],
        "prefix_hit_tokens": hits,
    }


def _shown(figures: dict[str, Any]) -> dict[str, str]:
    pages = figures["pages"]
    lines = {
        "time": f"{figures['seconds']:.2f} s, {pages['steps']:.0f} steps, {pages['preemptions']:.0f} preemptions",
        "requests/s": f"{figures['requests_per_second']:.2f}",
        "output tokens/s": f"{figures['output_tokens_per_second']:.1f}",
        "total tokens/s": f"{figures['total_tokens_per_second']:.1f}",
        "KV pages": f"{pages['peak']:.0f} of {pages['num_pages']:.0f} at the peak; "
        f"{pages['waste_ratio']:.1%} of allocated slots held no token",
        "prefix cache": f"{pages['prefix_hit_tokens']:.0f} prompt tokens found",
    }
    if "sequential" in figures:
        one_by_one = figures["sequential"]
        lines["one after another"] = (
            f"{one_by_one['output_tokens_per_second']:.1f} output tokens/s ({one_by_one['seconds']:.2f} s)"
        )
        lines["gain by batching"] = f"{figures['ratio']:.2f} ×"
    return lines
