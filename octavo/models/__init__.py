"""④⑤ One file per family, named after config.json's model_type: the folder is the registry. Also the helpers with which
families read and check a configuration. Their errors do not name the file: the caller that opened it adds its name."""

import difflib
import importlib
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from octavo.errors import ConfigError

_LAYER_TYPES = ("full_attention", "sliding_attention")


def families() -> list[str]:
    """Every model_type that can be served."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg)


def family_of(config: Mapping[str, Any]) -> str | None:
    """The family of a config.json: its model_type or, without one, its first architecture. None: it has neither."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    if isinstance(model_type, str) and model_type:
        return model_type.replace("-", "_")  # Python file names have no dashes
    first = classes[0] if isinstance(classes, list) and classes else None
    return find_family(first) or first if isinstance(first, str) and first else None


def find_family(name: str) -> str | None:
    """The family of a GGUF architecture or a transformers class, which spell the same name differently."""
    normalised = _normalised(name)
    # Only config.json has a separate name for the text part of a multimodal model.
    return next((f for f in families() if normalised in (_normalised(f), _normalised(f.removesuffix("_text")))), None)


def _normalised(name: str) -> str:
    """The name without case, punctuation and class suffix: gpt_neox, gptneox and GPTNeoXForCausalLM become the same."""
    stem = re.sub(r"(?<=.)(For[A-Z]\w*|LMHeadModel|Model)$", "", name)
    return re.sub(r"[^a-z0-9]", "", stem.lower())


def check_family(name: str, said_by: str = "model_type", architectures: Any = None) -> None:
    """Raise ConfigError for an unknown name, with the most similar known one. Imports no family.
    `architectures`: config.json's, which may be more similar than the name."""
    known = families()
    if name in known:
        return
    others = [other for other in architectures if isinstance(other, str)] if isinstance(architectures, list) else []
    near = next((found for other in (name, *others) if (found := find_family(other) or _nearest(other))), None)
    hint = f"; did you mean {near}?" if near else ""
    said_by = "architecture" if name in others else said_by
    shown = repr(name) if len(name) <= 60 else repr(name[:60]) + "…"
    raise ConfigError(f"{said_by} {shown} is not supported; the supported ones are {', '.join(known)}{hint}")


def _nearest(name: str) -> str | None:
    by_normalised = {_normalised(family): family for family in families()}
    found = difflib.get_close_matches(_normalised(name), by_normalised, n=1)
    return by_normalised[found[0]] if found else None


def load_family(model_type: str) -> ModuleType:
    """Import the family's module: spec, Model, and the gguf_* functions. ConfigError for an unknown name."""
    check_family(model_type)
    return importlib.import_module(f"{__name__}.{model_type}")


def load_gguf_family(architecture: str) -> ModuleType:
    """Import a family by a GGUF file's general.architecture, which is spelt without punctuation."""
    family = find_family(architecture) or architecture
    check_family(family, "general.architecture")
    return load_family(family)


# ── numbers of a config.json or of a GGUF file's metadata; null counts as missing ───────────────────


_TOO_LARGE = 2**31  # for any size or count of a model: larger ones overflow in arithmetic


def positive(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """Read a size or a count. Without a default it must be present."""
    value = table.get(key, default)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(key, value, "a whole number above 0")
    if value >= _TOO_LARGE:
        raise _refusal(key, value, "a whole number of a size that a model can have")
    return value


def number(table: Mapping[str, Any], key: str, default: float) -> float:
    value = table.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= sys.float_info.max:
        raise _refusal(key, value, "a number, not below 0")
    return float(value)


def share(table: Mapping[str, Any], whole: str, parts: str) -> int:
    """Divide the value at key `whole` by the value at key `parts`; ConfigError if there is a remainder."""
    size, count = positive(table, whole), positive(table, parts)
    if size % count:
        raise ConfigError(f"{whole} is {size}, which is no multiple of {parts}, {count}: correct whichever is wrong")
    return size // count


def sliding_layers(config: Mapping[str, Any], num_layers: int, is_sliding: Callable[[int], bool]) -> list[bool]:
    """Which layers have a window: by `layer_types` if it is set, otherwise by the family's rule for a layer's index."""
    types = config.get("layer_types")
    if types is None:
        return [is_sliding(index) for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ConfigError(f"layer_types must be a list of {num_layers} names, each {' or '.join(_LAYER_TYPES)}")
    return [kind == "sliding_attention" for kind in types]


def require_causal(config: Mapping[str, Any]) -> None:
    """Refuse decoders that were retrained as encoders, which only is_causal shows."""
    if config.get("is_causal") is False:
        raise ConfigError("is_causal is false: a decoder with bidirectional attention is not supported")


def gguf_vocab_size(metadata: Mapping[str, Any], key: str) -> int:
    """The size of the vocabulary in the file or, without one, the value at `key`."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    if metadata.get(key) is None:
        raise ConfigError(f"tokenizer.ggml.tokens and {key} are missing: pass a GGUF file with its vocabulary")
    return positive(metadata, key)


def gguf_tensor_name(name: str, names: Mapping[str, str], layer: str, layer_names: Mapping[str, str]) -> str | None:
    """The HF name of a GGUF tensor: from `names`, or for layer n `layer`.n and a name from `layer_names`; else None."""
    if name in names:
        return names[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in layer_names:
        return None
    return f"{layer}.{match[1]}.{layer_names[match[2]]}.{match[3]}"


def _refusal(key: str, value: Any, wanted: str) -> ConfigError:
    if value is None:
        return ConfigError(f"{key} is missing: it must be {wanted}")
    if isinstance(value, list):
        return ConfigError(f"{key} is a list: models whose layers differ are not supported, it must be {wanted}")
    shown = repr(value)
    return ConfigError(f"{key} is {shown if len(shown) <= 40 else shown[:40] + '…'}: it must be {wanted}")
