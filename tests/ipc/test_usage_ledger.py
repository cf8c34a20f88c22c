"""What every key has used, over API processes that come, go and are killed."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.ipc import usage_ledger
from octavo.ipc.usage_ledger import Refusal, UsageLedger
from octavo.key_settings import KeySettings

KEY, OTHER = b"k" * 16, b"o" * 16
DAY = 86400


class Clock:
    now = 20_000.5 * DAY

    def __call__(self) -> float:
        return self.now


def test_counts_outlive_processes_and_servers(tmp_path: Path) -> None:
    path, clock = tmp_path / "ledger", Clock()
    for _ in range(3):
        ledger = UsageLedger(path, clock)
        accounts = ledger.accounts({KEY: KeySettings(), OTHER: KeySettings()})
        assert accounts[KEY].admit(5, 10) is None
        assert accounts[KEY].charge(5, 1) == 1 and accounts[KEY].charge(0, 2) == 2
        ledger.close()
    ledger = UsageLedger(path, clock)
    accounts = ledger.accounts({OTHER: KeySettings(), KEY: KeySettings()})
    assert accounts[KEY].used() == (15, 9, 3, 24, 0) and accounts[OTHER].used() == (0, 0, 0, 0, 0)
    clock.now += DAY
    assert accounts[KEY].used().today == 0
    accounts[KEY].charge(0, 4)
    assert accounts[KEY].used() == (15, 13, 3, 4, 0)
    ledger.close()


def test_a_budget_is_used_to_its_last_token_and_not_beyond(tmp_path: Path) -> None:
    clock = Clock()
    ledgers = [UsageLedger(tmp_path / "ledger", clock) for _ in range(2)]
    one, two = (ledger.accounts({KEY: KeySettings(budget_tokens=20)})[KEY] for ledger in ledgers)
    assert one.charge(8, 1) == 1 and two.charge(4, 3) == 3  # 16
    assert two.charge(5, 1) == -1, "a prompt that does not fit is not counted"
    assert one.admit(5, 9) == Refusal("budget", DAY // 2)
    assert one.charge(2, 5) == 2 and two.charge(0, 1) == 0 and one.charge(0, 1) == 0
    assert one.used().today == two.used().today == 20
    assert two.admit(0, 1) == Refusal("budget", DAY // 2)
    clock.now += DAY
    assert two.admit(20, 21) is None and two.charge(20, 5) == 0
    for ledger in ledgers:
        ledger.close()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), st.integers(0, 9)), max_size=30),
)
def test_over_any_charges_a_budget_is_exact(tmp_path_factory: pytest.TempPathFactory, budget: int, charges) -> None:
    path = tmp_path_factory.mktemp("ledger") / "ledger"
    ledgers = [UsageLedger(path, Clock()) for _ in range(3)]
    accounts = [ledger.accounts({KEY: KeySettings(budget_tokens=budget)})[KEY] for ledger in ledgers]
    served = 0
    for row, num_prompt, num_output in charges:
        allowed = accounts[row].charge(num_prompt, num_output)
        assert allowed <= num_output
        if allowed < num_output:
            assert budget - served - (num_prompt if allowed >= 0 else 0) <= max(allowed, num_prompt - 1, 0)
        if allowed >= 0:
            served += num_prompt + allowed
        assert served == accounts[row].used().today <= budget
    for ledger in ledgers:
        ledger.close()


def _charge_until_killed(path: Path, budget: int, pipe) -> None:
    account = UsageLedger(path).accounts({KEY: KeySettings(budget_tokens=budget)})[KEY]
    while True:
        pipe.send(account.charge(0, 1))


@pytest.mark.parametrize("budget", [500, 10**9])
def test_processes_that_are_killed_lose_nothing_and_share_a_budget(tmp_path: Path, budget: int) -> None:
    """Each sends what it was allowed after it was counted, so at most one count of each was not sent when it was killed."""
    path, context = tmp_path / "ledger", multiprocessing.get_context("fork")
    num_served, num_killed = 0, 0
    for generation in range(3):
        running = []
        for _ in range(2):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_charge_until_killed, args=(path, budget, writer))
            process.start()
            writer.close()
            running.append((process, reader))
        for _, reader in running:
            num_served += sum(reader.recv() for _ in range(150 + generation))
        for process, reader in running:
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            num_killed += 1
            while True:
                try:
                    num_served += reader.recv()
                except EOFError:
                    break
            reader.close()
    ledger = UsageLedger(path)
    used = ledger.accounts({KEY: KeySettings(budget_tokens=budget)})[KEY].used()
    if budget == 500:
        assert used.output_tokens == 500 and 500 - num_killed <= num_served <= 500
    else:
        assert num_served <= used.output_tokens <= num_served + num_killed
    ledger.close()


def test_limits_a_minute_are_refilled_evenly(tmp_path: Path) -> None:
    clock = Clock()
    ledgers = [UsageLedger(tmp_path / "ledger", clock) for _ in range(2)]
    accounts = [ledger.accounts({KEY: KeySettings(rpm=6, tpm=600)})[KEY] for ledger in ledgers]
    for at in range(6):
        assert accounts[at % 2].admit(10, 20) is None
    assert accounts[0].admit(10, 20) == Refusal("requests", 10)
    assert accounts[1].remaining_requests() == (6, 0, 60.0)
    assert accounts[1].remaining_tokens()[:2] == (600, 540)
    clock.now += 10
    assert accounts[1].admit(10, 20) is None and accounts[0].admit(1, 1) is not None
    clock.now += 60
    accounts[0].charge(0, 600)  # answers fill the bucket of tokens, too
    assert accounts[1].admit(100, 100) == Refusal("tokens", 10)
    clock.now += 10
    assert accounts[1].admit(100, 100) is None
    clock.now -= 10 * DAY  # a clock that is set back
    assert accounts[1].admit(0, 1).seconds <= 120
    for ledger in ledgers:
        ledger.close()


def test_tokens_in_flight(tmp_path: Path) -> None:
    path = tmp_path / "ledger"
    ledgers = [UsageLedger(path) for _ in range(2)]
    one, two = (ledger.accounts({KEY: KeySettings(max_tokens_in_flight=100)})[KEY] for ledger in ledgers)
    assert one.admit(10, 60) is None
    one.hold(60)
    assert two.admit(10, 60) == Refusal("tokens in flight", 1) and two.admit(10, 40) is None
    ledgers[0].close()
    successor = UsageLedger(path)  # what it had open ended with it
    successor.accounts({KEY: KeySettings(max_tokens_in_flight=100)})
    assert two.admit(10, 100) is None
    for ledger in (successor, ledgers[1]):
        ledger.close()


def test_keys_that_a_server_no_longer_has_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = UsageLedger(tmp_path / "ledger")
    keys = [b"%016d" % number for number in range(usage_ledger.MAX_KEYS)]
    old = ledger.accounts(dict.fromkeys(keys, KeySettings()))
    old[keys[7]].charge(1, 2)
    kept = dict.fromkeys(keys[8:], KeySettings())
    found = ledger.accounts({**kept, KEY: KeySettings(), OTHER: KeySettings()})
    assert found[KEY].used() == found[OTHER].used() == (0, 0, 0, 0, 0)
    with pytest.raises(ConfigError, match="4096 keys"):
        ledger.accounts({**dict.fromkeys(keys, KeySettings()), KEY: KeySettings()})
    ledger.close()


@pytest.mark.parametrize("content", [b"x", b"y" * 100_000])
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "ledger").write_bytes(content)
    with pytest.raises(ConfigError, match="no ledger"):
        UsageLedger(tmp_path / "ledger")


def test_rows_are_claimed_by_processes_that_live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(usage_ledger, "MAX_ROWS", 2)
    first, second = UsageLedger(tmp_path / "ledger"), UsageLedger(tmp_path / "ledger")
    with pytest.raises(ConfigError, match="2 API processes"):
        UsageLedger(tmp_path / "ledger")
    first.close()
    UsageLedger(tmp_path / "ledger").close()
    second.close()


def _hold_until_killed(path: Path, pipe) -> None:
    UsageLedger(path).accounts({KEY: KeySettings(max_tokens_in_flight=100)})[KEY].hold(90)
    pipe.send(None)
    signal.pause()


def test_what_a_killed_process_had_open_counts_no_more(tmp_path: Path) -> None:
    """Also where no other process takes its row: its server may have ended with it, and others share the ledger."""
    context = multiprocessing.get_context("fork")
    ledger = UsageLedger(tmp_path / "ledger")
    account = ledger.accounts({KEY: KeySettings(max_tokens_in_flight=100)})[KEY]
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_hold_until_killed, args=(tmp_path / "ledger", writer))
    process.start()
    reader.recv()
    assert account.used().in_flight == 90 and account.admit(10, 20) == Refusal("tokens in flight", 1)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert account.admit(10, 20) is None and account.used().in_flight == 0
    ledger.close()


def test_a_ledger_of_an_older_version_goes_on(tmp_path: Path) -> None:
    ledger = UsageLedger(tmp_path / "ledger")
    ledger.accounts({KEY: KeySettings()})[KEY].charge(3, 4)
    ledger.close()
    os.truncate(tmp_path / "ledger", usage_ledger._OLD_SIZE)
    ledger = UsageLedger(tmp_path / "ledger")
    assert ledger.accounts({KEY: KeySettings()})[KEY].used()[:2] == (3, 4)
    ledger.close()


@pytest.mark.parametrize("number", [-1, 2**62, 2**63 - 1, -(2**63)])
def test_a_damaged_file_counts_again_from_zero(tmp_path: Path, number: int) -> None:
    """Whatever words it holds, a server with it starts, and keys are counted."""
    path, limits = tmp_path / "ledger", KeySettings(rpm=5, tpm=1000, max_tokens_in_flight=500, budget_tokens=5000)
    ledger = UsageLedger(path, Clock())
    ledger.accounts({KEY: limits})
    ledger.close()
    word = number.to_bytes(8, "little", signed=True)
    with open(path, "r+b") as file:
        for offset, count in ((64, 1), (usage_ledger._SHARED, 2), (usage_ledger._ROWS, 8)):
            file.seek(offset)
            file.write(word * count)
    ledger = UsageLedger(path, Clock())
    accounts = ledger.accounts({KEY: limits, OTHER: limits})
    assert accounts[OTHER].admit(10, 20) is None and accounts[OTHER].charge(10, 5) == 5
    account = accounts[KEY]
    account.hold(20)
    account.charge(10, 5)
    account.admit(10, 20)
    assert account.used().prompt_tokens == 10 and account.used().today == 15
    ledger.close()
