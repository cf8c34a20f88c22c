"""The copy of an engine's shared memory on another machine, and its clock."""

import os
import random
import subprocess
import sys

import pytest

from octavo.cluster.mirror import Copier, apply
from octavo.ipc.clock import boot_id
from octavo.ipc.heartbeat import ENGINE_PARTS, LEGACY_PARTS, SERVER_PARTS, Heartbeat, block_memory, shared_memory


@pytest.fixture
def sides():
    """(fd, memory) of the engine's machine and of the server's."""
    made = []
    for _ in range(2):
        fd = shared_memory(2)
        made.append((fd, block_memory(fd, 1)))
    yield made
    for fd, memory in made:
        memory.close()
        os.close(fd)


def test_a_heartbeat_is_copied_both_ways(sides) -> None:
    (engine_fd, engine_memory), (server_fd, server_memory) = sides
    engine, server = Heartbeat(engine_fd, 1), Heartbeat(server_fd, 1)
    server.reset()
    server.set_pid(0)
    engine.reset()
    copier = Copier(engine_memory, ENGINE_PARTS, assume_zero=True)
    engine.pulse()
    engine.set_backlog(2.5)
    engine.begin()
    engine.size(7)
    engine.seat([], [(0, "first"), (4095, "last")])
    engine.take(3, 12.5)
    engine.move(0.25)
    engine.end(9, 2, 1)
    apply(server_memory, copier.changes(), ENGINE_PARTS)
    assert server.seated() == ["first", "last"] and server.pid == 0
    assert (server.last_pulse, server.beat, server.last_step) == (engine.last_pulse, engine.beat, engine.last_step)
    assert (server.num_steps, server.num_running, server.num_waiting, server.num_tokens) == (9, 2, 1, 7)
    assert server.backlog_seconds == 2.5 and server.seconds_per_request == 0.25
    assert server.has_taken(3, 12.5) and not server.has_taken(3, 12.6)
    assert copier.changes() == b""
    engine.seat([0], [])
    changes = copier.changes()
    assert len(changes) < 2000, "a row that changes is not the whole memory"
    apply(server_memory, changes, ENGINE_PARTS)
    assert server.seated() == ["last"]
    # What others count comes the other way, and is not overwritten by the engine's zeros.
    server.count_restart("engine", "killed")
    server.count_refusal(2, "malformed", "head")
    server.stalled(1.5)
    apply(engine_memory, Copier(server_memory, SERVER_PARTS).changes(), SERVER_PARTS)
    engine.pulse()
    apply(server_memory, copier.changes(), ENGINE_PARTS)
    for each in (engine, server):
        assert each.restarts()["engine", "killed"] == 1 and each.refusals()["malformed", "head"] == 1
    assert server.stalled_seconds == 1.5
    engine.close()
    server.close()


def test_the_next_engine_inherits_the_pace_and_what_was_taken_in(sides) -> None:
    (engine_fd, engine_memory), (server_fd, server_memory) = sides
    server, engine = Heartbeat(server_fd, 1), Heartbeat(engine_fd, 1)
    server.move(0.5)
    server.take(7, 100.0)
    apply(engine_memory, Copier(server_memory, LEGACY_PARTS).changes(), LEGACY_PARTS)
    engine.reset()
    assert engine.seconds_per_request == 0.5
    engine.take(7, 90.0)  # a survivor comes again
    assert engine.has_taken(7, 95.0)
    engine.close()
    server.close()


def test_random_changes_arrive_exactly(sides) -> None:
    (_, source), (_, target) = sides
    generator = random.Random(5)
    copier = Copier(source, ENGINE_PARTS, assume_zero=True)
    for _ in range(50):
        for _ in range(generator.randrange(4)):
            start, end = generator.choice(ENGINE_PARTS)
            at = generator.randrange(start, end)
            source[at] = generator.randrange(256)
        apply(target, copier.changes(), ENGINE_PARTS)
        assert target[:] == source[:]


def test_what_lies_outside_the_parts_is_refused(sides) -> None:
    _, (_, memory) = sides
    whole = Copier(memory, ((0, 64),)).changes()
    for changes in (whole, whole[:3], Copier(memory, ENGINE_PARTS).changes()[:-1]):
        with pytest.raises(ValueError):
            apply(memory, changes, ENGINE_PARTS)


def test_an_engine_elsewhere_has_the_servers_clock() -> None:
    code = (
        "import time; before = time.monotonic(), time.monotonic_ns(); from octavo.ipc.clock import shift; shift(5_000_000_000);"
        "assert -5 <= time.monotonic() - before[0] < -4; assert -5e9 <= time.monotonic_ns() - before[1] < -4e9;"
        "import threading; assert not threading.Event().wait(0.01)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert boot_id()
