"""④⑤ One file per family, named as config.json's model_type: the folder is the registry. With how families read numbers.
Knows nothing of any family but its file name, and of no file: whoever opened it adds its name to a refusal."""

import difflib
import importlib
import pkgutil
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from octavo.errors import ConfigError


def families() -> list[str]:
    """Every model_type that can be served."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_family(model_type: str) -> None:
    """An unknown name is a ConfigError. Loads nothing."""
    known = families()
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"model_type {model_type!r} is not supported; the supported ones are {', '.join(known)}{hint}"
        )


def load_family(model_type: str) -> ModuleType:
    """The family's module: spec, Model, and the gguf_* functions. An unknown name is a ConfigError."""
    check_family(model_type)
    return importlib.import_module(f"{__name__}.{model_type}")


# ── numbers of a config.json or of a GGUF file's metadata; null is as good as missing ───────────────


def positive(table: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A size or a count. Without a default it must be there."""
    value = table.get(key, default)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _refusal(key, value, "a whole number above 0")
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


def gguf_vocab_size(metadata: Mapping[str, Any], key: str) -> int:
    """The vocabulary that comes with the model is the measure; `key` counts where there is none."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, list) and tokens:
        return len(tokens)
    if metadata.get(key) is None:
        raise ConfigError(f"tokenizer.ggml.tokens and {key} are missing: pass a GGUF file with its vocabulary")
    return positive(metadata, key)


def _refusal(key: str, value: Any, wanted: str) -> ConfigError:
    if value is None:
        return ConfigError(f"{key} is missing: it must be {wanted}")
    if isinstance(value, list):
        return ConfigError(f"{key} is a list: models whose layers differ are not supported, it must be {wanted}")
    shown = repr(value)
    return ConfigError(f"{key} is {shown if len(shown) <= 40 else shown[:40] + '…'}: it must be {wanted}")
