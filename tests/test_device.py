"""Waiting for a device: a short wait returns at once, a long one does not keep a core busy."""

import pytest

from octavo import device
from octavo.device import PATIENCE_SECONDS, Event


class Queue:
    """A device that is done at `done_at`, with the interface of torch's events; every query takes 0.1 ms. It is also the clock."""

    def __init__(self, done_at: float) -> None:
        self.now, self.done_at = 0.0, done_at
        self.questions: list[float] = []

    def query(self) -> bool:
        self.now += 1e-4
        self.questions.append(self.now)
        return self.now >= self.done_at

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def waited(monkeypatch: pytest.MonkeyPatch, done_at: float) -> Queue:
    event, queue = Event(), Queue(done_at)
    monkeypatch.setattr(event, "_event", queue)
    monkeypatch.setattr(device, "time", queue)
    event.wait()
    return queue


def test_a_short_wait_ends_when_the_device_does(monkeypatch: pytest.MonkeyPatch) -> None:
    assert waited(monkeypatch, 0.0).questions == [1e-4]
    assert waited(monkeypatch, 0.01).now == pytest.approx(0.01, abs=2e-4)


def test_a_long_wait_sleeps_and_still_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = waited(monkeypatch, 30.0)
    assert 30.0 <= queue.now <= 30.4
    # Little CPU time in all, and less than one clock tick in any second.
    assert sum(question > PATIENCE_SECONDS for question in queue.questions) < 400
    assert sum(20.0 < question <= 30.0 for question in queue.questions) < 50
