"""`octavo doctor`: a healthy folder and a healthy GGUF file pass, and each kind of damage has its line and its exit code.
The test writes every model; the messages come from the code that serves it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM
from octavo.cli.doctor import determinism
from octavo.cli.doctor.ways import Setting, Way, together
from octavo.cli.main import main
from tests.adapters import ALL, weights_of, write_peft
from tests.doubles import CHAT_TEMPLATE, EOS, VOCAB_SIZE, _byte_characters, write_byte_tokenizer
from tests.engine.test_engine_embed import MEAN_POOLING, bert, write
from tests.weights.gguf_writer import Packed, write_gguf
from tests.worker.tiny import write_tiny_llama

NORM = "model.norm.weight"
TABLE = "model.embed_tokens.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    write_tiny_llama(path, vocab_size=VOCAB_SIZE)
    write_byte_tokenizer(path)
    return path


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Return the exit code, the report, and stderr."""
    code = main(["doctor", *arguments, "--json", "--device", "cpu"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def finding(report: dict[str, Any], check: str) -> tuple[str, str]:
    (found,) = [entry for entry in report["findings"] if entry["check"] == check]
    return found["status"], found["message"]


def test_a_healthy_folder_passes_and_its_memory_is_what_a_start_takes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, err = diagnose(capsys, str(folder), "--deep", "--max-num-seqs", "4")
    assert (code, report["serves"], err) == (0, True, "")
    assert {entry["status"] for entry in report["findings"]} == {"ok"}, report["findings"]
    with LLM(str(folder), device="cpu", max_num_seqs=4) as llm:
        started = llm.report
    memory = report["memory"]
    assert memory["page_bytes"] == started.page_bytes
    assert (memory["num_pages"], memory["max_model_len"]) == (started.num_pages, started.max_model_len)
    assert memory["weights_bytes"] == pytest.approx(started.weights_bytes, rel=0.25)  # kernels pad small weights
    many = [entry for entry in memory["kv_bytes"] if entry["sequences"] == 8]
    assert [(entry["tokens"], entry["bytes"]) for entry in many] == [(128, 8 * 8 * started.page_bytes)]


def test_adapters_are_checked_against_the_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = weights_of(folder)
    good = write_peft(tmp_path / "good", weights, rank=4, targets=ALL)
    code, report, _ = diagnose(capsys, str(folder), "--adapter", str(good))
    status, message = finding(report, "adapter")
    assert (code, status) == (0, "ok") and "changes 14 matrices" in message and "rank 4" in message
    wide = write_peft(tmp_path / "wide", {"model.layers.0.self_attn.q_proj.weight": torch.zeros(40, 32)})
    code, report, err = diagnose(capsys, str(folder), "--adapter", str(wide))
    status, message = finding(report, "adapter")
    assert (code, status) == (2, "failed") and "40 × 32, and this model's has 32 × 32" in message and message in err


def test_a_person_sees_marks_and_a_table(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"octavo doctor {folder}"
    assert any(line.startswith(" ✓ tensors ") for line in lines)
    assert any(line.startswith(" – numbers ") and "--deep" in line for line in lines)
    assert "1 sequence" in lines[-3] and "256 sequences" in lines[-3]
    assert lines[-2].split()[:2] == ["128", "tokens"]


def gguf_file(path: Path, folder: Path, **changes: Any) -> Path:
    """The folder's model as a GGUF file with a byte vocabulary, in F32."""
    config = json.loads((folder / "config.json").read_text())
    tokens = [*(_byte_characters()[byte] for byte in range(256)), "<|end|>", "ab"]
    metadata = {
        "general.architecture": "llama",
        "llama.embedding_length": config["hidden_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 1],
        "tokenizer.ggml.merges": ["a b"],
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    } | changes
    names = {TABLE: "token_embd.weight", NORM: "output_norm.weight", "lm_head.weight": "output.weight"}
    parts = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    names |= {
        f"model.layers.{layer}.{ours}.weight": f"blk.{layer}.{theirs}.weight"
        for layer in range(config["num_hidden_layers"])
        for ours, theirs in parts.items()
    }
    weights = load_file(folder / "model.safetensors")
    packed = [
        Packed(names[name], tuple(tensor.shape), "F32", tensor.numpy().tobytes()) for name, tensor in weights.items()
    ]
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, packed)


def test_a_healthy_gguf_file_passes_and_broken_ones_say_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = gguf_file(tmp_path / "model.gguf", folder)
    code, report, _ = diagnose(capsys, str(path), "--deep")
    assert code == 0 and {entry["status"] for entry in report["findings"]} == {"ok"}, report["findings"]

    path.write_bytes(path.read_bytes()[:-1000])
    code, report, err = diagnose(capsys, str(path))
    assert code == 2 and "truncated" in finding(report, "configuration")[1] and "truncated" in err
    assert finding(report, "memory")[0] == "skipped"

    code, report, _ = diagnose(capsys, str(gguf_file(path, folder, **{"general.architecture": "lama"})))
    assert code == 2 and "did you mean llama?" in finding(report, "configuration")[1]

    code, report, _ = diagnose(capsys, str(gguf_file(path, folder, **{"llama.embedding_length": 64})))
    assert code == 2 and "token_embd" not in finding(report, "tensors")[1]
    assert "has shape [258, 32], its config asks for [258, 64]" in finding(report, "tensors")[1]

    code, report, _ = diagnose(capsys, str(gguf_file(path, folder, **{"tokenizer.ggml.eos_token_id": None,
                                                                     "tokenizer.ggml.token_type": [1] * 258})))  # fmt: skip
    assert code == 0 and finding(report, "stop tokens")[0] == "warning"


def change_json(path: Path, **changes: Any) -> None:
    settings = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in settings.items() if value is not None}))


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def poison(folder: Path) -> None:
    weight = torch.ones(32)
    weight[3] = float("nan")
    change_tensors(folder, **{NORM: weight})


