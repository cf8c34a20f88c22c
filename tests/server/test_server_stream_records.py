"""What is left of a resumable stream when its API process ends at any point, and who may go on with it."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from octavo.client.streams import Streams
from octavo.fresh import Source
from octavo.ipc.usage_ledger import Charge, UsageLedger
from octavo.key_settings import KeySettings
from octavo.messages import Finish, GenerateRequest, SamplingParams, TokenDelta
from octavo.server.state import stream_records
from octavo.server.state.stream_records import RecordHead, StreamRecord, StreamRecords

NAME = "cmpl-" + "0" * 32
HEAD = RecordHead("/v1/completions", b'{"prompt": "a"}', b"owner", b"key", 17.0, "fingerprint")
LISTS = [
    [TokenDelta("r", 0, [5, 6]), TokenDelta("r", 1, [7])],
    [TokenDelta("r", 0, [8], Finish("stop"))],
    [TokenDelta("r", 1, [9])],
]


@pytest.fixture
def records(tmp_path: Path) -> StreamRecords:
    records = StreamRecords()
    records.open(tmp_path)
    return records


def written(records: StreamRecords) -> StreamRecord:
    record = records.begin(NAME, HEAD)
    assert record is not None
    for deltas in LISTS:
        record.write(deltas)
    return record


def anyone(owner: bytes) -> bool:
    return True


def request(num_choices: int) -> GenerateRequest:
    return GenerateRequest("r", [1, 2], SamplingParams(n=num_choices, max_tokens=9, seed=1), [])


def test_only_one_has_it_and_its_end_frees_it(records: StreamRecords) -> None:
    record = written(records)
    assert records.claim(NAME, anyone) is None and records.has(NAME)
    record.release()  # as the system does when a process ends
    found = records.claim(NAME, lambda owner: owner == b"owner")
    assert found is not None and found.head == HEAD and found.lists == LISTS
    assert records.claim(NAME, anyone) is None
    found.release()
    assert records.claim(NAME, lambda owner: False) is None, "another key's"
    assert records.claim(NAME, anyone) is not None, "asking for it has locked nothing"


def test_a_process_may_end_at_any_byte(records: StreamRecords, tmp_path: Path) -> None:
    written(records).release()
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    num_known = set()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        found = records.claim(NAME, anyone)
        if found is None:
            assert not num_known, "a longer file has less"
            continue
        assert found.lists == LISTS[: len(found.lists)]
        num_known.add(len(found.lists))
        found.write(LISTS[-1])
        found.release()
        again = records.claim(NAME, anyone)
        assert again is not None and again.lists == [*found.lists, LISTS[-1]], "it is written on behind what is whole"
        again.release()
    assert num_known == {0, 1, 2, 3}


def test_the_engine_continues_behind_the_last_tokens(records: StreamRecords) -> None:
    written(records).release()
    found = records.claim(NAME, anyone)
    assert found is not None
    continued = found.begun(request(2))
    assert continued is not None and continued.begun == [None, [7, 9]]
    found.lists.append([TokenDelta("r", 1, [], Finish("length"))])
    assert found.begun(request(2)) is None, "nothing is left to compute"
    found.lists.clear()
    assert found.begun(request(2)) == request(2)


def test_processes_that_end_with_it_are_counted_until_there_is_progress(records: StreamRecords) -> None:
    record = written(records)
    for number in range(3):
        assert record.num_attempts == number and record.lists == ([] if not number else LISTS)
        record.note_attempt()
        record.release()
        record = records.claim(NAME, anyone)
    record.write(LISTS[-1])
    record.release()
    record = records.claim(NAME, anyone)
    assert record.num_attempts == 0 and record.lists == [*LISTS, LISTS[-1]]


def test_a_stream_that_is_too_long_is_not_kept(records: StreamRecords, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_records, "MAX_RECORD_BYTES", 300)
    record = records.begin(NAME, HEAD)
    assert record is not None and records.has(NAME)
    for _ in range(20):
        record.write(LISTS[0])
    assert not records.has(NAME)


@pytest.mark.parametrize("name", ["", "../secret", "cmpl-1", "cmpl-" + "0" * 31 + "/", NAME.upper()])
def test_other_names_are_no_files(records: StreamRecords, name: str) -> None:
    assert records.begin(name, HEAD) is None and records.claim(name, anyone) is None and not records.has(name)


def test_records_that_no_process_has_are_removed(records: StreamRecords, tmp_path: Path) -> None:
    record = written(records)
    os.utime(tmp_path / f"stream-{NAME}", (0, 0))
    records.remove_old(60)
    assert records.has(NAME), "its process lives"
    record.release()
    records.remove_old(60)
    assert not records.has(NAME)


def test_equal_sources_give_equal_values() -> None:
    first, second = Source(b"key", 1.0), Source(b"key", 1.0, "again")
    assert [first.take(16) for _ in range(3)] == [second.take(16) for _ in range(3)]
    assert len({Source(b"key", 1.0).take(8), Source(b"other", 1.0).take(8), first.take(8)}) == 3


def test_a_damaged_file_is_no_stream(records: StreamRecords, tmp_path: Path) -> None:
    """Texts that are not UTF-8, values that are nested without end, and tokens of choices that the request does not have."""
    whole = written(records)
    whole.release()
    path = tmp_path / f"stream-{NAME}"
    content = path.read_bytes()
    path.write_bytes(content.replace(b"/v1/completions", b"/v1/\xff\xff\xffpletions"))
    assert records.claim(NAME, anyone) is None
    path.write_bytes((5000).to_bytes(4) + b"\x91" * 5000)
    assert records.claim(NAME, anyone) is None
    path.write_bytes(content)
    found = records.claim(NAME, anyone)
    assert found is not None
    request = GenerateRequest("r", [1], SamplingParams(n=1, max_tokens=9), [])
    assert found.begun(request) is None  # its only choice has ended


class _Killed(Exception):
    pass


@pytest.mark.parametrize("is_cut", [False, True], ids=["between deliveries", "before a charge"])
@pytest.mark.parametrize("budget", [0, 12, 17, 21, 24])
def test_tokens_that_come_again_are_counted_once(
    records: StreamRecords, tmp_path: Path, budget: int, is_cut: bool
) -> None:
    """A process is killed after any number of deliveries, with any number of them read: the next one is given what was not read again.
    The prompt has 10 tokens, the two choices 11: as much is counted, or the budget, and as much is handed to the reader. `is_cut`: it is killed
    in the next delivery, when it has written down what it is about to charge. Its row is claimed by the next one."""
    steps = [[0, 0], [1], [0, 1, 1], [0], [1, 1], [0, 0]]  # the choices that get a token
    for killed_after in range(len(steps) + 1):
        for num_read in range(killed_after + 1):
            folder = tmp_path / f"{killed_after}-{num_read}"
            folder.mkdir()
            ledger = UsageLedger(folder / "ledger")
            account = ledger.accounts({b"k" * 16: KeySettings(budget_tokens=budget)})[b"k" * 16]
            records.open(folder)
            record = records.begin(NAME, HEAD)
            handed = 0
            for attempt in range(2):
                assert record is not None
                params = SamplingParams(n=2, max_tokens=40, seed=1)
                whole = GenerateRequest("r", [1] * 10, params, [], owner=b"o")
                streams, left = Streams(), record.begun(whole)
                assert left is not None
                streams.accounts = {b"o": account}
                streams.open(left)
                known = record.num_known(10)
                charged = record.num_charged(account)
                written_down = record.note_charge

                def die(charge: Charge, write: Callable[[Charge], None] = written_down) -> None:
                    write(charge)
                    raise _Killed

                streams.resume_charges("r", charged, known, record.note_charge)
                first = 0 if attempt == 0 else num_read
                for at in range(first, killed_after if attempt == 0 else len(steps)):
                    before = len(streams._streams["r"].deltas)
                    streams.deliver([TokenDelta("r", index, [5]) for index in steps[at]])
                    given = streams._streams["r"].deltas[before:]
                    if attempt == 1 or at < num_read:
                        record.write(given)
                        handed += sum(len(delta.token_ids) for delta in given)
                if attempt == 0 and is_cut and killed_after < len(steps):
                    streams._streams["r"].note_charge = die
                    with contextlib.suppress(_Killed):
                        streams.deliver([TokenDelta("r", index, [5]) for index in steps[killed_after]])
                record.release()
                if attempt == 0:
                    ledger.close()
                    ledger = UsageLedger(folder / "ledger")
                    account = ledger.accounts({b"k" * 16: KeySettings(budget_tokens=budget)})[b"k" * 16]
                    streams.accounts = {b"o": account}
                record = records.claim(NAME, anyone)
                if attempt == 0 and record is not None and record.begun(whole) is None:
                    break  # the budget has ended both choices, and that was read
            used = account.used()
            expected = min(21, budget or 21)
            assert used.prompt_tokens + used.output_tokens == expected, (killed_after, num_read)
            assert 10 + handed == expected
            ledger.close()
