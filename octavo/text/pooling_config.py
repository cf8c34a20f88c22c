"""The pooling settings of a sentence-transformers folder (modules.json and the files it names) or of a GGUF file."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.errors import ConfigError
from octavo.gguf import GGUFFile
from octavo.messages import Pooling

_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_WORDS: dict[str, Pooling] = {"cls": "cls", "mean": "mean", "lasttoken": "last"}
_GGUF_TYPES: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """The model's own pooling settings. `kind` None: it has none."""

    kind: Pooling | None = None
    normalize: bool = True
    max_len: int | None = None  # tokens of a prompt, including special tokens
    unsupported: str = ""  # description of a further operation on vectors that is not supported


def read_pooling_config(path: Path) -> PoolingConfig:
    """Read the settings. `path`: the model's folder, or its .gguf file."""
    if path.is_file():
        return gguf_pooling_config(GGUFFile(path).metadata)
    modules = _read(path / "modules.json")
    if not isinstance(modules, list):
        return PoolingConfig()
    settings = _object(path / "sentence_bert_config.json")
    max_len = settings.get("max_seq_length")
    kind: Pooling | None = None
    normalize, unsupported = False, ""
    for module in modules:
        name = str(module.get("type", "")).rsplit(".", 1)[-1] if isinstance(module, dict) else ""
        match name:
            case "Transformer":
                pass
            case "Pooling":
                kind, problem = _mode(_inside(path, module.get("path")))
                unsupported = unsupported or problem
            case "Normalize":
                normalize = True
            case _:
                unsupported = f"a module of type {name or module!r}"
    return PoolingConfig(kind, normalize, max_len if isinstance(max_len, int) and max_len > 0 else None, unsupported)


def gguf_pooling_config(metadata: dict[str, Any]) -> PoolingConfig:
    kind = metadata.get(f"{metadata.get('general.architecture')}.pooling_type")
    return PoolingConfig(_GGUF_TYPES.get(kind)) if isinstance(kind, int) else PoolingConfig()


def _inside(path: Path, name: Any) -> Path:
    """A module's folder, which must be inside the model's."""
    if not isinstance(name, str) or Path(name).name != name or name == "..":
        raise ConfigError(f"{path / 'modules.json'} is corrupt: it puts a module into {name!r}; fetch it again")
    return path / name


def _mode(folder: Path) -> tuple[Pooling | None, str]:
    """Return (pooling, description of what is not supported)."""
    settings = _object(folder / "config.json")
    if isinstance(said := settings.get("pooling_mode"), str):  # newer folders have one word
        kind = _WORDS.get(said)
        return kind, "" if kind else f"pooling by {said}"
    chosen = [key for key, value in settings.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) == 1 and chosen[0] in _MODES:
        return _MODES[chosen[0]], ""
    return None, f"pooling by {' and '.join(chosen) or 'nothing'}"


def _object(path: Path) -> dict[str, Any]:
    value = _read(path)
    return value if isinstance(value, dict) else {}


def _read(path: Path) -> Any:
    try:
        if not path.is_file():  # raises where the name is too long
            return None
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # RecursionError: nested too deeply
        raise ConfigError(f"{path} is not valid JSON ({error}): fetch it again") from error
