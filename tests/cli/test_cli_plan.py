"""`octavo plan` as a person uses it: the page, JSON, the chart, and one line for every mistake."""

import json
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import msgspec
import pytest

from octavo.cli import main
from octavo.cli.bench.workload import trace_workload
from octavo.plan.trace import Trace, TraceRequest

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 8192, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def model(tmp_path: Path) -> str:
    folder = tmp_path / "a-model"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(CONFIG))
    return str(folder)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    try:
        code = main.main(["plan", *arguments])
    except SystemExit as stop:
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


LOAD = ("--rate", "4", "--seconds", "8", "--input-len", "200", "--output-len", "20")


def test_the_page_answers_every_question(capsys, model, tmp_path):
    chart = tmp_path / "load.svg"
    code, out, _ = run(
        capsys, model, "--chip", "l4", *LOAD, "--slo", "ttft_p99=1s,itl_p99=100ms", "--price", "0.8", "--chart", str(chart), "--search", "--fail-at", "2"
    )  # fmt: skip
    assert code == 0
    assert "1 × l4 for a-model: keeps ttft_p99 1.00 s, itl_p99 100 ms" in out and "not measured" in out
    for name in ("flags", "throughput", "first token", "inter-token", "prefix cache", "memory", "waits", "cost", "headroom", "more load", "other flags", "a failure"):  # fmt: skip
        assert f"\n{name}" in out, name
    assert out.count("+20%") == out.count("+50%") == out.count("+100%") == 1
    assert ET.fromstring(chart.read_text()).tag.endswith("svg")


def test_json_has_the_same_answer(capsys, model):
    code, out, _ = run(capsys, model, "--chip", "l4", *LOAD, "--json")
    found = json.loads(out)
    assert code == 0 and found["step_times"] == "estimated" and found["answer"]["replicas"] == 1
    assert found["answer"]["figures"]["num_done"] == found["trace"]["requests"]
    assert run(capsys, model, "--chip", "l4", *LOAD, "--json")[1] == out, "the same question has the same answer"


def test_a_larger_load_needs_more_replicas(capsys, model):
    load = ("--rate", "120", "--seconds", "0.7", "--input-len", "2000", "--output-len", "10", "--slo", "ttft_p99=900ms")
    code, out, _ = run(capsys, model, "--chip", "l4", *load, "--json")
    answer = json.loads(out)["answer"]
    assert code == 0 and answer["replicas"] > 2 and answer["headroom"] >= 1
    code, out, _ = run(capsys, model, "--chip", "l4", *load, "--json", "--data-parallel-size", "2")
    assert code == 1 and not json.loads(out)["answer"]["keeps_levels"]


def test_a_sample_answers_for_the_whole(capsys, model):
    code, out, _ = run(
        capsys,
        model,
        "--chip",
        "l4",
        "--rate",
        "40",
        "--seconds",
        "8",
        "--output-len",
        "8",
        "--sample",
        "0.1",
        "--json",
    )
    found = json.loads(out)
    assert code == 0 and found["trace"]["requests"] < 60 and found["answer"]["replicas"] % 10 == 0


