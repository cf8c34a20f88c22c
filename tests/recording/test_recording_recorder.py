"""A recording replays to the same plans, step by step: for any load, from any of its files, with and without tokens."""

import logging
import os
import random
import resource
import time
from hashlib import blake2b
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from octavo.cli.main import main
from octavo.config import Config, RecorderConfig, replace
from octavo.engine.build import start_engine
from octavo.engine.process import start_recorder
from octavo.errors import ConfigError
from octavo.ipc.launch import EngineLaunch
from octavo.messages import Abort, GenerateRequest, RepetitionDetectionParams, SamplingParams
from octavo.recording import format as recording_file
from octavo.recording import recorder as recorder_file
from octavo.recording.crash_files import MOST_KEPT, CrashFiles
from octavo.recording.format import (
    Arrived,
    Costed,
    Marked,
    Recording,
    State,
    Stepped,
    chunks_in,
    gap_chunk,
    read,
    stream_chunk,
)
from octavo.recording.recorder import RETRY_SECONDS, TICKS_PER_RECORD, Segments
from octavo.recording.ring import RecordingRing
from octavo.replay.recompute import Recomputation
from octavo.replay.replay import Replay, ReplayedPlan
from octavo.replay.simulate import SimulatedRun
from octavo.replay.what_if import ScheduleSettings, learn, pace_of
from octavo.sampling.grammar import masks, row_processes
from octavo.sampling.grammar.row_processes import GrammarLimits
from octavo.schedule.step_costs import Sample, StepCosts, StepShape
from tests.doubles import write_byte_tokenizer
from tests.recording.recorded import Recorded
from tests.schedule.workload import Workload
from tests.worker.tiny import write_tiny_llama

KINDS = [
    "has_windows",
    "has_beams",
    "has_grammars",
    "has_late",
    "has_responses",
    "has_limit",
    "has_drafts",
    "has_tenants",
]


def replayed(recording: Recording) -> Replay:
    replay = Replay(recording)
    for _ in replay.follow():
        pass
    return replay


def recorded_load(folder, seed: int = 1, with_tokens: bool = False, **options) -> Recorded:
    recorded = Recorded(Workload(seed, has_beams=True), folder, with_tokens, **options)
    recorded.run()
    recorded.loop.close()
    return recorded


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2**32),
    st.sets(st.sampled_from(KINDS)),
    st.booleans(),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([1, 1, 2, 4]),
)
def test_any_load_gives_the_same_plans_again(tmp_path_factory, seed, kinds, with_tokens, roll, num_stages):
    folder = tmp_path_factory.mktemp("recording")
    load = Workload(seed, num_stages=num_stages, **dict.fromkeys(kinds, True))
    recorded = Recorded(load, folder, with_tokens, roll)
    recorded.run()
    recorded.loop.close()
    replay = replayed(read(folder))
    assert replay.num_same == replay.num_steps == recorded.loop.scheduler.num_steps
    assert replay.scheduler.is_idle and replay.cache.pool.num_used == 0
    assert replay.scheduler.num_preemptions == recorded.loop.scheduler.num_preemptions
    # Also from every later file: each begins with a state.
    for segment in sorted(folder.glob("*.segment"))[1:]:
        replay = replayed(read(segment))
        assert replay.num_same == replay.num_steps


