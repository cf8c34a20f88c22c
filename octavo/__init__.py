"""Octavo: an LLM inference server. `from octavo import LLM, SamplingParams` is the Python API.
`import octavo` loads nothing else: each name imports its module on first use."""

import sys
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
_FORMER = {
    "GuidedDecodingParams": "use StructuredOutputsParams, and SamplingParams(structured_outputs=…)",
    "LLMEngine": "use LLM, or AsyncLLM for requests that come one by one",
    "AsyncLLMEngine": "use AsyncLLM, which vLLM calls by both names",
    "EngineArgs": "pass the options to LLM(…), or use AsyncEngineArgs and AsyncLLM",
    "TextPrompt": 'use a text, or the mapping {"prompt": …}',
    "TokensPrompt": 'use a list of ids, or the mapping {"prompt_token_ids": …}',
    "PoolingParams": "embed, classify and score take their options by name",
}
"""Names of vLLM, some of earlier versions, that are not here, and what to use."""


def __getattr__(name: str) -> Any:
    if name in _FORMER:
        reason = f"there is no {name} in octavo: {_FORMER[name]}"
        # `from octavo import` replaces an AttributeError by a text of its own, and passes an ImportError on.
        if sys._getframe(1).f_code.co_filename == "<frozen importlib._bootstrap>":
            raise ImportError(reason, name="octavo")
        raise AttributeError(reason, name=name)
    if name not in _HOMES:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
