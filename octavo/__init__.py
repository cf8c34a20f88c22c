"""Octavo: an LLM inference server. `from octavo import LLM, SamplingParams` is the Python API.
`import octavo` loads nothing else: each name imports its module on first use."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.messages import BeamSearchParams, RepetitionDetectionParams, StructuredOutputsParams
    from octavo.offline.async_llm import AsyncEngineArgs, AsyncLLM
    from octavo.offline.llm import LLM
    from octavo.offline.lora import LoRARequest
    from octavo.offline.outputs import BeamSearchOutput, CompletionOutput, EmbeddingOutput, Logprob, RequestOutput
    from octavo.offline.params import RequestOutputKind, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "LoRARequest",
    "Logprob",
    "RepetitionDetectionParams",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "octavo.offline.llm",
    "LoRARequest": "octavo.offline.lora",
    **dict.fromkeys(("AsyncEngineArgs", "AsyncLLM"), "octavo.offline.async_llm"),
    **dict.fromkeys(
        ("BeamSearchOutput", "CompletionOutput", "EmbeddingOutput", "Logprob", "RequestOutput"),
        "octavo.offline.outputs",
    ),
    **dict.fromkeys(("RequestOutputKind", "SamplingParams"), "octavo.offline.params"),
    **dict.fromkeys(("BeamSearchParams", "RepetitionDetectionParams", "StructuredOutputsParams"), "octavo.messages"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
