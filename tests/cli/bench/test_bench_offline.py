"""The benchmarks that run a model in this process, on a tiny one with random weights: their reported figures are consistent.
No figure is compared with a clock."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.cli import main

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bench(model: Path, kind: str, *extra: str) -> dict[str, Any]:
    file = model.parent / "result.json"
    flags = ["--load-format", "dummy", "--kv-cache-memory-bytes", "4M", "--cpu-threads", "1", "--device", "cpu"]
    assert main.main(["bench", kind, str(model), *flags, "--result", str(file), *extra]) == 0
    return dict(json.loads(file.read_text()))


def test_throughput_counts_tokens_pages_and_shared_prefixes(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lengths = ["--num-prompts", "5", "--input-len", "10", "--output-len", "6", "--shared-prefix", "32"]
    result = bench(model, "throughput", *lengths, "--max-num-seqs", "2", "--compare-sequential")
    figures = result["figures"]
    rate = figures["seconds"] and 5 * 6 / figures["seconds"]
    assert figures["output_tokens_per_second"] == pytest.approx(rate, rel=0.2)
    assert figures["total_tokens_per_second"] == pytest.approx(figures["output_tokens_per_second"] * 48 / 6, rel=0.01)
    # Two run at once: the first two start together and find nothing, the last three find the whole shared prefix.
    assert figures["pages"]["prefix_hit_tokens"] >= 3 * 32
    assert 0 < figures["pages"]["peak"] <= 2 * 3
    assert 0 <= figures["pages"]["waste_ratio"] < 16 / 48
    assert figures["ratio"] > 0 and figures["sequential"]["output_tokens_per_second"] > 0
    assert result["engine"]["model"] == "tiny" and result["engine"]["max_num_seqs"] == 2
    printed = capsys.readouterr().out
    assert "5 requests, 42 tokens in (32 shared), 6 out" in printed and "gain by batching" in printed


def test_a_second_run_does_not_measure_the_first_ones_cache(model: Path) -> None:
    result = bench(model, "throughput", "--num-prompts", "1", "--input-len", "48", "--output-len", "2")
    assert result["figures"]["pages"]["prefix_hit_tokens"] == 0  # the warm-up used the same prompt


def test_latency(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = bench(model, "latency", "--batch-size", "3", "--input-len", "8", "--output-len", "4", "--num-iters", "5")
    assert len(result["seconds"]) == 5
    assert result["latency_ms"]["p50"] == pytest.approx(sorted(result["seconds"])[2] * 1000, abs=0.001)
    assert "3 requests, 8 tokens in, 4 out, 5 times" in capsys.readouterr().out


def test_the_warm_up_fits_where_the_measured_requests_fit(model: Path) -> None:
    result = bench(model, "throughput", "--num-prompts", "1", "--input-len", "126", "--output-len", "2")
    assert result["figures"]["seconds"] > 0  # 128 tokens, the whole context


def test_lengths_that_cannot_fit_are_refused(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "bench",
        "latency",
        str(model),
        "--load-format",
        "dummy",
        "--kv-cache-memory-bytes",
        "4M",
        "--input-len",
        "200",
    ]
    assert main.main(argv) == 2
    line = "328 tokens per request do not fit the context of 128: lower --input-len or --output-len"
    assert capsys.readouterr().err == f"octavo: error: {line}\n"


def test_the_host_step_benchmark_runs() -> None:
    command = [sys.executable, "benchmarks/host_step.py", "--rows", "4", "--steps", "40", "--waiting", "0", "20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in done.stdout.splitlines()[3:]] == ["0", "20"]
