"""④⑤ One file per family, named as config.json's model_type: the folder is the registry. With how families read numbers.
Knows nothing of any family but its file name, and of no file: whoever opened it adds its name to a refusal."""

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
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def family_of(config: Mapping[str, Any]) -> str | None:
    """What a config.json says that it is: model_type or, without one, the first of its architectures. None: neither."""
    model_type, classes = config.get("model_type"), config.get("architectures")
    if isinstance(model_type, str) and model_type:
        return model_type.replace("-", "_")  # no file of Python's has a dash in its name
    first = classes[0] if isinstance(classes, list) and classes else None
    return find_family(first) or first if isinstance(first, str) and first else None


def find_family(name: str) -> str | None:
    """The family that a GGUF file's architecture or a class of transformers belongs to: the same name, otherwise spelt."""
    plain = _plain(name)
    # The text part of a model that also sees has a name of its own in config.json, and no other elsewhere.
    return next((f for f in families() if plain in (_plain(f), _plain(f.removesuffix("_text")))), None)


def _plain(name: str) -> str:
    """Without case, punctuation and what a class is for: gpt_neox, gptneox and GPTNeoXForCausalLM are one."""
    stem = re.sub(r"(?<=.)(For[A-Z]\w*|LMHeadModel|Model)$", "", name)
    return re.sub(r"[^a-z0-9]", "", stem.lower())


def check_family(name: str, said_by: str = "model_type", architectures: Any = None) -> None:
    """An unknown name is a ConfigError, with the nearest of those that are known. Loads nothing.
    `architectures`: config.json's, which may be nearer than the name."""
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
    by_plain = {_plain(family): family for family in families()}
    found = difflib.get_close_matches(_plain(name), by_plain, n=1)
    return by_plain[found[0]] if found else None


def load_family(model_type: str) -> ModuleType:
    """The family's module: spec, Model, and the gguf_* functions. An unknown name is a ConfigError."""
    check_family(model_type)
    return importlib.import_module(f"{__name__}.{model_type}")


def load_gguf_family(architecture: str) -> ModuleType:
    """The same by a GGUF file's general.architecture, which is spelt without punctuation."""
    family = find_family(architecture) or architecture
    check_family(family, "general.architecture")
    return load_family(family)


# ── numbers of a config.json or of a GGUF file's metadata; null is as good as missing ───────────────


_TOO_LARGE = 2**31  # for any size or count of a model: beyond, arithmetic with it overflows


def positive(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size or a count. Without a default it must be there."""
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
    """What each part gets of the whole: both are keys, and nothing may be left over."""
    size, count = positive(table, whole), positive(table, parts)
    if size % count:
        raise ConfigError(f"{whole} is {size}, which is no multiple of {parts}, {count}: correct whichever is wrong")
    return size // count


def sliding_layers(config: Mapping[str, Any], num_layers: int, is_sliding: Callable[[int], bool]) -> list[bool]:
    """Which layers have a window: those that `layer_types` names, else the family's own choice by a layer's index."""
    types = config.get("layer_types")
    if types is None:
        return [is_sliding(index) for index in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or any(kind not in _LAYER_TYPES for kind in types):
        raise ConfigError(f"layer_types must be a list of {num_layers} names, each {' or '.join(_LAYER_TYPES)}")
    return [kind == "sliding_attention" for kind in types]


def require_causal(config: Mapping[str, Any]) -> None:
    """Of decoders: some were trained on to be encoders, and say so with one word."""
    if config.get("is_causal") is False:
        raise ConfigError("is_causal is false: a decoder whose tokens also look ahead is not supported")


def gguf_vocab_size(metadata: Mapping[str, Any], key: str) -> int:
    """The vocabulary that comes with the model is the measure; `key` counts where there is none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    if metadata.get(key) is None:
        raise ConfigError(f"tokenizer.ggml.tokens and {key} are missing: pass a GGUF file with its vocabulary")
    return positive(metadata, key)


def gguf_tensor_name(name: str, names: Mapping[str, str], layer: str, layer_names: Mapping[str, str]) -> str | None:
    """The HF name of a GGUF tensor: one of `names`, or of the n-th layer, `layer`.n, one of `layer_names`; else None."""
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
