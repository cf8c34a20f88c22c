"""Writes a GGUF file as a folder in Hugging Face's layout, in float32, for peers that read nothing else.
Only byte-level vocabularies can be written as a tokenizer.json from the file's contents.

python -m benchmarks.cpu.hf_folder FILE FOLDER"""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from tokenizers import decoders

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.text.tokenize.gguf_vocab import (
    gguf_chat_templates,
    gguf_eos_ids,
    gguf_template_variables,
    gguf_tokenizer,
    read_vocabulary,
)

_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def check(file: Path) -> str:
    """Return why this file cannot be written as a folder; empty if it can."""
    metadata = GGUFFile(file).metadata
    family = metadata.get("general.architecture")
    if family not in _CLASSES:
        return f"{family} files cannot be turned into a folder"
    if metadata.get("tokenizer.ggml.model") != "gpt2":
        return "only byte-level vocabularies can be written as a tokenizer.json"
    return ""


def write(file: Path, folder: Path) -> None:
    """Write the folder atomically: it appears whole or not at all."""
    part = folder.with_name(f"{folder.name}.{os.getpid()}.part")
    part.mkdir(parents=True)
    try:
        _write_tokenizer(file, part)
        _write_weights(file, part)
        os.replace(part, folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _write_weights(file: Path, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from octavo.weights.formats.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(file)
    tensors = checkpoint.tensors("cpu", torch.float32)
    save_file({name: tensor.contiguous() for name, tensor in tensors}, folder / "model.safetensors", {"format": "pt"})
    stops = gguf_eos_ids(read_vocabulary(GGUFFile(file).metadata))
    config: dict[str, Any] = checkpoint.config | {
        "architectures": [_CLASSES[checkpoint.config["model_type"]]],
        "hidden_act": "silu",
        "dtype": "float32",
        "eos_token_id": list(stops),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(stops)}))


def _write_tokenizer(file: Path, folder: Path) -> None:
    metadata = GGUFFile(file).metadata
    vocabulary = read_vocabulary(metadata)
    tokenizer: Any = gguf_tokenizer(vocabulary)
    library = tokenizer._tokenizer  # Octavo decodes by its own table and gives the library no decoder
    library.decoder = decoders.ByteLevel()
    library.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **gguf_template_variables(vocabulary)}
    if template := gguf_chat_templates(metadata).get("default"):
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2))


if __name__ == "__main__":
    try:
        write(Path(sys.argv[1]), Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(error.message)