BROKEN: dict[str, tuple[Callable[[Path], None], str, str, str]] = {
    # damage to the folder → the check that finds it, its severity, the message
    "truncated weights": (truncate, "configuration", "failed", "truncated or corrupt"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "files", "failed", "holds no weights"),
    "missing tensor": (lambda f: change_tensors(f, **{NORM: None}), "tensors", "failed", f"lacks tensor {NORM}"),
    "unexpected tensor": (
        lambda f: change_tensors(f, **{"model.extra.weight": torch.ones(3)}), "tensors", "failed", "model.extra.weight"
    ),
    "wrong shape": (
        lambda f: change_tensors(f, **{NORM: torch.ones(31)}), "tensors", "failed", "has shape [31], its config asks for [32]"
    ),
    "NaN": (poison, "numbers", "failed", f"tensor {NORM} holds a NaN"),
    "wrong vocabulary size": (
        lambda f: change_json(f / "config.json", vocab_size=300), "tensors", "failed", "has shape [258, 32]"
    ),
    "tokenizer of another model": (
        lambda f: write_tiny_llama(f, vocab_size=161) and None, "tokenizer", "failed", "the model's vocabulary has 161"
    ),
    "tokenizer a little larger": (
        lambda f: write_tiny_llama(f, vocab_size=257) and None, "tokenizer", "warning", "ids from 257 on"
    ),
    "no tokenizer": (lambda f: (f / "tokenizer.json").unlink(), "tokenizer", "failed", "has no tokenizer.json"),
    "template that raises": (
        lambda f: write_byte_tokenizer(f, "{{ raise_exception('never') }}"), "chat template", "failed", "never"
    ),
    "template that is no Jinja": (
        lambda f: write_byte_tokenizer(f, "{% for %}"), "tokenizer", "failed", "is not valid Jinja"
    ),
    "template without system": (
        lambda f: write_byte_tokenizer(
            f, "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHAT_TEMPLATE
        ),
        "chat template", "warning", "does not accept a system message",
    ),
    "no template": (lambda f: write_byte_tokenizer(f, ""), "chat template", "warning", "completions only"),
    "no end of sequence": (
        lambda f: change_json(f / "tokenizer_config.json", eos_token=None), "stop tokens", "warning", "none"
    ),
    "end beyond the vocabulary": (
        lambda f: change_json(f / "config.json", eos_token_id=[EOS, 999]), "stop tokens", "warning", "999"
    ),
    "unknown architecture": (
        lambda f: change_json(f / "config.json", model_type="lama"), "files", "failed", "did you mean llama?"
    ),
    "impossible config": (
        lambda f: change_json(f / "config.json", num_attention_heads=5), "configuration", "failed", "num_attention_heads"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_each_way_to_be_broken_has_its_line(case: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change, check, status, words = BROKEN[case]
    change(folder)
    code, report, err = diagnose(capsys, str(folder), "--deep")
    assert finding(report, check)[0] == status, report["findings"]
    assert words in finding(report, check)[1]
    wrong = [entry for entry in report["findings"] if entry["status"] not in ("ok", "skipped")]
    assert wrong[0]["check"] == check, wrong
    assert len(wrong) == 1 or case == "tokenizer of another model", (
        wrong
    )  # its end-of-sequence id is also beyond the vocabulary
    if status == "failed":
        assert (code, report["serves"]) == (2, False)
        assert err.startswith(f"octavo: error: {check}: ") and words in err and err.count("\n") == 1
    else:
        assert (code, report["serves"], err) == (0, True, "")


def test_what_a_start_would_refuse_for_its_flags_is_refused_here_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, report, _ = diagnose(capsys, str(folder), "--max-model-len", "4k")
    assert code == 2 and "beyond the model's context of 128" in finding(report, "configuration")[1]
    code, report, _ = diagnose(capsys, str(folder), "--kv-cache-memory-bytes", "4096T")
    assert code == 2 and "--kv-cache-memory-bytes asks for" in finding(report, "memory")[1]
    code, report, _ = diagnose(capsys, str(folder / "nothing here"))
    assert code == 2 and finding(report, "files")[0] == "failed" and report["memory"] is None


def test_an_encoder_is_asked_how_it_pools_and_not_how_it_talks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write(bert(), tmp_path / "model", MEAN_POOLING)
    code, report, _ = diagnose(capsys, str(folder), "--deep")
    assert code == 0 and {entry["status"] for entry in report["findings"]} == {"ok"}, report["findings"]
    assert finding(report, "pooling")[1] == "by mean, normalised"
    assert "no KV pages" in finding(report, "memory")[1] and report["memory"]["kv_bytes"] == []
    assert not {"chat template", "stop tokens"} & {entry["check"] for entry in report["findings"]}
    (folder / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    code, report, _ = diagnose(capsys, str(folder))
    assert code == 0 and finding(report, "pooling")[0] == "warning"


# ── --determinism ───────────────────────────────────────────────────────────────────────────────────


def examine(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--determinism", "--json", "--device", "cpu", "--max-num-seqs", "16", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_a_cpu_gives_the_same_bytes_in_every_way(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, report = examine(capsys, str(folder), "--block-size", "4", "--kv-cache-memory-bytes", "16M")
    assert (code, report["same"]) == (0, True), report["ways"]
    assert report["fingerprint"]["deterministic"] == "yes"
    names = " ".join(way["way"] for way in report["ways"])
    for word in ("batches", "order", "chunks", "prefixes", "preempted", "swapped", "restart", "thread", "cores"):
        assert word in names
    (preempted,) = [way for way in report["ways"] if way["way"] == "preempted, computed again"]
    assert int(preempted["message"].split()[0]) > 0


def test_an_engine_that_computes_otherwise_is_found_out(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(asks: Any, _: Any) -> list[Setting]:
        return [Setting("other", [Way("rounded", together(asks))], {"quantization": "int8"})]

    monkeypatch.setattr(determinism, "settings", other)
    assert main(["doctor", str(folder), "--determinism", "--device", "cpu", "--kv-cache-memory-bytes", "16M"]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith(" ✗")]
    assert "rounded" in line and "request 0 (greedy" in line and "token" in line
    assert "1 of 6 ways differ" in lines[-1]


def test_what_cannot_be_examined_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(folder), "--determinism", "--deep"]) == 2
    assert "--deep and --determinism are different checks" in capsys.readouterr().err
