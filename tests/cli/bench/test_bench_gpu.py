"""The GPU benchmarks, rehearsed on the CPU with a tiny model: the loads, the physical limit, and that every part runs.
No figure is compared with a clock."""

import dataclasses
import gzip
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import accuracy, growth, limits, sizes, trace, workloads
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.serve import as_flags
from benchmarks.gpu.subject import MODELS, config_of, model_of, spec_of
from benchmarks.gpu.targets import BANDWIDTH, FLOPS, TARGETS
from benchmarks.gpu.workloads import Item
from octavo import config
from octavo.cli.flags import config_from
from octavo.cli.main import build_parser
from octavo.spec import ModelSpec

ROOT = Path(__file__).resolve().parents[3]
CHIP = limits.Chip(BANDWIDTH, FLOPS)
QWEN = ModelSpec("", 28, 1024, 16, 8, 128, 3072, 151_936, 40_960)
LLAMA = ModelSpec("", 32, 4096, 32, 8, 128, 14_336, 128_256, 131_072)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    written = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 2000,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(written))
    return folder


def flags(model: Path) -> list[str]:
    small = ["--kv-cache-memory-bytes", "16M", "--cpu-threads", "1", "--device", "cpu"]
    return ["--model", str(model), "--scale", "0.02", *small]


def measure(model: Path, *extra: str) -> dict[str, Any]:
    file = model.parent / "result.json"
    assert main([*flags(model), "--result", str(file), *extra]) == 0
    return dict(json.loads(file.read_text()))


# ── the loads ───────────────────────────────────────────────────────────────────────────────────────

DIGESTS = {
    "single_stream": "e05cca0d605d64d8",
    "mixed": "390f12ac7e929c0a",
    "decode_heavy": "b342e57bb57093ba",
    "prefill_heavy": "93103fbb1d5a638c",
    "shared_prefix": "014d2e1b5f3994dd",
}


@pytest.mark.parametrize("name", workloads.NAMES)
def test_the_loads_are_those_that_the_targets_were_measured_with(name: str) -> None:
    said = json.dumps([[item.prompt, item.output_len] for item in workloads.make(name, 100)]).encode()
    assert hashlib.blake2b(said, digest_size=8).hexdigest() == DIGESTS[name]


def test_a_scaled_load_keeps_its_kind_and_a_small_vocabulary_folds_it() -> None:
    items = workloads.make("shared_prefix", 1, 0.02)
    assert (len(items), items[0].shared_len, len(items[0].prompt), items[0].output_len) == (5, 41, 42, 1)
    assert all(item.prompt[:41] == items[0].prompt[:41] for item in items)
    assert all(0 <= token < 500 for item in workloads.folded(items, 500) for token in item.prompt)
    assert workloads.folded(items, 30_000) == items


def test_every_target_has_a_model_folder_and_a_load() -> None:
    assert {path.parent.name for path in MODELS.glob("*/config.json")} >= set(TARGETS)
    for targets in TARGETS.values():
        assert set(targets) == set(workloads.NAMES)
        assert all(target.vllm < target.must < target.aim for target in targets.values())


# ── the limit ───────────────────────────────────────────────────────────────────────────────────────

# Decode steps as measured when the targets were set: rows, context, milliseconds, share of the limit.
MEASURED = [
    (QWEN, 1, 256, 1.32, 0.22),
    (QWEN, 64, 600, 2.32, 0.57),
    (QWEN, 256, 600, 5.79, 0.78),
    (QWEN, 512, 400, 7.93, 0.79),
    (LLAMA, 1, 256, 4.56, 0.77),
    (LLAMA, 64, 600, 6.10, 0.77),
    (LLAMA, 256, 600, 11.96, 0.80),
    (LLAMA, 512, 400, 18.88, 0.85),
]


@pytest.mark.parametrize(("spec", "batch", "context", "milliseconds", "share"), MEASURED)
def test_the_limit_of_a_decode_step(
    spec: ModelSpec, batch: int, context: int, milliseconds: float, share: float
) -> None:
    model = limits.Model.of(spec, spec.kv_bytes_per_token(2))
    least = limits.step_seconds(limits.decode_work(batch, batch * context), model, CHIP)
    assert least * 1000 / milliseconds == pytest.approx(share, abs=0.015)