def test_what_steps_cost_is_an_input(tmp_path):
    """Costs are measured by a clock, so plans that depend on them can be made again only because they are on record."""
    recorded = Recorded(Workload(21, has_limit=True), tmp_path, False)
    recorded.load.arrivals = []
    loop, num_capped = recorded.loop, 0
    for number in range(400):
        recorded.recorder.is_due |= number % 150 == 149
        if len(loop.scheduler.running) < 3 and not len(loop.scheduler.waiting):
            params = SamplingParams(max_tokens=12, seed=0)
            loop.add(GenerateRequest(f"r{number}", [number] * 40, params, []))
        loop.step()
        num_capped += loop.scheduler._allowance is not None and loop.scheduler._allowance.capped is not None
    loop.close()
    recording = read(tmp_path)
    costed = [at for at, record in enumerate(recording.records) if isinstance(record, Costed)]
    assert len(costed) > 3 and num_capped > 20
    replay = replayed(recording)
    assert replay.num_same == replay.num_steps > 100
    for segment in sorted(tmp_path.glob("*.segment"))[1:]:
        assert read(segment).state.scheduler.costs is not None
    # Without one of them, or with others, plans differ.
    cheap = Costed(0, StepCosts(0.0, 0.0, 0.0, 0.0, 0.0))
    changed = [cheap if isinstance(record, Costed) else record for record in recording.records]
    replay = replayed(Recording(recording.state, changed, []))
    assert replay.num_same < replay.num_steps


def test_a_recording_of_before_masks_could_be_late_is_read(tmp_path):
    """Its outcomes and its requests lack the last entry."""
    recorded = Recorded(Workload(2, has_grammars=True), tmp_path, False, roll=0.2)
    recorded.run()
    recorded.loop.close()
    encode, decode, num_requests = msgspec.msgpack.encode, msgspec.msgpack.decode, 0
    for file in sorted(tmp_path.iterdir()):
        recording = read(file)
        records = []
        for record in recording.records:
            if isinstance(record, Stepped):
                plain = decode(encode(record))
                plain[3] = [outcome[:7] for outcome in plain[3]]
                record = decode(encode(plain), type=Stepped)
            records.append(record)
        state = decode(encode(recording.state))
        requests = state["scheduler"][7]
        state["scheduler"][7] = [request[:5] for request in requests]
        shortest = decode(encode(state), type=State)
        num_requests += len(shortest.scheduler.requests)
        assert all(request.late == (0, -1, 0) for request in shortest.scheduler.requests)
        # What comes after says whose turn it is, on which the plans depend.
        state["scheduler"][7] = [[*request[:5], (0, -1, 0), *request[6:]] for request in requests]
        older = decode(encode(state), type=State)
        replay = replayed(Recording(older, records, []))
        assert replay.num_same == replay.num_steps
    assert num_requests > 2


def test_a_changed_input_is_found(tmp_path):
    """A prompt that is one token longer makes the replay differ, for each request that had a row: the replay must be able to
    fail."""
    recorded_load(tmp_path, seed=22)
    recording = read(tmp_path)
    happenings = Replay(recording).follow()
    seated = {request.id for each in happenings if isinstance(each, ReplayedPlan) for request in each.admitted}
    found = set()
    for at, record in enumerate(recording.records):
        if isinstance(record, Arrived):
            longer = msgspec.structs.replace(record, prompt_len=record.prompt_len + 1)
            changed = [*recording.records[:at], longer, *recording.records[at + 1 :]]
            try:
                replay = replayed(Recording(recording.state, changed, []))
            except ConfigError:  # no scheduler would have accepted it
                found.add(record.id)
                continue
            found |= {record.id} if replay.num_same < replay.num_steps else set()
    assert found >= seated and len(seated) > 5


