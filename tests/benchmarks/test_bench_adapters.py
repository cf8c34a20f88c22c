"""The GGUF adapters that llama.cpp is measured with hold what the PEFT folders hold; and the Zipf traffic over many adapters, with a tiny model."""

import argparse
import json
import os
from pathlib import Path

import torch

from benchmarks.adapters import gpu
from benchmarks.adapters.llama import Base, write_gguf
from octavo.models import llama
from octavo.weights.adapters.adapter_file import open_adapter
from tests.adapters import ALL, write_peft

HEAD = 8
SHAPES = {
    "self_attn.q_proj": (32, 24),
    "self_attn.k_proj": (16, 24),
    "self_attn.v_proj": (16, 24),
    "mlp.down_proj": (24, 40),
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "mlp.down_proj": "ffn_down",
}


def test_a_peft_folder_as_a_gguf_file(tmp_path: Path) -> None:
    weights = {
        f"model.layers.{layer}.{name}.weight": torch.zeros(shape)
        for layer in range(2)
        for name, shape in SHAPES.items()
    }
    folder = write_peft(tmp_path / "a", weights, rank=4, targets=ALL, alpha=10, use_rslora=True)
    names = {
        f"model.layers.{layer}.{name}": f"blk.{layer}.{short}.weight"
        for layer in range(2)
        for name, short in NAMES.items()
    }
    peft, gguf = open_adapter(folder), open_adapter(write_gguf(folder, Base(HEAD, names, {}), tmp_path / "a.gguf"))
    assert len(peft.pairs) == len(gguf.pairs) == 8
    config = {
        "model_type": "llama",
        "hidden_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD,
    }
    config |= {"num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 9, "rms_norm_eps": 1e-5}
    for module, pair in peft.pairs.items():
        short = names[module].removesuffix(".weight")
        assert gguf.pairs[short] == pair
        (down, up), (found_down, found_up) = peft.matrices(module), gguf.matrices(short)
        assert torch.equal(found_down, down.half().float())
        assert torch.equal(llama.gguf_fix(f"{module}.weight", found_up, config), up.half().float())


def test_zipf_traffic_over_adapters_that_share_files(tmp_path: Path) -> None:
    """Each of those that have a file in common is loaded by itself, and a tenth of the memory is enough to answer all."""
    parser = argparse.ArgumentParser()
    gpu.add_options(parser)
    flags = ["--tiny", "--parts", "zipf", "--registered", "20", "--files", "4", "--requests", "30", "--rounds", "2"]
    flags += ["--rows", "4", "--seconds", "0.001", "--result", str(tmp_path / "result.json")]
    assert gpu.run(parser.parse_args(flags)) == 0
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["loads_of_all"]["loads"] == 20 and found["loads_of_all"]["dropped"] == 0
    before, after = found["zipf"]["before"], found["zipf"]["after"]
    assert len(found["zipf"]["pairs"]) == 1, "the time was over"
    assert after["loads"] > before["loads"] and after["dropped"] > before["dropped"] and not after["failures"]


def test_registered_adapters_with_a_file_in_common_differ(tmp_path: Path) -> None:
    bench = gpu.Bench(argparse.Namespace(tiny=True, cpu=False), tmp_path)
    paths = [Path(one.path) for one in bench.adapters("some", 6, gpu.ATTENTION, num_files=2)]
    assert len({os.stat(path / "adapter_model.safetensors").st_ino for path in paths}) == 2
    scales = {next(iter(open_adapter(path).pairs.values())).scale for path in paths}
    assert len(scales) == 6
