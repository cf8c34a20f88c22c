"""④⑤ One file per family, named as config.json's model_type: the folder is the registry.
Knows nothing of any family but its file name."""

import difflib
import importlib
import pkgutil
from types import ModuleType

from octavo.errors import ConfigError


def families() -> list[str]:
    """Every model_type that can be served."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def load_family(model_type: str) -> ModuleType:
    """The family's module: spec, Model, and the gguf_* functions. An unknown name is a ConfigError."""
    known = families()
    if model_type not in known:
        near = difflib.get_close_matches(model_type, known, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"model_type {model_type!r} is not supported; the supported ones are {', '.join(known)}{hint}"
        )
    return importlib.import_module(f"{__name__}.{model_type}")
