"""What `octavo plan --measure` finds outside the engine."""

import json
import random
import signal

from octavo.cli.bench.sending import RequestResult
from octavo.cli.planning.measure import Asked, Load, exercise, front_of, measure
from octavo.plan.machine import read_costs
from octavo.plan.recorded import Measured
from octavo.plan.settings import Front
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
        front = front_of([*asked, Asked(8, RequestResult(0.0, 9.0, 9.0, response_id="another"))], measured.passages)
        if min(lengths) <= 128 and max(lengths) > 128:
            checked += 1
            assert abs(front.seconds - 0.002) < 1e-6 and abs(front.token_seconds - 1e-6) < 1e-8
            assert abs(front.first_seconds - 0.003) < 1e-6 and abs(front.last_seconds - 0.001) < 1e-6
    assert checked > 3


def test_without_a_request_that_was_seen_twice_nothing_is_known(tmp_path):
    measured = measured_of(tmp_path, 1)
    assert front_of([Asked(8, RequestResult(0.0, 9.0, 9.0, response_id="another"))], measured.passages) == Front()


async def test_requests_alone_have_answers_of_sixteen_tokens_or_more(monkeypatch):
    """The first steps after a prompt take longer than those that follow: in answers of two tokens there are no others."""
    monkeypatch.setattr(test_bench_serve, "FIRST", 0.0)
    monkeypatch.setattr(test_bench_serve, "GAP", 0.0)
    async with running() as (url, scripted):
        load = Load(url, "scripted", 1000, "")
        alone = await exercise(load, max_rows=2, max_len=300, seconds=0.0)
        await load.close()
    assert {each.prompt_len for each in alone} == {8, 16, 24, 32, 48, 64, 96, 128, 192, 256}
    assert all(
        each.result.output_tokens >= 16 and len(each.result.gaps) == each.result.output_tokens - 1 for each in alone
    )
    assert all(body["return_token_ids"] for body in scripted.bodies) and scripted.open_peak == 2


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
    assert one.num_steps > 0 and (two.num_steps > 1.5 * one.num_steps or one.disturbed or two.disturbed)
    assert two.front.seconds > 0 and two.front.first_seconds > 0 and two.max_num_seqs == 2
