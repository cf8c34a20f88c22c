"""The models of a server with several: their names, and the configuration of each one's own server."""

import hashlib
import re
from pathlib import Path
from typing import Any, NamedTuple

from octavo.config import Config, read_json_object, replace, split_list
from octavo.errors import ConfigError

MAX_MODELS = 64
_NAMED = re.compile(r"(?P<name>[\w.:/@-]{1,200})=(?P<model>.+)", re.ASCII)
# What the one address has, or what belongs to the gateway: not for one model's server.
_SHARED = frozenset(
    {"host", "port", "uds", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "models", "max_loaded_models", "load_on_demand",
     "model_idle_seconds", "model_sleep_level", "model_min_seconds", "model_settings", "keep_loaded", "api_key", "api_key_file", "key_settings", "admin_key",
     "metrics_key", "metrics_open", "served_model_name", "files_folder", "files_part", "root_path", "allowed_hosts", "allowed_origins"}
)  # fmt: skip


class ServedModel(NamedTuple):
    name: str  # in requests
    config: Config


def read_models(config: Config, folder: Path) -> list[ServedModel]:
    """The models in the order in which they are given; the first is the one that requests without a name mean. `folder`: for their sockets.
    Raises ConfigError."""
    entries = split_list(config.models.models)
    if len(entries) > MAX_MODELS:
        raise ConfigError(f"{len(entries)} models are named; at most {MAX_MODELS} can be served on one port")
    named = [name_of(entry) for entry in entries]
    names = [name for name, _ in named]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"two models are called {name!r}: give one of them another name, as in other={name}")
    single = (
        ("--served-model-name", config.model.served_model_name),
        ("--uds", config.server.uds),
    )
    for flag, value in single:
        if value:
            raise ConfigError(f"{flag} is for one model: leave it out, and name models as NAME=MODEL")
    settings = read_json_object(config.models.model_settings, "--model-settings")
    if unknown := [name for name in settings if name not in names]:
        raise ConfigError(f"--model-settings has {unknown[0]!r}, which is none of the models: {', '.join(names)}")
    kept = split_list(config.models.keep_loaded)
    if unknown := [name for name in kept if name not in names]:
        raise ConfigError(f"--keep-loaded has {unknown[0]!r}, which is none of the models: {', '.join(names)}")
    if config.models.max_loaded_models and len(names) > config.models.max_loaded_models <= len(kept):
        raise ConfigError(
            f"--keep-loaded keeps {len(kept)} models in all {config.models.max_loaded_models} places of --max-loaded-models: the others could "
            "never be loaded"
        )
    share = 1 / (config.models.max_loaded_models or len(names))
    return [
        ServedModel(name, _own_config(config, name, model, folder / f"{number}.sock", share, settings.get(name, {})))
        for number, (name, model) in enumerate(named)
    ]


def name_of(entry: str) -> tuple[str, str]:
    """(name, model) of NAME=MODEL or MODEL, whose name is the last part of its path."""
    found = _NAMED.fullmatch(entry)
    if found is not None and not Path(entry).exists():
        return found["name"], found["model"]
    return Path(entry).name.removesuffix(".gguf") or entry, entry


def part_of(name: str) -> str:
    """The part of --files-folder of a model's server."""
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:80]
    if plain == name:
        return f"model.{name}"
    return f"model.{plain}.{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"


def _own_config(config: Config, name: str, model: str, socket: Path, share: float, settings: Any) -> Config:
    if not isinstance(settings, dict):
        raise ConfigError(f"--model-settings: the settings of {name!r} must be an object of flags")
    given = {key.lstrip("-").replace("-", "_"): value for key, value in settings.items()}
    if wrong := sorted(_SHARED & given.keys()):
        raise ConfigError(f"--model-settings: {wrong[0]} is of the whole server and cannot be set for {name!r} alone")
    files = config.batches.files_folder
    own: dict[str, Any] = {
        "model": model,
        "served_model_name": name,
        "models": "",
        "uds": str(socket),
        "ssl_keyfile": "",
        "ssl_certfile": "",
        "ssl_ca_certs": "",
        "files_part": part_of(name) if files else "",
        "memory_share": config.cache.memory_share * share,
        "gpu_memory_utilization": config.cache.gpu_memory_utilization * share,
        "max_loaded_models": 0,
        "load_on_demand": False,
        "model_idle_seconds": 0.0,
        "model_sleep_level": 2,
        "model_settings": "",
        "keep_loaded": "",
    }
    if isinstance(config.cache.kv_cache_memory_bytes, int):
        own["kv_cache_memory_bytes"] = max(1, int(config.cache.kv_cache_memory_bytes * share))
    try:
        return replace(config, **(own | given))
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error.message}") from None
