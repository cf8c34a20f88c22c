"""What `octavo plan --measure` finds outside the engine."""

import asyncio
import json
import random
import signal
from itertools import pairwise

import msgspec

from octavo.cli.bench.sending import RequestResult
from octavo.cli.main import main
from octavo.cli.planning import measure as measure_module
from octavo.cli.planning.measure import Asked, Exercised, Load, exercise, front_of, measure
from octavo.plan.machine import FORMAT, MachineCosts, read_costs, write_costs
from octavo.plan.model_shape import read_shape
from octavo.plan.recorded import Measured
from octavo.plan.settings import Front
from octavo.plan.speed import Speed
from octavo.plan.step_model import StepModel
from octavo.recording.format import read
from tests.cli.bench import test_bench_serve
from tests.cli.bench.test_bench_serve import running
from tests.recording.recorded import Recorded
from tests.schedule.workload import Workload


def measured_of(folder, seed):
    run = Recorded(Workload(seed, has_limit=True), folder, False, aborts=False)
    run.run()
    run.loop.close()
    return Measured(read(folder))


def test_each_request_is_compared_with_its_own_way_through_the_engine(tmp_path):
    """Requests wait for each other in the engine, so medians of what clients and engines saw would not differ by the way between them."""
    dice = random.Random(1)
    checked = 0
    for seed in range(8):
        folder = tmp_path / str(seed)
        folder.mkdir()
        measured = measured_of(folder, seed)
        asked = []
        for name, passage in measured.passages.items():
            if passage.first == float("inf"):  # vectors, and beams that ended without a token
                continue
            length = dice.choice([8, 64, 128, 400, 1000, 3000])
            started = passage.arrived - 0.002 - 1e-6 * length * (length > 128)
            result = RequestResult(started, passage.first + 0.003, passage.ended + 0.001, response_id=name)
            asked.append(Asked(length, result))
        lengths = {each.prompt_len for each in asked}
        # One that the recording does not have says nothing.
        front = front_of(
            Exercised([*asked, Asked(8, RequestResult(0.0, 9.0, 9.0, response_id="another"))], [], []), [measured]
        )
        if min(lengths) <= 128 and max(lengths) > 128:
            checked += 1
            assert abs(front.seconds - 0.002) < 1e-6 and abs(front.token_seconds - 1e-6) < 1e-8
            assert abs(front.first_seconds - 0.003) < 1e-6 and abs(front.last_seconds - 0.001) < 1e-6
    assert checked > 3


def test_without_a_request_that_was_seen_twice_nothing_is_known(tmp_path):
    measured = measured_of(tmp_path, 1)
    other = [Asked(8, RequestResult(0.0, 9.0, 9.0, response_id="another"))]
    assert front_of(Exercised(other, other, []), [measured]) == Front()


async def test_requests_alone_have_answers_of_sixteen_tokens_or_more(monkeypatch):
    """The first steps after a prompt take longer than those that follow: in answers of two tokens there are no others."""
    monkeypatch.setattr(test_bench_serve, "FIRST", 0.0)
    monkeypatch.setattr(test_bench_serve, "GAP", 0.0)
    async with running() as (url, scripted):
        load = Load(url, "scripted", 1000, "")
        alone, _, probes = await exercise(load, max_rows=2, max_len=300, seconds=0.0)
        await load.close()
    assert [each.prompt_len for each in probes] == 5 * [24, 150, 64, 150], "after each section"
    assert {each.prompt_len for each in alone} == {8, 16, 24, 32, 48, 64, 96, 128, 192, 256}
    assert all(
        each.result.output_tokens >= 16 and len(each.result.gaps) == each.result.output_tokens - 1 for each in alone
    )
    assert all(body["return_token_ids"] for body in scripted.bodies) and scripted.open_peak == 2


def test_jitter_is_what_clients_see_of_steps_that_take_the_same_time(tmp_path):
    """Every fourth token comes 2 ms late, with the next one right behind it."""
    asked, measured = [], []
    for seed in range(40):
        folder = tmp_path / str(seed)
        folder.mkdir()
        one = measured_of(folder, seed)
        one.token_times = {f"{seed}-{name}": times for name, times in one.token_times.items()}
        one.token_rows = {f"{seed}-{name}": rows for name, rows in one.token_rows.items()}
        one.passages = {f"{seed}-{name}": passage for name, passage in one.passages.items()}
        measured.append(one)
        for name, times in one.token_times.items():
            late = [time + 0.002 * (at % 4 == 2) for at, time in enumerate(times)]
            gaps = [after - before for before, after in pairwise(late)]
            asked.append(Asked(8, RequestResult(0.0, 9.0, 9.0, gaps=gaps, response_id=name)))
    assert sum(len(each.result.gaps) for each in asked) > 500
    kinds = front_of(Exercised(asked, asked, []), measured).jitter
    assert {kind.with_prompt for kind in kinds} == {False, True} and len({kind.rows for kind in kinds}) > 1
    for kind in kinds:
        jitter = kind.seconds
        assert abs(sum(jitter)) < 1e-6 and max(jitter) < 0.003 and min(jitter) > -0.003
        assert all(0.05 < sum(sign * each > 0.0012 for each in jitter) / len(jitter) < 0.4 for sign in (-1, 1))
    assert front_of(Exercised(asked, asked[:9], []), measured).jitter == [], "a few times say nothing"


