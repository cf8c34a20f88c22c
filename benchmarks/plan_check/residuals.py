"""Which steps of real runs the model is off for: steps of about one kind, what they took, and what the model says."""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from benchmarks.plan_check.loads import model_of
from benchmarks.plan_check.predicted import costs_of
from benchmarks.plan_check.real import Seen
from octavo.plan.model_shape import read_shape
from octavo.plan.recorded import Measured
from octavo.plan.step_model import MeasuredStep, StepModel
from octavo.recording.format import read

_MOST_LINES = 16  # of each load: the kinds that take most of the time


def residuals(arguments: argparse.Namespace) -> None:
    for file in sorted(Path(arguments.output).glob("*/seen.json")):
        seen = msgspec.json.decode(file.read_bytes(), type=Seen)
        recording = read(file.parent / "recording")
        measured = Measured(recording)
        shape = read_shape(model_of(seen.gpu) if seen.gpu else seen.model)
        model = costs_of(recording, measured, seen.measuring, shape).step
        print(
            "| run | kind of step | steps | share of the time | seen | by the model | off by |\n|---|---|---|---|---|---|---|"
        )
        windows = [("measuring", each.since, each.until) for each in seen.measuring]
        windows += [(each.load, each.since, each.until) for each in seen.sent]
        for name in dict.fromkeys(name for name, _, _ in windows):
            steps = [step for own, *window in windows if own == name for step in measured.samples(*window)]
            for line in lines_of(f"{seen.title}, {name}", model, steps):
                print(line)


def lines_of(title: str, model: StepModel, steps: Sequence[MeasuredStep]) -> list[str]:
    """Rows of the table, as Markdown."""
    kinds: defaultdict[str, list[MeasuredStep]] = defaultdict(list)
    for step in steps:
        kinds[kind_of(step)].append(step)
    whole = sum(step.seconds for step in steps)
    lines = []
    for kind, alike in sorted(kinds.items(), key=lambda each: -sum(step.seconds for step in each[1]))[:_MOST_LINES]:
        seen, modelled = fmean(step.seconds for step in alike), fmean(model.seconds_of(step) for step in alike)
        lines.append(
            f"| {title} | {kind} | {len(alike)} | {seen * len(alike) / whole:.1%} | {seen * 1e3:.2f} ms | {modelled * 1e3:.2f} ms | {modelled / seen - 1:+.1%} |"
        )
    return lines


def kind_of(step: MeasuredStep) -> str:
    rows, more_tokens, context, _ = step.shape
    kind = f"up to {1 << (rows - 1).bit_length()} rows"
    if more_tokens:
        kind += f", up to {1 << (rows + more_tokens - 1).bit_length()} tokens" + (" beside streams" if context else "")
    return kind + (", woken" if step.wakes else ", after a first token" if step.after_first else "")
