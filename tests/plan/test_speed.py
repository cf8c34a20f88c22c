"""The speed of a machine is found from requests that were alone."""

import random

import pytest

from octavo.plan.fleet import Simulation
from octavo.plan.settings import FleetSettings, Front, ReplicaSettings
from octavo.plan.speed import Probed, Speed, speed_of
from octavo.plan.step_model import StepModel
from octavo.plan.trace import Trace, TraceRequest
from octavo.schedule.step_costs import StepShape

MODEL = StepModel(
    [1, 8, 64, 512], [0.002, 0.003, 0.015, 0.1], 5e-5, 1e-6, 2e-7, [0.8, 1.2] * 32, 0.03, wake=0.0008, first=0.001
)
FRONT = Front(0.001, 2e-7, 0.002, 0.0006)


def settings_of(max_tokens: int) -> FleetSettings:
    return FleetSettings(1, ReplicaSettings(8, max_tokens, 1000, 4096), MODEL, FRONT)


@pytest.mark.parametrize("max_tokens", [512, 96])
@pytest.mark.parametrize("speed", [Speed(), Speed(1.3, 0.8), Speed(0.9, 1.25), Speed(2.0, 2.0)])
def test_a_probe_of_a_slower_machine_says_by_how_much(max_tokens, speed):
    """With small steps, a prompt has several of them, each with a part that is not the prompt's."""
    settings = settings_of(max_tokens)
    dice = random.Random(3)
    lengths = [(dice.randrange(8, 400), dice.randrange(2, 30)) for _ in range(20)]
    quiet = FleetSettings(1, settings.replica, MODEL.at_speed(speed.prompts, speed.rows), FRONT)
    trace = Trace("alone", [TraceRequest(100.0 * at, *each) for at, each in enumerate(lengths)])
    # Without noise: a probe does not know which of its times a step takes.
    plain = FleetSettings(1, quiet.replica, without_noise(quiet.model), FRONT)
    journeys = Simulation(trace, plain).run().journeys
    probed = [Probed(each.prompt_len, each.output_len, each.ttft, each.latency - each.ttft) for each in journeys]
    found = speed_of(settings, probed)
    assert found.prompts == pytest.approx(speed.prompts, abs=1e-6) and found.rows == pytest.approx(speed.rows, abs=1e-6)
    assert found.beside(speed).prompts == pytest.approx(1.0) and found.beside(speed).rows == pytest.approx(1.0)


def without_noise(model: StepModel) -> StepModel:
    return StepModel(
        model.tokens, model.seconds, model.row, model.context, model.pair, wake=model.wake, first=model.first
    )


def test_prompts_and_rows_have_speeds_of_their_own():
    model = MODEL.at_speed(1.5, 0.5)
    assert model.step_seconds(StepShape(1, 0, 100, 0)) == pytest.approx(
        0.5 * MODEL.step_seconds(StepShape(1, 0, 100, 0))
    )
    plain, slower = (each.step_seconds(StepShape(1, 300, 0, 50_000)) for each in (MODEL, model))
    rows = MODEL.seconds[0] + MODEL.row
    assert slower == pytest.approx(1.5 * (plain - rows) + 0.5 * rows)
    assert (model.wake, model.first) == (MODEL.wake / 2, MODEL.first / 2)


def test_a_request_that_took_no_time_at_all_is_not_believed():
    found = speed_of(settings_of(512), [Probed(64, 16, 1e-9, 1e-9)])
    assert found == Speed(0.1, 0.1)


def test_where_prompts_cost_nothing_there_is_one_speed():
    flat = StepModel([1, 512], [0.01, 0.01], 0.0, 0.0, 0.0)
    settings = FleetSettings(1, ReplicaSettings(8, 512, 1000, 4096), flat)
    found = speed_of(settings, [Probed(64, 11, 0.02, 0.15)])
    assert found.rows == pytest.approx(1.5) and found.prompts == found.rows


def test_a_few_requests_that_were_held_up_change_nothing():
    settings = settings_of(512)
    alike = [Probed(length, 16, 0.001 * length, 0.05) for length in (32, 128) for _ in range(9)]
    held_up = [each._replace(first=5 * each.first, rest=3 * each.rest) for each in alike[::3]]
    assert speed_of(settings, [*alike, *held_up]) == speed_of(settings, alike)
