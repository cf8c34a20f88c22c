"""ModelName: a model of the hub by name, as people write it: owner/name, owner/name-GGUF:Q4_K_M, hf.co/owner/name."""

import re
from dataclasses import dataclass

from octavo.errors import ConfigError, quote

HUB_HOSTS = ("hf.co/", "huggingface.co/")
LATEST = "latest"
_SCHEME = re.compile(r"https?://")
# "gpt2" (an early repository without owner) or "owner/name".
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?", re.ASCII)
_TAG = re.compile(r"[A-Za-z0-9_][\w.-]{0,127}", re.ASCII)
_PATH_STARTS = ("/", "./", "../", "~")
_FILE_ENDS = (".gguf", ".safetensors", ".bin", ".pt", ".pth")


@dataclass(frozen=True, slots=True)
class ModelName:
    hub_id: str
    tag: str = ""  # of a repository with several files: which of them; empty: the best one

    def __str__(self) -> str:
        return f"{self.hub_id}:{self.tag}" if self.tag else self.hub_id


def looks_like_hub_id(name: str) -> bool:
    return _HUB_ID.fullmatch(name) is not None and ".." not in name and "--" not in name


def how_named(hub_id: str) -> str:
    """What to do about a name that the hub does not have."""
    return "check the name" if "/" in hub_id else "models are named owner/name, not as in Ollama's library"


def looks_like_path(name: str) -> bool:
    """Whether a name that does not exist here was meant as a file or a folder."""
    return name.startswith(_PATH_STARTS) or name.lower().endswith(_FILE_ENDS) or name.count("/") > 1 or "\\" in name


def read_name(text: str) -> ModelName | None:
    """None: it is not the name of a model on the hub."""
    name = _SCHEME.sub("", text)
    for host in HUB_HOSTS:
        name = name.removeprefix(host)
    hub_id, colon, tag = name.partition(":")
    if not looks_like_hub_id(hub_id) or (colon and not is_tag(tag)):
        return None
    if looks_like_path(hub_id) and name == text:
        return None
    return ModelName(hub_id, "" if tag == LATEST else tag)


def is_tag(text: str) -> bool:
    return _TAG.fullmatch(text) is not None and ".." not in text


def require_name(text: str) -> ModelName:
    name = read_name(text)
    if name is None:
        raise ConfigError(
            f"{quote(text)} is not the name of a model: give owner/name, owner/name:TAG (a GGUF file's quantisation, such as "
            "Q4_K_M) or hf.co/owner/name"
        )
    return name
