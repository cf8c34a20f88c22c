"""Names of models as Ollama's clients write them."""

from octavo.errors import ModelNotFound, quote
from octavo.server.state.pools import FILES
from octavo.server.state.service import Service
from octavo.weights.sources.names import read_name
from octavo.weights.sources.store import Store

DEFAULT_TAG = ":latest"
HUB_PREFIXES = ("hf.co/", "huggingface.co/", "https://hf.co/", "https://huggingface.co/")


def plain_name(name: str) -> str:
    """A model's name without the hub's host and the tag that clients add to a name without one."""
    for prefix in HUB_PREFIXES:
        name = name.removeprefix(prefix)
    return name.removesuffix(DEFAULT_TAG)


def is_served(service: Service, name: str) -> bool:
    return plain_name(name).lower() == plain_name(service.model_name).lower()


async def check_model(service: Service, name: str | None) -> str:
    """The name for the answer: as the client wrote it. None and the empty string mean the one model that is served."""
    if not name:
        return service.model_name
    if await service.adapters.find(plain_name(name)) is not None:
        await service.check_model(plain_name(name))
    elif not is_served(service, name):
        raise ModelNotFound(await FILES.run(lambda: _not_served(service, name)), param="model")
    return name


def _not_served(service: Service, name: str) -> str:
    wanted = read_name(name)
    model = None if wanted is None else Store().find(wanted)
    here = f"this server serves {service.model_name!r} and loads no other model while it runs"
    if model is not None:
        return (
            f"model {quote(name)} is pulled, but not loaded: {here}. Start a server for it: octavo serve {model.name}"
        )
    if wanted is None or "/" not in wanted.hub_id:  # a name of Ollama's own library
        return f"model {quote(name)} not found: {here}. Models have names of the hub, owner/name:tag"
    return f"model {quote(name)} not found: {here}. Start a server for it, which pulls it: octavo serve {wanted}"
