"""LoRARequest: the adapter that prompts are completed with, with vLLM's names."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octavo.config import LoraConfig
from octavo.errors import ConfigError, InvalidRequest
from octavo.messages import AdapterRef
from octavo.weights.adapters.adapter_file import check_rank, open_adapter, stamp_of


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """`lora_int_id` is accepted, and not needed: an adapter is known by its files."""

    lora_name: str
    lora_int_id: int = 1
    lora_path: str = ""

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


def read_adapters(given: LoRARequests, count: int, config: LoraConfig) -> list[AdapterRef | None]:
    """One for each prompt. Raises InvalidRequest."""
    if given is None:
        return [None] * count
    if not config.enable_lora:
        raise InvalidRequest("lora_request needs LLM(…, enable_lora=True)", param="lora_request")
    each = [given] * count if isinstance(given, LoRARequest) else list(given)
    if len(each) != count:
        raise InvalidRequest(f"{count} prompts need {count} adapters, got {len(each)}", param="lora_request")
    return [None if one is None else _ref(one, config) for one in each]


def _ref(one: LoRARequest, config: LoraConfig) -> AdapterRef:
    if not isinstance(one, LoRARequest):
        raise InvalidRequest(f"lora_request must be a LoRARequest, got {type(one).__name__}", param="lora_request")
    path = one.lora_path or config.modules.get(one.lora_name, "")
    if not path:
        raise InvalidRequest(f"adapter {one.lora_name!r} has no lora_path", param="lora_request")
    try:
        stamp = stamp_of(Path(path))
        num_weights = _num_weights(path, stamp, config.max_lora_rank)
    except ConfigError as error:
        raise InvalidRequest(str(error), param="lora_request") from None
    return AdapterRef(one.lora_name, path, stamp, config.max_lora_rank, num_weights)


@functools.lru_cache(4096)
def _num_weights(path: str, stamp: str, max_rank: int) -> int:
    """Check an adapter, once for each state of its files: many prompts may have the same one. Raises ConfigError."""
    file = open_adapter(path)
    check_rank(file, max_rank)
    return file.num_weights
