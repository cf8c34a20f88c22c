"""A folder with nothing but a configuration is served with --load-format dummy: random weights and a made-up tokenizer."""

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.servers import Server

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2000,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32},
}


def test_a_bare_configuration_is_served(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    small = ["--device", "cpu", "--kv-cache-memory-bytes", "4M", "--cpu-threads", "1", "--api-processes", "1"]
    with Server(str(tmp_path), "--load-format", "dummy", *small) as server:
        assert any("has no tokenizer: words are made up" in line for line in server.lines)
        asked: dict[str, object] = {"prompt": "What is 2 + 2?", "max_tokens": 8, "ignore_eos": True}
        status, answer = server.post("/v1/completions", asked)
        assert status == 200 and len(json.loads(answer)["choices"][0]["text"].split()) >= 6
        status, answer = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello"}]})
        assert status == 200 and json.loads(answer)["choices"][0]["message"]["content"]


def test_without_the_flag_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    command = [sys.executable, "-m", "octavo.cli.main", "serve", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "holds no weights" in done.stderr
