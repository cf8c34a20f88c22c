"""The forms in which the Python API takes prompts, which are vLLM's: a text, token ids, {"prompt": …}, {"prompt_token_ids": …}, or a list
of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

from octavo.errors import InvalidRequest, Unsupported

Prompt = str | Sequence[int] | Mapping[str, Any]
_KNOWN = {"prompt", "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class OfflinePrompt:
    """One of the two is None, unless the caller gave both."""

    text: str | None
    ids: list[int] | None


def read_prompts(
    prompts: "Prompt | Sequence[Prompt] | None", prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None
) -> list[OfflinePrompt]:
    """Every prompt, in their order; a single one becomes a list of one. `prompt_token_ids`: vLLM's older way to give ids."""
    if prompt_token_ids is not None:
        if prompts is not None:
            raise InvalidRequest("give either prompts or prompt_token_ids", param="prompt_token_ids")
        lists: list[Any] = [prompt_token_ids] if _is_ids(prompt_token_ids) else list(prompt_token_ids)
        if not all(_is_ids(each) for each in lists):
            raise InvalidRequest("prompt_token_ids must be a list of ids, or a list of such lists", "prompt_token_ids")
        return [OfflinePrompt(None, _whole(list(each))) for each in lists]
    if prompts is None:
        raise InvalidRequest("prompts is missing: give a text, token ids, or a list of these", param="prompts")
    if isinstance(prompts, str | Mapping) or _is_ids(prompts):
        return [read_prompt(prompts)]  # type: ignore[arg-type]
    if any(isinstance(each, Integral) for each in prompts):
        raise InvalidRequest(
            "prompts mixes token ids and prompts: give one list of ids, or a list of prompts", param="prompts"
        )
    return [read_prompt(each) for each in prompts]  # type: ignore[arg-type]


def read_prompt(prompt: Prompt) -> OfflinePrompt:
    """One prompt."""
    if isinstance(prompt, str):
        return OfflinePrompt(prompt, None)
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt)
    if not isinstance(prompt, Sequence | range) and not hasattr(prompt, "__iter__"):
        raise InvalidRequest(f"a prompt must be a text or token ids, got {type(prompt).__name__}", param="prompts")
    ids = _whole(list(prompt))
    if ids is None:
        raise InvalidRequest("a prompt of token ids must be a list of whole numbers", param="prompts")
    return OfflinePrompt(None, ids)


def _whole(items: list[Any]) -> list[int] | None:
    """The items as ints; None: some are not whole numbers. It looks at their types, of which there is mostly one: asking 500,000 tokens
    whether each is an Integral took 0.27 s, before a GPU got anything to do."""
    kinds = set(map(type, items))
    if not all(issubclass(kind, Integral) for kind in kinds):
        return None
    return items if kinds <= {int} else [int(item) for item in items]


def _of_mapping(prompt: Mapping[str, Any]) -> OfflinePrompt:
    for name, value in prompt.items():
        if name not in _KNOWN and value is not None:
            raise Unsupported(f"{name} of a prompt is not supported here: give prompt or prompt_token_ids", param=name)
    text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
    if text is None and ids is None:
        raise InvalidRequest("a prompt must have prompt or prompt_token_ids", param="prompts")
    if text is not None and not isinstance(text, str):
        raise InvalidRequest("prompt must be a text", param="prompt")
    return OfflinePrompt(text, None if ids is None else read_prompt(ids).ids)


def _is_ids(value: object) -> bool:
    """Whether this is one list of ids. An empty list has no prompts."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        return False
    items = list(value)
    return bool(items) and isinstance(items[0], Integral) and _whole(items) is not None
