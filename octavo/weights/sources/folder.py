"""A model folder in the Hugging Face layout: the files it must hold, and which of them are the weights."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.models import family_of

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_SHARD = re.compile(r"(?P<stem>.+)-\d+-of-(?P<total>\d+)\.safetensors")


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The safetensors files to read. `names`: the tensors to read from each file; None: all, the folder has no index."""

    paths: tuple[Path, ...]
    names: dict[Path, tuple[str, ...]] | None


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json. If it names no model_type, add the one that its architectures imply."""
    path = folder / CONFIG
    if not path.is_file():
        raise ConfigError(f"{folder} holds no {CONFIG}: pass a model folder in Hugging Face layout{_gguf_hint(folder)}")
    config = _read_json(path)
    family = family_of(config)
    if family is None:
        raise ConfigError(
            f'{path} names no "model_type" and no "architectures": it is not the configuration of a model'
        )
    return config | {"model_type": family}


def quantisation(folder: Path, config: dict[str, Any]) -> Any:
    """The quantization settings in config.json, or in a file beside it as older tools wrote them; None: not quantised."""
    if config.get("quantization_config"):
        return config["quantization_config"]
    for name, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        if (folder / name).is_file():
            return {"quant_method": method} | _read_json(folder / name)
    return None


def find_weights(folder: Path) -> WeightFiles:
    """Find the safetensors files to read. Raises ConfigError if there are none or one is missing."""
    if (folder / INDEX).is_file():
        return _from_index(folder)
    if (folder / SINGLE).is_file():
        return WeightFiles((folder / SINGLE,), None)
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file())
    # Adapters are not models, and consolidated files repeat the weights under other names.
    wanted = [path for path in found if not path.name.startswith(("adapter_model", "consolidated"))]
    if not wanted:
        raise ConfigError(_no_weights(folder, found))
    _require_all_shards(folder, wanted)
    return WeightFiles(tuple(wanted), None)


def _from_index(folder: Path) -> WeightFiles:
    index = folder / INDEX
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f'{index} is corrupt: it has no "weight_map"; fetch it again')
    names: dict[Path, list[str]] = {}
    for tensor, file_name in weight_map.items():
        if not isinstance(file_name, str) or Path(file_name).name != file_name:
            raise ConfigError(f"{index} is corrupt: it puts {tensor} into {file_name!r}; fetch it again")
        names.setdefault(folder / file_name, []).append(tensor)
    missing = sorted(path.name for path in names if not path.is_file())
    if missing:
        raise ConfigError(f"{folder} lacks {_listed(missing)}, named by {INDEX}: fetch the missing files")
    return WeightFiles(tuple(sorted(names)), {path: tuple(tensors) for path, tensors in names.items()})


def _require_all_shards(folder: Path, found: list[Path]) -> None:
    """Raise if a shard is missing. Without an index only the file names show it: ...-00001-of-00003.safetensors."""
    for path in found:
        if shard := _SHARD.fullmatch(path.name):
            total = int(shard["total"])
            mates = [mate for mate in found if (m := _SHARD.fullmatch(mate.name)) and m["stem"] == shard["stem"]]
            if len(mates) != total:
                raise ConfigError(f"{folder} holds {len(mates)} of the {total} files of its weights: fetch the others")


def _no_weights(folder: Path, unused: list[Path]) -> str:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        return (
            f"{folder} holds its weights only as {_listed(pickles)}, a pickle, which can run any code when it is opened: "
            "convert it to safetensors (transformers: model.save_pretrained)"
        )
    if unused:
        return f"{folder} holds only {_listed([path.name for path in unused])}: pass the folder of the whole model"
    return (
        f"{folder} holds no weights (*.safetensors): add them, or pass --load-format dummy for random ones"
        f"{_gguf_hint(folder)}"
    )


def _gguf_hint(folder: Path) -> str:
    files = sorted(folder.glob("*.gguf"))
    return f", or the .gguf file itself: {files[0]}" if files else ""


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8, or nested too deeply
        raise ConfigError(f"{path} is truncated or corrupt ({error}): fetch it again") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is corrupt: it holds no JSON object; fetch it again")
    return value
