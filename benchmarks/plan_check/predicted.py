"""Predictions for real runs, from the steps that were measured before each."""

import bisect
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.plan_check.loads import SETTINGS, model_of, settings_of
from benchmarks.plan_check.real import Measuring, Seen, Sent
from octavo import __version__
from octavo.cli.planning.check import Row, compare, rows_of
from octavo.cli.planning.measure import Exercised, front_of, with_speed
from octavo.plan.fleet import Simulation
from octavo.plan.machine import FORMAT, MachineCosts, write_costs
from octavo.plan.model_shape import ModelShape, read_shape
from octavo.plan.recorded import Measured
from octavo.plan.settings import FleetSettings
from octavo.plan.speed import Speed, speed_of
from octavo.plan.step_model import PICOSECONDS, MeasuredStep, StepModel, fit_model, without_slow_stretches
from octavo.plan.trace import Trace
from octavo.recording.format import Recording, read

PACE_SECONDS = 3.0


def predict(folder: Path) -> dict[str, Any]:
    """What was seen in a run, and what a plan from the steps that were measured before it says."""
    seen = msgspec.json.decode((folder / "seen.json").read_bytes(), type=Seen)
    recording = read(folder / "recording")
    measured = Measured(recording)
    costs = costs_of(recording, measured, seen.measuring, read_shape(model_of(seen.gpu) if seen.gpu else seen.model))
    if seen.gpu:
        write_costs(folder.parent / f"costs-{seen.title}.json", costs)
    _, changes = SETTINGS[seen.setting]
    found: dict[str, Any] = {}
    for name, trace in seen.traces.items():
        rounds = seen.runs_of(name)
        plain = settings_of(costs, changes)
        speeds = [
            speed_of(plain, each.probed).beside(costs.speed) if each.probed and costs.speed else Speed()
            for each in rounds
        ]
        near = [each.applied_to(plain) for each in speeds]
        rows = [compare(trace, settings, each.results) for settings, each in zip(near, rounds, strict=True)]
        own = own_costs(costs, measured, [(each.since, each.until) for each in rounds])
        driven = [drive(trace, settings_of(own, changes), measured, each) for each in rounds]
        found[name] = {
            "disturbed": costs.disturbed,
            "failed": sum(bool(result.error) for each in rounds for result in each.results),
            # The model's time of the steps that were really planned, as a share of the time that they took.
            "steps": [
                _of_real_plans(settings.model, measured.samples(each.since, each.until))
                for settings, each in zip(near, rounds, strict=True)
            ],
            "speeds": speeds,
            "others": [each.others for each in rounds],
            "left_out": sum(each.load == name for each in seen.sent) - len(rounds),
            "rows": columns(rows, driven),
        }
    return found


def columns(rows: list[list[Row]], driven: list[list[Row]]) -> list[tuple[str, list[float], list[float], list[float]]]:
    """Of each measure what was predicted and seen in every run, and what the simulation with the seen speed says. A measure that some run did
    not have (no times between tokens, where answers came whole) is left out."""
    planned, again = ([{row.name: row for row in each} for each in runs] for runs in (rows, driven))
    names = [row.name for row in rows[0] if all(row.name in each for each in (*planned, *again))]
    return [
        (
            name,
            [each[name].predicted for each in planned],
            [each[name].seen for each in planned],
            [each[name].predicted for each in again],
        )
        for name in names
    ]


def costs_of(recording: Recording, measured: Measured, measuring: list[Measuring], shape: ModelShape) -> MachineCosts:
    timed = [each for one in measuring for each in measured.timed(one.since, one.until)]
    samples, disturbed = without_slow_stretches(timed)
    fit = fit_model(samples)
    report = recording.header.report
    costs = MachineCosts(
        FORMAT, time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()), __version__, report.device, True, shape, report.weights_bytes,
        report.page_bytes, report.page_size, report.num_pages, report.max_model_len, report.max_num_seqs, report.max_num_batched_tokens,
        measured.learned.depth, fit.model, front_of(Exercised([asked for one in measuring for asked in one.alone], [asked for one in measuring for asked in one.mixed], []), [measured]), 0.0, fit.num_samples, fit.median_error, fit.p90_error, fit.noise, disturbed=disturbed,
        overlap_rows=measured.learned.overlap_rows,
    )  # fmt: skip
    return with_speed(costs, [asked for one in measuring for asked in one.probes])


def own_costs(costs: MachineCosts, measured: Measured, windows: list[tuple[float, float]]) -> MachineCosts:
    """Fitted to the steps of the compared runs themselves. What is still wrong then is not the steps' fit."""
    samples = [sample for window in windows for sample in measured.samples(*window)]
    return msgspec.structs.replace(costs, step=fit_model(samples).model)


def drive(trace: Trace, settings: FleetSettings, measured: Measured, sent: Sent) -> list[Row]:
    """A simulation whose steps are as slow, over a few seconds each, as those of the real run were. What it is off by is not the machine's drift."""
    plain = msgspec.structs.replace(settings.model, noise=[])
    steps = measured.timed(sent.since, sent.until)
    ended = [each for each, _ in steps]
    seen = list(itertools.accumulate((sample.seconds for _, sample in steps), initial=0.0))
    by_model = list(itertools.accumulate((plain.seconds_of(sample) for _, sample in steps), initial=0.0))
    first = min(measured.arrivals(sent.since, sent.until))

    @functools.cache
    def pace(tenth: int) -> float:
        middle = first + tenth / 10
        low, high = (bisect.bisect_left(ended, middle + side * PACE_SECONDS / 2) for side in (-1, 1))
        return (seen[high] - seen[low]) / (by_model[high] - by_model[low]) if high - low >= 5 else 1.0

    settings = msgspec.structs.replace(settings, model=plain)
    simulation = Simulation(trace, settings, with_jumps=False, pace=lambda now: pace(10 * now // PICOSECONDS))
    return rows_of([simulation.run().figures], sent.results)


def _of_real_plans(model: StepModel, samples: list[MeasuredStep]) -> float:
    return sum(model.seconds_of(sample) for sample in samples) / sum(sample.seconds for sample in samples)
