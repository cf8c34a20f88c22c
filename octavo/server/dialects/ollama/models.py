"""Models as Ollama's clients see them: the one that is served, and those that were pulled."""

import functools
import hashlib
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from octavo.errors import ConfigError, NotFound, quote
from octavo.server.dialects.ollama.names import is_served, plain_name
from octavo.server.dialects.ollama.output import timestamp
from octavo.server.generate.infill import can_fill
from octavo.server.schema.fields import RequestFields
from octavo.server.state.service import Service
from octavo.weights.sources.facts import ModelFacts, read_facts
from octavo.weights.sources.names import read_name
from octavo.weights.sources.store import Store, StoredModel

API_VERSION = "0.12.6"
"""The version of Ollama whose API this is: clients compare it to learn what they may use."""
_KEPT_FACTS = 64  # models whose headers are remembered
FOR_EVER = "2318-01-01T00:00:00Z"  # as Ollama writes the end of keep_alive -1

Capability = Literal["completion", "tools", "thinking", "insert", "embedding"]


class NamedRequest(RequestFields):
    name: str | None = None  # Ollama's older name of `model`

    @property
    def wanted(self) -> str:
        """Empty: the request names no model."""
        return self.model or self.name or ""


class Details(msgspec.Struct, frozen=True):
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""
    parent_model: str = ""


class ModelEntry(msgspec.Struct, frozen=True):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class Tags(msgspec.Struct, frozen=True):
    models: list[ModelEntry]


class RunningEntry(msgspec.Struct, frozen=True):
    name: str
    model: str
    size: int
    digest: str
    details: Details
    expires_at: str
    size_vram: int
    context_length: int


class Running(msgspec.Struct, frozen=True):
    models: list[RunningEntry]


class Shown(msgspec.Struct, frozen=True):
    details: Details
    model_info: dict[str, Any]
    template: str
    parameters: str
    capabilities: list[Capability]
    modified_at: str
    modelfile: str = ""  # there is none: models are files of the hub
    license: str | UnsetType = UNSET


class ApiVersion(msgspec.Struct, frozen=True):
    version: str
    octavo: str  # Octavo's own


def tags(service: Service) -> Tags:
    """The served model first. Takes long where there are many: run it in a thread."""
    return Tags([_served_entry(service), *(_entry(model) for model in Store().models() if not _is_it(service, model))])


def running(service: Service) -> Running:
    report = service.report
    facts = served_facts(service)
    is_cuda = report.device.startswith("cuda")
    size = report.weights_bytes + report.num_pages * report.page_bytes
    return Running(
        [
            RunningEntry(
                service.model_name,
                service.model_name,
                size,
                _digest(service),
                _details(facts),
                FOR_EVER,
                size if is_cuda else 0,
                report.max_model_len,
            )
        ]
    )


def show(service: Service, name: str) -> Shown:
    if not name or is_served(service, name):
        facts, text = served_facts(service), service.text
        capabilities: list[Capability] = ["completion"] if service.report.can_generate else ["embedding"]
        if service.report.can_generate and text.has_chat_template:
            capabilities.append("tools")
        if text.formats.thinking is not None:
            capabilities.append("thinking")
        if service.report.can_generate and can_fill(text):
            capabilities.append("insert")
        return _shown(facts, text.template_source or "", _parameters(text.default_sampling), capabilities)
    model = find(name)
    return _shown(_facts_of(model.path), "", "", ["completion"])


def find(name: str) -> StoredModel:
    """A pulled model. Raises NotFound."""
    wanted = read_name(name)
    model = Store().find(wanted) if wanted is not None else None
    if model is None:
        raise NotFound(f"model {quote(name)} not found: it is neither served nor pulled here", param="model")
    return model


def served_facts(service: Service) -> ModelFacts | None:
    """None: the server does not know the model's files, or cannot read them."""
    return None if service.model_path is None else _facts_of(service.model_path)


def _facts_of(path: Path) -> ModelFacts | None:
    try:
        return _read_facts(path, path.stat().st_mtime_ns)
    except (ConfigError, OSError):
        return None


@functools.lru_cache(_KEPT_FACTS)
def _read_facts(path: Path, modified: int) -> ModelFacts:
    """`modified`: a model that is pulled again is read again."""
    return read_facts(path)


def _is_it(service: Service, model: StoredModel) -> bool:
    return plain_name(model.name).lower() == plain_name(service.model_name).lower()


def _served_entry(service: Service) -> ModelEntry:
    facts = served_facts(service)
    modified = service.created if facts is None else facts.modified
    size = service.report.weights_bytes if facts is None else facts.num_bytes
    name = service.model_name
    return ModelEntry(name, name, timestamp(modified), size, _digest(service), _details(facts))


def _entry(model: StoredModel) -> ModelEntry:
    facts = _facts_of(model.path)
    pulled = timestamp(model.manifest.pulled)
    return ModelEntry(model.name, model.name, pulled, model.num_bytes, model.digest, _details(facts))


def _digest(service: Service) -> str:
    """Equal for models that give equal answers."""
    return hashlib.sha256(service.fingerprint.encode()).hexdigest()


def _details(facts: ModelFacts | None) -> Details:
    if facts is None:
        return Details()
    return Details(facts.format, facts.family, [facts.family], facts.parameter_size, facts.quantization)


def _shown(facts: ModelFacts | None, template: str, parameters: str, capabilities: list[Capability]) -> Shown:
    info: dict[str, Any] = {}
    if facts is not None:
        info = {"general.architecture": facts.family, "general.parameter_count": facts.num_parameters, **facts.metadata}
    return Shown(
        _details(facts),
        info,
        template,
        parameters,
        capabilities,
        timestamp(0 if facts is None else facts.modified),
        license=(facts.license if facts is not None else "") or UNSET,
    )


def _parameters(sampling: dict[str, Any]) -> str:
    """The model's default sampling, as a Modelfile has it."""
    return "\n".join(f"{name:<30} {value}" for name, value in sampling.items())
