"""Fewer replicas during a rolling restart: one always takes requests."""

import random

import pytest

from octavo.supervisor.fewer_replicas import Standing, next_to_restart, numbers_to_stop

BACK, READY, AWAY = Standing(0, True, True), Standing(0, True, False), Standing(0, False, False)


def fleet(*standings: Standing) -> list[Standing]:
    return [each._replace(number=number) for number, each in enumerate(standings)]


@pytest.mark.parametrize(
    ("live", "target", "to_restart", "stopped"),
    [
        (fleet(BACK, BACK, BACK), 1, [], [2, 1]),
        (fleet(AWAY, BACK), 1, [1], []),  # the first one is being restarted: the second is all there is
        (fleet(AWAY, BACK, BACK), 1, [1, 2], [2]),
        (fleet(READY, BACK), 1, [], []),  # an API process does not send the first one requests yet
        (fleet(BACK, BACK), 1, [1], [1]),
        (fleet(BACK, BACK), 1, [0, 1], []),  # the first one would be restarted alone
        (fleet(BACK, AWAY), 1, [0], [1]),
        (fleet(AWAY, AWAY), 1, [], [1]),
        (fleet(BACK, BACK), 2, [0, 1], []),
    ],
)
def test_which_replicas_are_stopped(live, target, to_restart, stopped):
    assert numbers_to_stop(live, target, to_restart) == stopped


def test_a_replica_that_will_be_stopped_is_not_restarted():
    assert next_to_restart(fleet(BACK, BACK, BACK), 2, [2, 1]) == 1
    assert next_to_restart(fleet(BACK, BACK), 1, [1]) is None


@pytest.mark.parametrize("seed", range(50))
def test_a_fleet_is_never_without_a_replica_and_becomes_what_was_asked_for(seed):
    """Wishes for other numbers come at any time, those for a restart when no other restart is in progress."""
    generator = random.Random(seed)
    target = generator.randint(2, 4)
    back_in = dict.fromkeys(range(target), 0)  # replica → ticks until it takes requests
    epochs, asked_at = dict.fromkeys(range(target), 0), 0
    to_restart: list[int] = []
    for tick in range(200):
        if tick < 120 and generator.random() < 0.2:
            target = generator.randint(1, 4)
        if tick < 120 and len(back_in) > 1 and not to_restart and not any(back_in.values()):
            to_restart, asked_at = sorted(back_in), tick
        live = [Standing(number, not left, not left) for number, left in back_in.items()]
        to_restart = [number for number in to_restart if number in back_in]
        for number in numbers_to_stop(live, target, to_restart):
            del back_in[number]
        for number in range(4):
            if len(back_in) < target and number not in back_in:
                back_in[number], epochs[number] = generator.randint(1, 5), tick
        following = next_to_restart(live, target, to_restart)
        if following is not None and not any(back_in.values()):
            to_restart.remove(following)
            back_in[following], epochs[following] = generator.randint(1, 5), tick
        assert not all(back_in.values()), (tick, back_in)
        back_in = {number: max(0, left - 1) for number, left in back_in.items()}
    assert len(back_in) == target and not to_restart
    assert all(epochs[number] >= asked_at for number in back_in)
