"""The goals of benchmarks.plan_check: which are met, and by how much others are missed."""

import json
import subprocess
import sys
import time

import pytest

from benchmarks.plan_check.goals import as_json, goals_of, line_of
from benchmarks.plan_check.others import CoreTime, core_time
from benchmarks.plan_check.real import Seen, Sent
from benchmarks.plan_check.residuals import lines_of
from octavo.plan.step_model import MeasuredStep, StepModel
from octavo.schedule.step_costs import StepShape

ROWS = [
    ("first token, mean, s", [0.040, 0.042], [0.040, 0.040], [0.040, 0.040]),  # +2.5 %
    ("first token, p50, s", [0.04], [0.01], [0.04]),  # no goal
    ("first token, p99, s", [0.115, 0.115], [0.100, 0.100], [0.1, 0.1]),  # +15 %
    ("per token, mean, s", [0.0033], [0.003], [0.003]),  # +10 %
    ("per token, p99, s", [0.006, 0.006], [0.004, 0.0065], [0.005, 0.005]),  # +14 %, between the runs
    ("inter-token, mean, s", [1.0], [0.1], [0.1]),  # no goal
    ("inter-token, p99, s", [0.0091], [0.01], [0.01]),  # −9 %
    ("end to end, mean, s", [1.0], [0.1], [0.1]),  # no goal
    ("output tokens/s", [90.0], [100.0], [100.0]),  # −10 %
]


def test_each_goal_is_met_or_missed_by_a_share():
    goals = {goal.measure: goal for goal in goals_of("default", "chat", ROWS)}
    assert {name: round(goal.missed_by, 6) for name, goal in goals.items()} == {
        "first token, mean": 0.0,
        "first token, p99": 0.05,
        "per token, mean": 0.05,
        "per token, p99": 0.0,
        "inter-token, p99": 0.0,
        "output tokens/s": 0.05,
    }
    assert [name for name, goal in goals.items() if not goal.is_met] == [
        "first token, p99", "per token, mean", "output tokens/s",
    ]  # fmt: skip


def test_goals_are_written_as_a_table_and_as_json():
    goals = goals_of("default", "chat", ROWS)
    assert line_of(goals[1]) == (
        "| default | chat | first token, p99 | 115.0 ms | 100.0 ms | 100.0 … 100.0 ms | +15.0% | missed by 5.0% (10%) | +0.0% |"
    )
    assert "| met |" in line_of(goals[0]) and "| 90.0 | 100.0 |" in line_of(goals[-1])
    written = json.loads(json.dumps(as_json(goals)))
    assert [each["is_met"] for each in written] == [goal.is_met for goal in goals]
    assert written[1]["missed_by"] == pytest.approx(0.05) and written[1]["limit"] == 0.10


def test_kinds_of_steps_that_take_most_of_the_time_come_first():
    model = StepModel([1, 101], [0.01, 0.11], 0.0, 0.0, 0.0)  # 10 ms, and 1 ms for each further token
    steps = [MeasuredStep(StepShape(3, 0, 60, 0), 0.010)] * 4
    steps += [
        MeasuredStep(StepShape(2, 99, 20, 5000), 0.220),
        MeasuredStep(StepShape(1, 40, 0, 800), 0.050, wakes=True),
    ]
    first, second, third = (line.split(" | ") for line in lines_of("default, chat", model, steps))
    assert first == [
        "| default, chat",
        "up to 2 rows, up to 128 tokens beside streams",
        "1",
        "71.0%",
        "220.00 ms",
        "110.00 ms",
        "-50.0% |",
    ]
    assert second[1:3] == ["up to 1 rows, up to 64 tokens, woken", "1"] and second[-1] == "+0.0% |"
    assert third[1:4] == ["up to 4 rows", "4", "12.9%"] and third[-1] == "+20.0% |"


def test_runs_beside_others_work_are_left_out_if_others_remain():
    sent = [Sent(load, 0.0, 1.0, [], [], others) for load, others in (("a", 0.01), ("b", 0.2), ("a", 0.04), ("a", 0.0))]
    seen = Seen("", "default", 1.0, [], sent)
    assert [each.others for each in seen.runs_of("a")] == [0.01, 0.0] and [
        each.others for each in seen.runs_of("b")
    ] == [0.2]
    assert seen.disturbed == ["b", "a"]


def test_what_others_took_is_what_neither_this_process_nor_its_children_took():
    before = CoreTime(whole=100.0, busy=50.0, own=20.0)
    assert CoreTime(120.0, 65.0, 30.0).others_since(before) == pytest.approx(0.25)
    assert CoreTime(120.0, 59.9, 30.0).others_since(before) == 0.0, (
        "clocks of processes and of cores do not tick together"
    )
    begun = core_time()
    # A child of a child, which goes on; one that has ended; and this process itself.
    burn = "import time\nwhile time.process_time() < 0.3: pass"
    child = "import subprocess, sys; one = subprocess.Popen([sys.executable, '-c', sys.argv[1] + '\\ninput()'], stdin=0); one.wait()"
    with subprocess.Popen([sys.executable, "-c", child, burn], stdin=subprocess.PIPE) as process:
        subprocess.run([sys.executable, "-c", burn], check=True)
        until = time.process_time() + 0.3
        while time.process_time() < until:
            pass
        while core_time().own - begun.own < 0.85:
            assert process.poll() is None
            time.sleep(0.02)
        ended = core_time()
        process.communicate(b"\n")
    assert ended.busy - begun.busy >= 0.8 and ended.whole > begun.whole and 0 <= ended.others_since(begun) <= 1
