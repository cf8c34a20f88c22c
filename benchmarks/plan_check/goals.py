"""The goals: by how much a prediction may be off. Which are met, and by how much others are missed."""

import argparse
import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from benchmarks.plan_check.limit import LIMIT_GOAL, Limit, limit_of
from benchmarks.plan_check.loads import GOALS, SETTINGS, settings_of
from benchmarks.plan_check.predicted import columns, predict
from benchmarks.plan_check.real import Seen, run
from octavo.cli.planning.check import compare
from octavo.plan.machine import read_costs


class Goal(msgspec.Struct, frozen=True):
    """One measure of one load. Seconds, or tokens a second; means over the runs."""

    setting: str
    load: str
    measure: str
    predicted: float
    seen: float
    lowest: float
    highest: float
    limit: float  # share by which the prediction may be off
    driven: float  # predicted by the simulation with the seen speed

    @property
    def off(self) -> float:
        return self.predicted / self.seen - 1

    @property
    def is_met(self) -> bool:
        """Within the limit, or between what was seen in different runs."""
        return abs(self.off) <= self.limit or self.lowest <= self.predicted <= self.highest

    @property
    def missed_by(self) -> float:
        """Share by which it is off beyond the limit; 0: met."""
        return 0.0 if self.is_met else abs(self.off) - self.limit


Columns = list[tuple[str, list[float], list[float], list[float]]]


def goals_of(setting: str, load: str, rows: Columns) -> list[Goal]:
    """`rows`: of each measure what was predicted, seen, and predicted with the seen speed, in every run."""
    found = []
    for name, predicted, seen, driven in rows:
        limit = next((limit for word, limit in GOALS.items() if name.endswith((word, f"{word}, s"))), None)
        if limit is None or name.startswith(("end", "inter-token, mean")):
            continue
        numbers = (fmean(predicted), fmean(seen), min(seen), max(seen), limit, fmean(driven))
        found.append(Goal(setting, load, name.removesuffix(", s"), *numbers))
    return found


def line_of(goal: Goal) -> str:
    """A row of the table, as Markdown."""
    unit, scale = ("", 1.0) if "tokens/s" in goal.measure else (" ms", 1e3)
    result = "met" if goal.is_met else f"missed by {goal.missed_by:.1%} ({goal.limit:.0%})"
    return (
        f"| {goal.setting} | {goal.load} | {goal.measure} | {goal.predicted * scale:.1f}{unit} | {goal.seen * scale:.1f}{unit} | "
        f"{goal.lowest * scale:.1f} … {goal.highest * scale:.1f}{unit} | {goal.off:+.1%} | {result} | {goal.driven / goal.seen - 1:+.1%} |"
    )


def as_json(goals: list[Goal]) -> list[dict[str, Any]]:
    return [
        msgspec.structs.asdict(goal) | {"off": goal.off, "is_met": goal.is_met, "missed_by": goal.missed_by}
        for goal in goals
    ]


def table(arguments: argparse.Namespace) -> list[Goal]:
    folder = Path(arguments.output)
    for file in sorted(folder.glob("gpu-*.tar.gz")):
        shutil.unpack_archive(file, file.parent, filter="data")
    folders = [folder / setting for setting in SETTINGS]
    folders += sorted(each for each in folder.glob("gpu-*") if each.is_dir())
    found = {each.name: predict(each) for each in folders if (each / "seen.json").exists()}
    goals = [
        goal
        for setting, by_load in found.items()
        for load, result in by_load.items()
        for goal in goals_of(setting, load, result["rows"])
    ]
    print(
        "| setting | load | measure | predicted | seen, mean of the runs | lowest … highest | off by | goal | with the seen speed |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for goal in goals:
        print(line_of(goal))
    num_driven = sum(abs(goal.driven / goal.seen - 1) <= goal.limit for goal in goals)
    print(f"\n{sum(goal.is_met for goal in goals)} of {len(goals)} goals are met; with the seen speed {num_driven}.\n")
    for setting, by_load in found.items():
        for load, result in by_load.items():
            shares = ", ".join(f"{share:.3f}" for share in result["steps"])
            speeds = ", ".join(f"{each.prompts:.2f} and {each.rows:.2f}" for each in result["speeds"])
            others = ", ".join(f"{share:.1%}" for share in result["others"])
            print(
                f"{setting}, {load}: steps by the model / seen, same plans: {shares}; speed of prompts and rows by the probes: {speeds}; others took {others} of the "
                f"cores, and more in {result['left_out']} that are left out; failed: {result['failed']}; left out of the measuring: {result['disturbed']:.0%}"
            )
    across(folder)
    return goals


def run_all(arguments: argparse.Namespace) -> None:
    """Every goal of a CPU: the loads in each setting, and the highest rates of one and of two servers. With --setting, those of this setting
    alone: a machine that cannot be kept idle for so long is measured part by part, into one folder."""
    folder = Path(arguments.output)
    for setting in [arguments.setting] if arguments.setting else SETTINGS:
        run(argparse.Namespace(**vars(arguments) | {"setting": setting}))
    limits: list[Limit] = []
    if not arguments.setting:
        limits = [limit_of(count, arguments, requests) for count, requests in ((1, 120), (2, 200))]
    goals = table(arguments)
    met = sum(goal.is_met for goal in goals) + sum(each.is_met for each in limits)
    for each in limits:
        print(each.words)
    print(f"{met} of {len(goals) + len(limits)} goals are met")
    rates = [
        {"servers": each.servers, "predicted": each.predicted, "lowest": each.low, "highest": each.high, "off": each.off,
         "limit": LIMIT_GOAL, "is_met": each.is_met}
        for each in limits
    ]  # fmt: skip
    written = {"met": met, "goals": as_json(goals), "highest_rates": rates}
    (folder / "goals.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


OTHER_MODEL_GOAL = 0.12


def across(folder: Path) -> None:
    """Each model on a GPU by the steps of another one, whose costs predict() has written."""
    seen = {
        file.parent.name.removeprefix("gpu-"): msgspec.json.decode(file.read_bytes(), type=Seen)
        for file in sorted(folder.glob("gpu-*/seen.json"))
    }
    costs = {name: read_costs(folder / f"costs-{name}.json") for name in seen}
    for name, own in costs.items():
        for other in (each for each in costs.values() if each.shape != own.shape):
            step = other.step_of(own.shape, own.weights_bytes, own.shape.kv_numbers / other.shape.kv_numbers)
            settings = settings_of(msgspec.structs.replace(own, step=step, front=other.front), {})
            for load, trace in seen[name].traces.items():
                rows = [compare(trace, settings, each.results) for each in seen[name].sent if each.load == load]
                for measure, predicted, real, _ in columns(rows, rows):
                    if not measure.endswith(("mean, s", "tokens/s")):
                        continue
                    off = fmean(predicted) / fmean(real) - 1
                    print(
                        f"{name} by the steps of {other.shape.name}, {load}: {measure}: predicted {fmean(predicted):.4g}, seen "
                        f"{fmean(real):.4g}, {off:+.1%}, {'met' if abs(off) <= OTHER_MODEL_GOAL else f'missed ({OTHER_MODEL_GOAL:.0%})'}"
                    )