def test_a_trace_file(capsys, model, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{at},{100 + at},{5}\n" for at in range(30))
    )
    code, out, _ = run(capsys, model, "--chip", "h100", "--trace", str(trace), "--requests", "20")
    assert code == 0 and "20 requests of trace.csv" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--chip", "l4"), "give the load once"),
        (("--chip", "l4", "--rate", "1", "--trace", "x"), "give the load once"),
        (LOAD, "say where it runs"),
        ((*LOAD, "--chip", "h1000"), "did you mean h100"),
        ((*LOAD, "--chip", "l4", "--slo", "ttft=1"), "--slo ttft=1: give NAME=TIME"),
        ((*LOAD, "--chip", "l4", "--slo", "ttft_p99=soon"), "'soon' is not a time"),
        ((*LOAD, "--chip", "l4", "--slo", "ttft_p99=1parsec"), "'1parsec' is not a time"),
        ((*LOAD, "--chip", "l4", "--slo", "ttft_p99=-1s"), "the time must be above 0"),
        ((*LOAD, "--chip", "l4", "--slo", "ttft_p99=1us"), "no number of replicas keeps it"),
        ((*LOAD, "--chip", "l4", "--tensor-parallel-size", "3"), "sizes that work"),
        ((*LOAD, "--chip", "l4", "--draft-tokens", "65"), "--draft-tokens must be from 0 to 64"),
        ((*LOAD, "--chip", "l4", "--draft-tokens", "2", "--acceptance", "2"), "--acceptance must be from 0 to 1"),
        ((*LOAD, "--chip", "l4", "--slo", "itl_p99=1ms"), "no number of replicas keeps it"),
        ((*LOAD, "--chip", "l4", "--rate", "0"), "must be above 0"),
        ((*LOAD, "--chip", "l4", "--length-spread", "9"), "from 0 to 3"),
        ((*LOAD, "--chip", "l4", "--input-len", "9000", "--length-spread", "0"), "no request of the trace fits"),
        ((*LOAD, "--chip", "l4", "--max-model-len", "100000"), "--max-model-len 100000 does not fit"),
        ((*LOAD, "--chip", "l4", "--sample", "2"), "at most 1"),
        (("--chip", "l4", "--trace", "/nowhere"), "--trace /nowhere: No such file"),
        ((*LOAD, "--costs", "/nowhere"), "--costs /nowhere: No such file"),
        (("--measure", "/nowhere/costs.json"), "does not exist"),
        ((*LOAD, "--chip", "l4", "extra"), "unexpected argument 'extra'"),
    ],
)
def test_mistakes_have_one_line(capsys, model, arguments, words):
    code, out, err = run(capsys, model, *arguments)
    assert code == 2 and words in err and err.count("\n") == 1 and not out


def test_a_malformed_line_is_named(capsys, model, tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("timestamp,input_tokens,output_tokens\n1,2,3\n2,many,3\n")
    code, _, err = run(capsys, model, "--chip", "l4", "--trace", str(trace))
    assert code == 2 and "line 3: the prompt length must be a whole number" in err


def test_a_model_that_is_too_large(capsys, tmp_path):
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_bytes(msgspec.json.encode(CONFIG | {"num_hidden_layers": 2000}))
    code, _, err = run(capsys, str(folder), "--chip", "l4", *LOAD)
    assert code == 2 and "does not fit" in err and "--tensor-parallel-size" in err


def test_record_wants_both_files(capsys):
    assert run(capsys, "record")[0] == 2
    code, _, err = run(capsys, "record", "/nowhere", "--output", "/tmp/x")
    assert code == 2 and "/nowhere" in err


def test_planning_does_not_load_torch(model):
    script = (
        "import sys; from octavo.cli import main; "
        f"code = main.main(['plan', {model!r}, '--chip', 'l4', '--rate', '1', '--seconds', '5', '--json']); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL, timeout=300)


def test_prompts_of_a_trace_share_what_it_says():
    requests = [TraceRequest(0.0, 100, 5, [1, 2]), TraceRequest(1.0, 90, 6, [1, 3]), TraceRequest(0.0, 20, 5, session=4), TraceRequest(2.0, 60, 7, session=4, after_previous=True)]  # fmt: skip
    load = trace_workload(Trace("t", requests, 32), 500, seed=1)
    first, second, third, fourth = load.prompts
    assert [len(prompt) for prompt in load.prompts] == [100, 90, 20, 60] and load.output_lens == [5, 6, 5, 7]
    assert first[:32] == second[:32] and first[32:64] != second[32:64] and fourth[:20] == third
    assert load.after == [-1, -1, -1, 2] and all(250 <= token < 500 for token in first)