async def test_servers_that_are_measured_at_once_begin_with_different_steps(monkeypatch):
    monkeypatch.setattr(test_bench_serve, "FIRST", 0.0)
    monkeypatch.setattr(test_bench_serve, "GAP", 0.0)
    sent = []
    for first in (0, 2):
        async with running() as (url, scripted):
            load = Load(url, "scripted", 1000, "")
            await exercise(load, max_rows=2, max_len=300, seconds=0.0, first=first)
            await load.close()
            sent.append([len(body["prompt"]) for body in scripted.bodies])
    assert sent[0][0] == 8 and sent[1][0] == 236, "rows with short contexts, and with long ones"
    assert sorted(sent[0]) == sorted(sent[1])


async def test_a_mixed_load_has_prompts_of_many_lengths(monkeypatch):
    monkeypatch.setattr(test_bench_serve, "FIRST", 0.0)
    monkeypatch.setattr(test_bench_serve, "GAP", 0.0)
    async with running() as (url, scripted):
        load = Load(url, "scripted", 1000, "")
        alone, mixed, _ = await exercise(load, max_rows=4, max_len=2048, seconds=2.0)
        await load.close()
    lengths = {each.prompt_len for each in mixed}
    assert len(lengths - {each.prompt_len for each in alone}) > 5 and max(lengths) <= 512 + 256
    assert len(mixed) < len(scripted.bodies) and scripted.open_peak >= 4


async def test_a_check_is_for_the_speed_that_the_server_has_now(monkeypatch, tmp_path, capsys):
    """A server that takes twice as long for all as when it was measured, and has never seen a prompt."""
    monkeypatch.setattr(test_bench_serve, "FIRST", 0.03)
    monkeypatch.setattr(test_bench_serve, "GAP", 0.02)
    monkeypatch.setattr(measure_module, "_PROBE_ROUNDS", 1)
    step = StepModel([1, 2, 400], [0.01, 0.0100001, 0.03], 0.0, 0.0, 0.0)
    costs = MachineCosts(
        FORMAT, "2026-01-01", "1", "a machine", True, read_shape(""), 10**8, 10**6, 16, 1000, 4096, 8, 512, 0, step, Front(), 5.0, 10, 0.01, 0.05,
    )  # fmt: skip
    load = ["--rate", "6", "--seconds", "1", "--input-len", "40", "--output-len", "9", "--length-spread", "0"]
    found = []
    async with running() as (url, scripted):
        for measured in (None, Speed(), Speed(2.0, 2.0)):
            write_costs(tmp_path / "costs", msgspec.structs.replace(costs, speed=measured))
            command = ["plan", "--costs", str(tmp_path / "costs"), *load, "--check", url, "--json"]
            assert await asyncio.to_thread(main, command) == 0
            found.append(json.loads(capsys.readouterr().out))
        prompts = [tuple(body["prompt"]) for body in scripted.bodies if len(body["prompt"]) != 32]  # without warm-ups
    unknown, twice, same = ({row["name"]: row for row in each["rows"]} for each in found)
    assert len(prompts) == len(set(prompts)) == 3 * found[0]["requests"] + 2 * 8
    assert found[0]["speed"] == {"prompts": 1.0, "rows": 1.0}
    assert found[1]["speed"]["rows"] > 1.7 and abs(found[2]["speed"]["rows"] / found[1]["speed"]["rows"] - 0.5) < 0.1
    name = "per token, mean, s"
    assert abs(unknown[name]["off"]) > 0.35 and abs(twice[name]["off"]) < 0.15 and abs(same[name]["off"]) > 0.35


def test_servers_that_share_a_machine_are_measured_at_once(tmp_path):
    model = tmp_path / "a-model"
    model.mkdir()
    shape = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 256,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(shape))
    flags = ["--load-format", "dummy", "--max-num-seqs", "2", "--max-model-len", "128", "--cpu-threads", "1"]
    before = signal.getsignal(signal.SIGTERM)
    try:
        one, two = (measure(str(model), flags, tmp_path / "costs.json", 0.0, count) for count in (1, 2))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert read_costs(tmp_path / "costs.json") == two and (one.num_servers, two.num_servers) == (1, 2)
    # Stretches in which others used the machine are left out.
    assert one.speed is not None and two.speed is None
    assert one.num_steps > 0 and (two.num_steps > 1.5 * one.num_steps or one.disturbed or two.disturbed)
    assert two.front.seconds > 0 and two.front.first_seconds > 0 and two.max_num_seqs == 2
    # A CPU waits for steps with fewer than six rows before it makes the next plan.
    assert one.depth == one.overlap_rows == 0