def test_the_steps_of_a_load_compute_every_token_once() -> None:
    items = [Item([0] * length, output_len) for length, output_len in ((30, 4), (5, 9), (17, 1), (40, 3))]
    steps = list(limits.steps_of(items, max_rows=3, max_step_tokens=16))
    assert all(work.num_tokens <= 16 for work in steps)
    # The last sampled token of a request is never computed.
    ends = [len(item.prompt) + item.output_len - 1 for item in items]
    assert sum(work.num_tokens for work in steps) == sum(ends)
    assert sum(work.num_samples for work in steps) == sum(item.output_len for item in items)
    assert sum(work.attended for work in steps) == sum(end * (end + 1) // 2 for end in ends)


def test_a_shared_prefix_is_computed_once_and_can_be_read_once() -> None:
    items = [Item([0] * 36, 2, 32)] * 3
    first, second = limits.steps_of(items, 8, 64)
    assert first == limits.Work(36 + 4 + 4, 3, 3 * 36, 32, 36 * 37 // 2 + 2 * (33 + 34 + 35 + 36))
    assert second == limits.Work(3, 3, 3 * 37, 2 * 32, 3 * 37)


# Limits of a single stream as worked out by hand for the anchors: (model, tokens/s).
ALONE = {"qwen3-30b-a3b": 674, "gpt-oss-20b": 1137, "llama-3.1-8b-awq": 886, "llama-3.1-8b": 283}


@pytest.mark.parametrize("name", ALONE)
def test_limits_know_experts_and_bytes_as_held(name: str) -> None:
    options = {"model": str(MODELS / name)}
    model = model_of(options, spec_of(options["model"]).kv_bytes_per_token(2))
    steps = list(limits.steps_of(workloads.make("single_stream", 100), 512, 8192, model.window))
    tokens = sum(item.output_len for item in workloads.make("single_stream", 100))
    rate = tokens / limits.total_seconds(steps, model, limits.Chip(4.26e12, 665e12))
    assert rate == pytest.approx(ALONE[name], rel=0.01)


def test_experts_reached_are_those_of_random_routing() -> None:
    experts = limits.Experts(1, 128, 8, 1, 2.0)
    assert experts.reached(1) == pytest.approx(8) and experts.reached(10_000) == pytest.approx(128)
    torch.manual_seed(0)
    drawn = [torch.stack([torch.randperm(128)[:8] for _ in range(20)]).unique().numel() for _ in range(200)]
    assert experts.reached(20) == pytest.approx(sum(drawn) / len(drawn), rel=0.01)


def test_counted_parameters_are_those_of_the_model() -> None:
    qwen = sizes.count(config_of(str(MODELS / "qwen3-30b-a3b")), spec_of(str(MODELS / "qwen3-30b-a3b")), 2.0)
    assert qwen.experts == limits.Experts(48, 128, 8, 3 * 2048 * 768, 2.0)
    assert qwen.dense == 48 * 2048 * (2 * 4096 + 2 * 512)
    llama = sizes.count(config_of(str(MODELS / "llama-3.1-8b")), LLAMA, 2.0)
    assert llama.experts is None and llama.dense == limits.Model.of(LLAMA, 0).layer_parameters


@pytest.mark.parametrize(
    ("settings", "quantization", "product", "expert"),
    [
        (None, "auto", 2, 2), (None, "fp8", 1, 2), (None, "int4", 0.625, 2), (None, "int8", 1.0625, 2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "auto", 0.53125, 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "auto", 0.625, 2),
        ({"quant_method": "gptq", "bits": 8, "group_size": 32}, "auto", 1.0625, 2),
        ({"quant_method": "fp8"}, "auto", 1, 2), ({"quant_method": "mxfp4"}, "auto", 2, 17 / 32),
        ({"quant_method": "mxfp4"}, "none", 2, 2),
    ],
)  # fmt: skip
def test_bytes_of_a_weight(settings: Any, quantization: str, product: float, expert: float) -> None:
    config = {} if settings is None else {"quantization_config": settings}
    assert sizes.bytes_each(config, 2, quantization) == (product, expert)


def test_layers_with_a_window_read_no_more_than_it() -> None:
    items = [Item([0] * length, output_len) for length, output_len in ((30, 4), (5, 9))]
    steps = list(limits.steps_of(items, max_rows=3, max_step_tokens=16, window=8))
    ends = [len(item.prompt) + item.output_len - 1 for item in items]
    assert sum(work.windowed_attended for work in steps) == sum(min(p + 1, 8) for end in ends for p in range(end))
    assert (
        limits.decode_work(2, 100, 8).windowed_kv_tokens == 16 and limits.decode_work(2, 10, 8).windowed_kv_tokens == 10
    )
    model = limits.Model.of(LLAMA, 1.0, layer_parameters=0)
    half = dataclasses.replace(model, window=8, windowed_share=0.5)
    work = limits.Work(1, 0, 100, 0, 100, 8, 8)
    assert (
        limits.kv_tokens(work, model, shared_once=True) == 100 and limits.kv_tokens(work, half, shared_once=True) == 54
    )


def test_keys_and_values_alone_bound_the_mixed_load(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under any schedule, a request reads its contexts one step after another: counted here without a schedule."""
    file = tmp_path / "result.json"
    assert main(["--model", "llama-3.1-8b", "--limits", "--result", str(file), "--seeds", "100"]) == 0
    items = workloads.make("mixed", 100)
    reads = sum(sum(range(len(i.prompt) + 1, len(i.prompt) + i.output_len)) for i in items)
    rate = sum(i.output_len for i in items) / (reads * LLAMA.kv_bytes_per_token(2) / BANDWIDTH)
    bounds = json.loads(file.read_text())["bounds"]["mixed"]
    # Prompts in several chunks read a little more.
    assert rate * 0.99 < bounds["kv_only_rate"] <= rate
    assert bounds["limit_rate"] == bounds["unshared_limit_rate"] < bounds["kv_only_rate"]
    assert (
        "131,072 bytes of KV a token, 15.01 GB of weights read a step, 4.26 TB/s, 795 TFLOP/s"
        in capsys.readouterr().out
    )


# ── growth and trace ────────────────────────────────────────────────────────────────────────────────


def test_the_steady_window_leaves_out_prefill_settling_and_the_end() -> None:
    settling = growth.SETTLING_STEPS
    turns = [0, 3, 4, *[6] * 3, 5, *[6] * (settling + 10), 2, 0]
    window = growth.steady_window(turns, 6)
    assert window == range(7 + 1 + settling, len(turns) - 3)
    assert all(turns[i] == turns[i - 1] == turns[i + 1] == 6 for i in window)
    with pytest.raises(RuntimeError, match="too few"):
        growth.steady_window([6] * settling, 6)


def test_busy_time_is_the_union_of_what_ran() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 10.0, "dur": 4.0},
        {"ph": "X", "cat": "gpu_memcpy", "name": "copy", "ts": 11.0, "dur": 1.0},
        {"ph": "X", "cat": "kernel", "name": "b", "ts": 13.0, "dur": 3.0},
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 20.0, "dur": 2.0},
        {"ph": "X", "cat": "cpu_op", "name": "host", "ts": 0.0, "dur": 50.0},
        {"ph": "i", "cat": "kernel", "name": "mark", "ts": 1.0},
    ]
    figures = trace.judge(trace.read(json.dumps({"traceEvents": events}).encode()), num_steps=2)
    assert figures["busy_ms"] == 0.008 and figures["span_ms"] == 0.012
    assert figures["longest_gaps_us"] == [4.0] and figures["kernels_per_step"] == 2
    assert [(top["name"], top["us_per_step"]) for top in figures["top"]] == [("a", 3.0), ("b", 1.5), ("copy", 0.5)]


# ── everything, rehearsed ───────────────────────────────────────────────────────────────────────────

WITHOUT_HTTP = """
import sys
for name in ("fastapi", "starlette", "pydantic", "uvicorn", "httptools", "uvloop"):
    sys.modules[name] = None  # importing it raises
from benchmarks.gpu.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def test_workloads_growth_and_trace_share_an_engine_and_need_no_http(model: Path, tmp_path: Path) -> None:
    file, traced = tmp_path / "result.json", tmp_path / "trace.json.gz"
    parts = ["--workload", "all", "--growth", "--trace", str(traced), "--trace-steps", "10", "--runs", "2"]
    command = [sys.executable, "-c", WITHOUT_HTTP, *flags(model), *parts, "--max-num-seqs", "12", "--result", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(file.read_text())
    assert list(result["workloads"]) == list(workloads.NAMES)
    for name, figures in result["workloads"].items():
        assert figures["seeds"] == [100, 101] and len(figures["rates"]) == 2
        assert figures["steps"] == figures["ideal_steps"], name
        assert figures["target"] is None  # a rehearsal is not a measurement
        assert 0 < figures["share_of_limit"] < 1
        assert f"{name}: {figures['rates'][0]:,.0f}, " in done.stdout
    measured = {(point["batch"], round(point["context"])) for point in result["growth"]["points"]}
    assert {batch for batch, _ in measured} == {1, 3, 5, 10} and max(context for _, context in measured) > 600
    assert "batch 20, context 10: skipped, the engine has 12 rows (--max-num-seqs)" in done.stdout
    assert result["trace"]["num_steps"] == 10 and 0 < result["trace"]["busy_share"] <= 1
    assert json.loads(gzip.decompress(traced.read_bytes()))["traceEvents"]
    assert result["engine"]["max_num_seqs"] == 12


def test_traces_of_several_numbers_of_rows(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = measure(model, "--trace", "--trace-rows", "1,3", "--trace-steps", "4", "--max-num-seqs", "12")
    assert [result[f"trace_{rows}"]["batch"] for rows in (1, 3)] == [1, 3]
    assert "decode of 1 rows" in capsys.readouterr().out


@pytest.mark.parametrize("family", ["qwen3-30b-a3b", "gpt-oss-20b"])
def test_random_mixtures_route_as_balanced_models_do(family: str, tmp_path: Path) -> None:
    """The shape of a real one, smaller: what is random in it decides. With biases that are random, too, gpt-oss reached 15 %."""
    written = json.loads((MODELS / family / "config.json").read_text())
    sizes = {"hidden_size": 256, "head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 64, "moe_intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 8000}
    written |= sizes | {"layer_types": ["sliding_attention", "full_attention"] * 2}
    (tmp_path / "config.json").write_text(json.dumps(written))
    file = tmp_path / "result.json"
    options = ["--dtype", "float32", "--scale", "0.1", "--result", str(file)]
    assert main([*flags(tmp_path), *options, "--routing", "--workload", "decode_heavy"]) == 0
    found = json.loads(file.read_text())["routing"]
    steady = max(found, key=lambda figure: figure["calls"])
    assert steady["tokens"] > 8 and steady["reached"] > 0.9 * steady["uniform"]


def test_stages_of_a_run_are_parts_of_it(model: Path) -> None:
    found = measure(model, "--stages", "--seeds", "5,6", "--scale", "0.1")["stages"]
    assert list(found) == ["5", "6"]
    for its in found.values():
        whole, before, *parts = its["ms"]
        plan, launch, second, its_launch, two, step, garbage, piece = parts
        assert its["rate"] > 0 and min(its["ms"][:8]) >= 0 < piece
        assert before + plan + launch <= two <= whole and garbage <= whole and step * (its["steps"] - 2) < 2 * whole
        assert its["steps"] > 2 and second + its_launch < whole
    assert measure(model, "--stages", "--seeds", "5")["stages"]["5"]["steps"] == 1  # at a scale of 0.02


def test_cold_start(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (start,) = measure(model, "--cold-start", "--warm-starts", "0")["cold_start"]
    assert start["start"] == "no kernels"
    stages = start["seconds"]
    assert min(stages.values()) >= 0 and stages["torch"] > 0 and stages["first token"] > 0
    assert sum(stages.values()) - stages["decode"] == pytest.approx(start["to_first_token"], abs=0.01)
    assert "vLLM: about 105 s" in capsys.readouterr().out


def test_serve(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = measure(model, "--serve", "--runs", "1")["serve"]
    load = figures["load"]
    assert load == {"num_streams": 5, "num_requests": 20, "input_len": 3, "output_len": 5}
    (served,) = figures["http"]
    assert served["num_errors"] == 0 and served["output_tokens"] == 20 * 5
    # A small model may finish before its first event is sent: then no answer has gaps between events.
    assert (served["itl_ms"] is not None) == (served["texts_per_token"] > 1 / 5)
    assert figures["ratio"] == pytest.approx(served["output_tokens_per_second"] / figures["offline_rates"][0], abs=1e-3)
    assert f"HTTP / offline = {figures['ratio']:.3f}" in capsys.readouterr().out


def test_options_become_the_servers_flags() -> None:
    options = {
        "model": "folder",
        "max_num_seqs": 8,
        "block_size": 32,
        "enable_prefix_caching": False,
        "dtype": "float32",
    }
    read = config_from(build_parser().parse_args(["serve", *as_flags(options)]), {})
    assert read.model.model == "folder" and read.model.dtype == "float32"
    assert (read.scheduler.max_num_seqs, read.cache.page_size) == (8, 32)
    assert read.cache.enable_prefix_caching is False


# ── accuracy ────────────────────────────────────────────────────────────────────────────────────────


def test_divergence_and_agreement() -> None:
    reference = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0]])
    same = accuracy.compare(reference, reference + 5, torch.tensor([2, 0]))  # a constant changes no distribution
    assert same["kl_max"] == pytest.approx(0, abs=1e-12) and same["same_first_choice"] == 1
    other = torch.tensor([[0.0, 1.0, 2.0], [0.0, 3.0, 0.0]])
    figures = accuracy.compare(reference, other, torch.tensor([2, 0]))
    p, q = reference[1].softmax(0), other[1].softmax(0)
    divergence = float((p * (p / q).log()).sum())
    assert figures["kl_max"] == pytest.approx(divergence, rel=1e-5)
    assert figures["kl_mean"] == pytest.approx(divergence / 2, rel=1e-5)
    assert figures["same_first_choice"] == 0.5
    assert figures["nll_change"] == pytest.approx(3 / 2, rel=1e-5)


def test_accuracy_is_reported_of_what_changed_and_of_nothing_else(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variants = {"float32": {"dtype": "float32"}, "seed": {"seed": 7}, "same": {"dtype": "bfloat16"}, "new": {"x": 1}}
    monkeypatch.setattr(accuracy, "VARIANTS", variants)
    file = model.parent / "accuracy.json"
    assert main([*flags(model), "--accuracy-fp8", "--windows", "2", "--result", str(file)]) == 1
    figures = json.loads(file.read_text())["accuracy"]
    assert list(figures) == ["float32"]
    assert 0 < figures["float32"]["kl_mean"] < 1e-3 and figures["float32"]["same_first_choice"] > 0.8
    printed = capsys.readouterr().out
    assert "seed: failed, not one logit differs: the option has no effect here" in printed
    assert "new: left out, this Octavo has no option x" in printed and "same" not in printed.replace("same first", "")
    assert "16 next tokens of 2 windows" in printed


def test_the_variants_are_options_of_this_octavo() -> None:
    for changes in accuracy.VARIANTS.values():
        config.replace(config.Config(), **changes)


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "qwen3-0.6b"]) == 2
    assert capsys.readouterr().err.startswith("benchmarks.gpu: error: nothing to measure: give --workload all")
    assert main(["--growth"]) == 2
    assert (
        "--model is missing: give one of gpt-oss-20b, llama-3.1-8b, llama-3.1-8b-awq, qwen3-0.6b, qwen3-30b-a3b, or a folder"
        in capsys.readouterr().err
    )
    with pytest.raises(SystemExit):
        main(["--workload", "mixd"])
    assert "'mixd' is not one of" in capsys.readouterr().err
