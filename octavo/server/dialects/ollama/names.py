"""Names of models as Ollama's clients write them."""

from octavo.errors import ModelNotFound, quote
from octavo.server.state.service import Service

DEFAULT_TAG = ":latest"
HUB_PREFIXES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")


def plain_name(name: str) -> str:
    """A model's name without the hub's host and the tag that clients add to a name without one."""
    for prefix in HUB_PREFIXES:
        name = name.removeprefix(prefix)
    return name.removesuffix(DEFAULT_TAG)


def is_served(service: Service, name: str) -> bool:
    return plain_name(name).lower() == plain_name(service.model_name).lower()


def check_model(service: Service, name: str | None) -> str:
    """The name for the answer: as the client wrote it. None and the empty string mean the one model that is served."""
    if not name:
        return service.model_name
    if not is_served(service, name):
        raise ModelNotFound(f"model {quote(name)} is not served here; use {service.model_name!r}", param="model")
    return name
