"""Random adapters on disk, as PEFT writes them, and the same merged into a model's weights."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.doubles import write_byte_tokenizer
from tests.small_llama import small_llama

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_model(folder: Path, max_len: int) -> dict[str, Tensor]:
    """Write a small Llama with a tokenizer of bytes. Returns its weights."""
    torch.manual_seed(3)
    small_llama(300, max_position_embeddings=max_len, bos_token_id=None, eos_token_id=None).save_pretrained(folder)
    write_byte_tokenizer(folder)
    return weights_of(folder)


def weights_of(model: Path) -> dict[str, Tensor]:
    return load_file(model / "model.safetensors")


def write_peft(
    folder: Path,
    weights: Mapping[str, Tensor],
    *,
    rank: int = 8,
    targets: tuple[str, ...] = ("q_proj", "v_proj"),
    alpha: float = 16.0,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 0.4,
    **config: Any,
) -> Path:
    """`weights`: the base's, for names and shapes. `size`: how much it changes."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for name, weight in weights.items():
        module = name.removesuffix(".weight")
        if module.rsplit(".", 1)[-1] not in targets:
            continue
        out_features, in_features = weight.shape
        down = torch.randn(rank, in_features, generator=generator) * (size / math.sqrt(in_features))
        up = torch.randn(out_features, rank, generator=generator) * (size / math.sqrt(rank))
        tensors[f"base_model.model.{module}.lora_A.weight"] = down.to(dtype)
        tensors[f"base_model.model.{module}.lora_B.weight"] = up.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(targets),
        "use_rslora": False,
        "use_dora": False,
        "bias": "none",
        "modules_to_save": None,
        "base_model_name_or_path": "tiny",
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merged(weights: Mapping[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """The base's weights with a PEFT folder's matrices added, by float64."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    found = {name: weight.clone() for name, weight in weights.items()}
    for name, down in tensors.items():
        if ".lora_A." not in name:
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        up, rank = tensors[name.replace("lora_A", "lora_B")], down.shape[0]
        scale = config["lora_alpha"] / (math.sqrt(rank) if config["use_rslora"] else rank)
        weight = f"{module}.weight"
        found[weight] = (found[weight].double() + scale * up.double() @ down.double()).to(found[weight].dtype)
    return found