def test_files_roll_under_a_load_that_never_rests(tmp_path):
    """The oldest files are removed, the rest can be replayed, and the limit always holds."""
    limit = 40_000
    recorded = Recorded(Workload(3), tmp_path, False, limit=limit)
    recorded.load.arrivals = []
    params = SamplingParams(max_tokens=recorded.report.num_pages * recorded.report.page_size // 2, seed=0)
    sizes = []
    for number in range(12_000):
        if len(recorded.loop.scheduler.request_ids()) < 3:
            recorded.loop.add(GenerateRequest(f"r{number}", [1, 2, number % 3], params, []))
        recorded.loop.step()
        if number % 100 == 0:
            recorded.recorder._wake.set()
            while recorded.recorder._ring.tail < recorded.recorder._ring.head:
                time.sleep(0.0001)
            sizes.append(sum(file.stat().st_size for file in tmp_path.iterdir()))
    recorded.loop.close()
    assert max(sizes) <= limit and sizes[-1] > limit // 2
    recording = read(tmp_path)
    replay = replayed(recording)
    assert recording.state.scheduler.step > 0 and recording.state.scheduler.requests, "it began in the middle"
    assert replay.num_same == replay.num_steps > 100
    assert replay.scheduler.num_steps == recorded.loop.scheduler.num_steps, "and goes on to the end"


def test_a_torn_tail_is_reported_and_the_rest_is_replayed(tmp_path):
    recorded_load(tmp_path, seed=2)
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    total = len(read(tmp_path).records)
    last = list(chunks_in(whole))[-1]
    start = len(whole) - len(stream_chunk(last.content, last.position))
    half = last.content[: len(last.content) // 2]
    # Incomplete chunks, and a complete chunk that ends in the middle of a record.
    for torn in (whole[:-1], whole[:-100], whole[:start] + stream_chunk(half, last.position)):
        file.write_bytes(torn)
        recording = read(file)
        assert len(recording.records) < total and "not written completely" in recording.notes[0]
        replay = replayed(recording)
        assert replay.num_same == replay.num_steps
    assert replay.num_steps > 10


def test_a_full_disk_is_said_once_and_recording_begins_again(tmp_path, caplog):
    now = [0.0]
    recorded = Recorded(Workload(3), tmp_path, False)
    recorded.recorder.close()
    segments = Segments(tmp_path / "full", "1", 2**20, lambda: now[0])
    (tmp_path / "full").mkdir()
    recorded.recorder._segments = segments
    recorded.load.arrivals = []
    params = SamplingParams(max_tokens=recorded.report.num_pages * recorded.report.page_size // 2, seed=0)

    def turn(number: int) -> None:
        if not recorded.loop.has_work:
            recorded.loop.add(GenerateRequest(f"r{number}", [1, 2], params, []))
        recorded.loop.step()
        recorded.recorder._flush()

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
        recorded.recorder.is_due = True
        with caplog.at_level(logging.WARNING, "octavo.engine"):
            for number in range(300):
                turn(number)
                now[0] += RETRY_SECONDS / 50
        assert len(caplog.records) == 1, "said once, however often it is tried"
        assert "flight recorder pauses" in caplog.records[0].message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    now[0] += 2 * RETRY_SECONDS
    for number in range(300, 400):
        turn(number)
    recording = read(tmp_path / "full")
    replay = replayed(recording)
    assert replay.num_same == replay.num_steps >= 80
    assert replay.scheduler.num_steps > recorded.loop.scheduler.num_steps - TICKS_PER_RECORD


def test_a_state_that_is_too_large_is_said_once_and_tried_ever_less_often(tmp_path, caplog):
    now = [0.0]
    recorded = Recorded(Workload(3), tmp_path, True)
    recorded.recorder.close()
    (tmp_path / "small").mkdir()
    recorded.recorder._segments = Segments(tmp_path / "small", "1", 400_000, lambda: now[0])
    recorded.load.arrivals = []
    loop, recorder = recorded.loop, recorded.recorder

    def turn() -> bool:
        """Run one step. Return whether a state was taken."""
        if not loop.has_work:
            params = SamplingParams(max_tokens=8, seed=0)
            loop.add(GenerateRequest(f"r{loop.scheduler.num_steps}", [1, 2], params, []))
        was_due = recorder.is_due
        loop.step()
        recorder._flush()
        now[0] += RETRY_SECONDS / 4
        return was_due

    recorder.is_due = True
    assert turn() and not any(turn() for _ in range(30))
    many = [f"aside {number}" for number in range(500)]  # their grammar never becomes ready
    for name in many:
        loop.add(GenerateRequest(name, [1, 2] * 200, SamplingParams(max_tokens=1, seed=0, grammar="g"), []))
    recorder.is_due = True
    with caplog.at_level(logging.WARNING, "octavo.engine"):
        assert sum(turn() for _ in range(4 * 70)) == 6, "of 70 that there might have been"
    assert len(caplog.records) == 1 and "more than half of --record-bytes" in caplog.records[0].message
    recording = read(tmp_path / "small")
    assert replayed(recording).num_steps >= 30
    (note,) = recording.notes
    assert note.startswith("the rest could not be recorded: the engine's state takes"), note
    for name in many:
        loop.abort(Abort(name))
    assert any(turn() for _ in range(4 * 64)) and not any(turn() for _ in range(30)), "tried once more, all was well"
    recording = read(tmp_path / "small")
    assert recording.notes == ["some records could not be written: everything before the last gap is skipped"]
    replay = replayed(recording)
    assert replay.num_same == replay.num_steps and replay.scheduler.num_steps == loop.scheduler.num_steps
    # A file with only what followed says why, too.
    alone = tmp_path / "alone.octavo"
    alone.write_bytes(gap_chunk("the engine's state is too large", 5) + stream_chunk(b"", 9))
    with pytest.raises(ConfigError, match="holds no state to start from: the engine's state is too large"):
        read(alone)


def test_last_words_of_a_killed_engine_are_kept(tmp_path, monkeypatch, capfd):
    """Only the state has reached a file. The supervisor takes the rest from the shared ring, and the next engine, which resets
    the ring, need not wait until the file is written."""
    monkeypatch.setattr(recorder_file, "FLUSH_SECONDS", 1000)
    crash_files = CrashFiles(RecorderConfig(record_folder=str(tmp_path)))
    recorded = Recorded(
        Workload(13), crash_files.live_folder, False, ring=RecordingRing(crash_files._ring_fd), name="001"
    )
    while not [chunk for file in crash_files.live_folder.glob("*.segment") for chunk in chunks_in(file.read_bytes())]:
        pass
    recorded.run(most_turns=20)
    with crash_files._sealing:  # a slow disk
        crash_files.seal_in_background(1)
        ring = RecordingRing(crash_files._ring_fd)
        ring.reset()
        ring.put(b"another engine")
        assert not list(tmp_path.glob("crash-*"))
    crash_files.close(2)
    (path,) = tmp_path.iterdir()  # the running server's folder is removed at its end
    assert path.name.startswith("crash-") and path.suffix == ".octavo"
    assert f"the engine's recording is kept: octavo replay {path}" in capfd.readouterr().err
    replay = replayed(read(path))
    assert recorded.loop.scheduler.num_steps - TICKS_PER_RECORD < replay.num_steps == replay.num_same > 5
    recorded.loop.close()


def test_crash_files_do_not_pile_up_and_those_of_killed_servers_are_found(tmp_path, capfd):
    first = CrashFiles(RecorderConfig(record_folder=str(tmp_path)))
    for number in range(1, MOST_KEPT + 3):
        (first.live_folder / f"{number:03d}-000001.segment").write_bytes(b"x")
        first.seal_in_background(number)
        first._sealers[-1].join()
    assert len(list(tmp_path.glob("crash-*"))) == MOST_KEPT
    (first.live_folder / "009-000001.segment").write_bytes(b"the last")
    os.close(first._lock)  # as if all of its processes were killed
    second = CrashFiles(RecorderConfig(record_folder=str(tmp_path)))
    (left,) = (file for file in tmp_path.glob("crash-*") if file.read_bytes() == b"the last")
    assert f"octavo replay {left}" in capfd.readouterr().err
    second.close(1)
    assert not list(tmp_path.glob("live-*"))


def test_no_text_is_recorded_unless_asked_for(tmp_path):
    for with_tokens in (False, True):
        folder = tmp_path / str(with_tokens)
        folder.mkdir()
        recorded = Recorded(Workload(3), folder, with_tokens)
        recorded.load.arrivals = []
        params = SamplingParams(
            max_tokens=3, seed=0, stop=["a secret word"], bad_words=["unspeakable"], logit_bias={4242: 1.0},
            grammar="start: /buried/", repetition_detection=RepetitionDetectionParams(max_pattern_size=2, min_count=2),
        )  # fmt: skip
        recorded.loop.add(GenerateRequest("r", [4711, 4712, 4713], params, []))
        recorded.executor.preparing.popleft()(0)
        while recorded.loop.has_work:
            recorded.loop.step()
        recorded.loop.close()
        (arrived,) = (record for record in read(folder).records if isinstance(record, Arrived))
        assert arrived.prompt_ids == ([4711, 4712, 4713] if with_tokens else []) and arrived.prompt_len == 3
        data = b"".join(file.read_bytes() for file in folder.iterdir())
        for text in (b"secret", b"unspeakable", b"buried", msgspec.msgpack.encode(4242)):
            assert (text in data) is with_tokens, text
        replay = replayed(read(folder))
        assert replay.num_same == replay.num_steps


def test_a_grammar_is_named_once_and_not_kept_for_ever(tmp_path, monkeypatch):
    hashed: list[bytes] = []

    def counted(data: bytes, **options):
        hashed.append(data)
        return blake2b(data, **options)

    monkeypatch.setattr(recording_file, "blake2b", counted)
    monkeypatch.setattr(recording_file, "MAX_NAMED", 100)
    recorded = Recorded(Workload(3), tmp_path, False)
    for name in ("r", "s"):
        params = SamplingParams(max_tokens=3, seed=0, grammar="start: /" + name * 30 + "/")
        recorded.loop.add(GenerateRequest(name, [1, 2], params, []))
    for _ in range(5):
        recorded.recorder.take(recorded.loop.scheduler)
    recorded.loop.close()
    assert len(hashed) == 2, "however many states were taken"
    name_of, others = recorded.recorder._name, ["a" * 40, "b" * 40]
    names = [name_of(other) for other in others]
    assert len(hashed) == 4 and [name_of(other) for other in others] == names and len(hashed) == 4
    assert name_of(hashed[0].decode()) and len(hashed) == 5, "it had to make room"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
@example(111664527, True, True)  # a job that only forgets, while a request waits for its grammar
def test_other_settings_serve_the_same_requests(tmp_path_factory, seed, has_windows, with_tokens):
    """With any settings, every request that fits is served to its last token."""
    folder = tmp_path_factory.mktemp("recording")
    load = Workload(seed, has_windows=has_windows, has_beams=True, has_grammars=bool(seed % 2), has_late=seed % 4 == 1)
    recorded = Recorded(load, folder, with_tokens, aborts=False)
    recorded.run()
    recorded.loop.close()
    recording = read(folder)
    learned = learn(recording)
    truth = ScheduleSettings.of(recording)
    for changes in (
        [],
        ["max_num_seqs=4"],
        ["max_num_batched_tokens=3"],
        [f"num_pages={2 * truth.num_pages}"],
        ["max_inter_token_ms=0.01"],
    ):
        tally = SimulatedRun(learned, truth.changed(changes), pace_of(learned.samples)).run()
        assert tally.num_refused + tally.num_requests == len(learned.requests)
        if not tally.num_refused:
            assert tally.num_output == learned.tally.num_output, changes


def test_times_are_fitted():
    true = StepCosts(0.01, 0.001, 0.0001, 0.0, 0.0)
    shapes = [StepShape(rows, more, 0, 0) for rows in (1, 5, 9) for more in (0, 8, 90)]
    pace = pace_of([Sample(shape, true.seconds(shape)) for shape in shapes])
    assert msgspec.structs.astuple(pace) == pytest.approx(msgspec.structs.astuple(true), rel=1e-3)
    alike = StepShape(1, 0, 0, 0)  # no telling rows from steps
    assert pace_of([Sample(alike, 0.02), Sample(alike, 0.04)]).seconds(alike) == pytest.approx(0.03, rel=1e-3)
    assert pace_of([]) == StepCosts(0.0, 0.0, 0.0, 0.0, 0.0)


def test_the_command_tells_what_there_is(tmp_path, capsys):
    recorded = recorded_load(tmp_path, seed=16)
    steps = recorded.loop.scheduler.num_steps
    name = next(record.id for record in read(tmp_path).records if isinstance(record, Arrived))
    assert main(["replay", str(tmp_path), "--steps", "0:3"]) == 0
    printed = capsys.readouterr().out
    assert (
        f"identical, step by step: {steps} of {steps}" in printed
        and "step 3: " in printed
        and "step 4: " not in printed
    )
    assert main(["replay", str(tmp_path), "--request", name, "--what-if", "max-num-seqs=1"]) == 0
    printed = capsys.readouterr().out
    assert "arrived: " in printed and "max_num_seqs" in printed and "waits for rows" in printed
    assert main(["replay", str(tmp_path), "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out)["plans"] == {"steps": steps, "same": steps}


def test_mistakes_are_one_line(tmp_path, capsys):
    recorded_load(tmp_path, seed=16)
    (file,) = tmp_path.iterdir()
    other = tmp_path / "other"
    other.write_text("no recording")
    for arguments, words in (
        ([str(tmp_path / "missing")], "cannot be read"),
        ([str(other)], "not a recording of octavo serve"),
        ([str(file), "--steps", "a:b"], "--steps a:b"),
        ([str(file), "--what-if", "pages=3"], "NAME is one of max_num_seqs"),
        ([str(file), "--what-if", "num_pages=0"], "num_pages is a whole number of at least 1"),
        ([str(file), "--what-if", "scheduling_policy=lifo"], "one of fcfs, priority"),
        ([str(file), "--what-if", "fairness=on", "--what-if", "scheduling_policy=priority"], "leave priority out"),
        ([str(file), "--what-if", "max_inter_token_ms=soon"], "a number of milliseconds, auto or off"),
        ([str(file), "--what-if", "max_inter_token_ms=-1"], "a number of milliseconds, auto or off"),
        ([str(file), "--what-if", "max_inter_token_ms=nan"], "a number of milliseconds, auto or off"),
        ([str(file), "--request", "nobody"], "no such request"),
        ([str(file), "--model"], "--record-tokens"),
    ):
        assert main(["replay", *arguments]) == 2
        printed = capsys.readouterr().err
        assert words in printed and printed.count("\n") == 1, printed


def test_every_turn_and_every_state_is_there(tmp_path):
    recorded = recorded_load(tmp_path, seed=4, roll=0.2)
    recording = read(tmp_path)
    kinds = [type(record) for record in recording.records]
    assert kinds.count(Marked) == len(list(tmp_path.iterdir())) > 2
    assert sum(turned.digest != 0 for turned in recording.records if isinstance(turned, Stepped)) == (
        recorded.loop.scheduler.num_steps
    )


def test_a_grammar_that_nobody_waits_for_any_more_holds_up_nobody(tmp_path):
    recorded = Recorded(Workload(3), tmp_path, False)
    recorded.load.arrivals = []
    params = SamplingParams(max_tokens=3, seed=0, grammar="start: /a/")
    recorded.loop.add(GenerateRequest("r", [1, 2], params, []))
    recorded.loop.abort(Abort("r"))
    recorded.executor.preparing.popleft()(0)
    assert recorded.loop.has_work and recorded.loop.step() == [] and not recorded.loop.has_work
    recorded.loop.close()


def test_grammars_of_those_who_left_are_not_made_ready_before_those_of_who_waits(tmp_path):
    """A client that sends one schema after another and leaves delays no other request, and the waiting requests are replayed as
    they were."""
    recorded = Recorded(Workload(3), tmp_path, False)
    recorded.load.arrivals = []
    loop, executor = recorded.loop, recorded.executor

    def send(name: str, grammar: str) -> None:
        loop.add(GenerateRequest(name, [1, 2], SamplingParams(max_tokens=3, seed=0, grammar=grammar), []))

    for number in range(60):
        send(f"gone {number}", f"large {number}")
        send(f"stays {number}", f"small {number}") if number % 20 == 0 else None
        loop.abort(Abort(f"gone {number}"))
    recorded.recorder.take(loop.scheduler)  # a file that begins while some grammars are not even requested
    assert executor.grammars == ["large 0", "small 0"]
    while executor.preparing:
        executor.preparing.popleft()(0)
        while loop.has_work:
            loop.step()
    assert executor.grammars == ["large 0", "small 0", "small 20", "small 40"] and loop.scheduler.is_idle
    loop.close()
    names = {recorded.recorder._name(grammar) for grammar in executor.grammars}
    for path in (tmp_path, max(tmp_path.glob("*.segment"))):  # from the beginning, and from that file
        replay = replayed(read(path))
        assert replay.scheduler.is_idle and replay.num_same == replay.num_steps == loop.scheduler.num_steps > 0
        assert replay.scheduler.grammar_cache._ready.keys() == names and not replay.scheduler.grammar_cache._compiling


def test_the_model_gives_the_same_tokens_from_any_file_on(tmp_path):
    """The pages at the start of a file, those of running requests and cached prefixes, are computed again first. Drafts are made again from
    the tokens."""
    source = write_tiny_llama(tmp_path / "model")
    options = {"page_size": 4, "kv_cache_memory_bytes": 36 * 1024, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    options["speculative_config"] = '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'
    config = replace(Config(), record_tokens=True, max_model_len=96, **options)
    engine = start_engine(config, source, "tiny")
    (tmp_path / "recording").mkdir()
    order = EngineLaunch(
        config, str(source.path), source.kind, "tiny", "tiny", "", record_to=str(tmp_path / "recording")
    )
    recorder = start_recorder(order, engine)
    engine.loop.record(recorder)
    r = random.Random(3)
    stem = [r.randrange(160) for _ in range(30)]
    kinds = [
        {"temperature": 0.0},
        {"temperature": 0.9, "presence_penalty": 0.8},
        {"n": 2, "temperature": 1.2},
        {"use_beam_search": True, "n": 2},
    ]
    turn = 0
    for number in range(40):
        kept = r.randrange(30)
        prompt = stem[:kept] + [r.randrange(160) for _ in range(r.randrange(1, 12))]
        params = SamplingParams(seed=number, max_tokens=r.randrange(16, 36), **kinds[number % len(kinds)])
        engine.loop.add(GenerateRequest(f"r{number}", prompt, params, [5]))
        for _ in range(r.randrange(6)):
            recorder.is_due = turn % 40 == 30
            engine.loop.step()
            turn += 1
    while engine.loop.has_work:
        engine.loop.step()
    engine.loop.close()
    scheduler = engine.loop.scheduler
    assert scheduler.num_preemptions > 3 and scheduler.cache.hit_tokens > 200
    segments = sorted((tmp_path / "recording").iterdir())
    assert len(segments) > 2
    records = [record for segment in segments for record in read(segment).records if isinstance(record, Stepped)]
    assert sum(count for record in records for _, count in record.drafts) > 100
    assert sum(run - 1 for record in records for outcome in record.outcomes for run in outcome.runs) > 2
    for segment in segments:
        computation = Recomputation(read(segment))
        findings = computation.run()
        assert computation.replay.num_same == computation.replay.num_steps > 5
        assert findings.num_same == findings.num_tokens > 20, findings


def test_the_model_gives_the_same_tokens_where_masks_were_late(tmp_path, monkeypatch):
    """The recorded engine waits for no mask; the one that computes it again waits for most, and samples what the other did."""
    source = write_tiny_llama(tmp_path / "model", vocab_size=258)
    write_byte_tokenizer(tmp_path / "model")
    options = {"page_size": 4, "kv_cache_memory_bytes": 2**18, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    config = replace(Config(), record_tokens=True, max_model_len=96, **options)
    engine = start_engine(config, source, "tiny")
    (tmp_path / "recording").mkdir()
    order = EngineLaunch(
        config, str(source.path), source.kind, "tiny", "tiny", "", record_to=str(tmp_path / "recording")
    )
    recorder = start_recorder(order, engine)
    engine.loop.record(recorder)
    engine.loop.executor._runner.rows.sampling.grammars._limits = GrammarLimits(most_wait=0.0)
    engine.loop.executor._runner.rows.sampling.grammars._credit = 0.0
    words = '%llguidance {"no_forcing": true}\nstart: /[a-z]+ [0-9]+/'
    with monkeypatch.context() as hurry:
        hurry.setattr(masks, "_LEAST_WAIT", 0.0)
        hurry.setattr(masks, "_WAIT_ALONE", 0.0)
        for number in range(14):
            params = SamplingParams(seed=number, max_tokens=30, temperature=1.5, grammar=words if number % 4 else "")
            engine.loop.add(GenerateRequest(f"r{number}", [number + 1, 2, 3], params, [256]))
        turn = 0
        while engine.loop.has_work or not engine.loop.scheduler.is_idle:
            recorder.is_due = turn % 40 == 30
            engine.loop.step()
            turn += 1
    engine.loop.close()
    segments = sorted((tmp_path / "recording").iterdir())
    records = [record for segment in segments for record in read(segment).records if isinstance(record, Stepped)]
    assert len(segments) > 2 and sum(len(outcome.late) for record in records for outcome in record.outcomes) > 50
    for segment in (segments[0], segments[len(segments) // 2]):
        computation = Recomputation(read(segment))
        findings = computation.run()
        assert computation.replay.num_same == computation.replay.num_steps
        assert findings.num_same == findings.num_tokens, findings


def test_the_model_gives_the_same_tokens_where_masks_behind_drafts_are_late(tmp_path, monkeypatch):
    """The recorded engine has a mask behind every drafted token; the one that computes it again has none, and takes single steps."""
    source = write_tiny_llama(tmp_path / "model", vocab_size=258)
    write_byte_tokenizer(tmp_path / "model")
    options = {"page_size": 4, "kv_cache_memory_bytes": 2**18, "max_num_seqs": 8, "max_num_batched_tokens": 24}
    options["speculative_config"] = '{"method": "ngram", "prompt_lookup_min": 1, "adaptive": false}'
    config = replace(Config(), record_tokens=True, max_model_len=96, **options)
    engine = start_engine(config, source, "tiny")
    (tmp_path / "recording").mkdir()
    order = EngineLaunch(
        config, str(source.path), source.kind, "tiny", "tiny", "", record_to=str(tmp_path / "recording")
    )
    engine.loop.record(start_recorder(order, engine))
    grammar = '%llguidance {"no_forcing": true}\nstart: /([ab][cd]){20}/'
    for number in range(6):
        params = SamplingParams(seed=number, max_tokens=40, temperature=0.0, grammar=grammar if number % 3 else "")
        engine.loop.add(GenerateRequest(f"r{number}", [number + 1, 2, 3], params, [256]))
    with monkeypatch.context() as patience:
        patience.setattr(masks, "_LEAST_WAIT", 60.0)  # on a busy machine, too
        while engine.loop.has_work or not engine.loop.scheduler.is_idle:
            engine.loop.step()
    engine.loop.close()
    (segment,) = (tmp_path / "recording").iterdir()
    recording = read(segment)
    outcomes = [outcome for record in recording.records if isinstance(record, Stepped) for outcome in record.outcomes]
    assert sum(run - 1 for outcome in outcomes for run in outcome.runs) > 20
    monkeypatch.setattr(row_processes, "_NUM_AHEAD", 0)
    computation = Recomputation(recording)
    findings = computation.run()
    assert computation.replay.num_same == computation.replay.num_steps
    assert findings.num_same == findings.num_tokens == sum(len(outcome.tokens) for outcome in outcomes), findings


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_recording_of_before_there_were_turns_is_replayed(policy):
    """Its states and arrivals say nothing of responses: every request was one of its own, and all had one choice."""
    recording = read(Path(__file__).parent / "data" / f"before-turns-{policy}.octavo")
    assert recording.header.report.scheduling_policy == policy and not recording.notes
    assert any(request.place < 0 for request in recording.state.scheduler.requests)
    replay = replayed(recording)
    assert replay.num_same == replay.num_steps > 8 and replay.scheduler.is_idle
