"""SamplingParams of the Python API: the engine's, and those that only say how an output is made of its tokens."""

from enum import Enum
from typing import Any

import msgspec

from octavo.errors import InvalidRequest, quote
from octavo.messages import SamplingParams as EngineParams


class RequestOutputKind(Enum):
    """What each RequestOutput of a stream holds (AsyncLLM). The names are vLLM's."""

    CUMULATIVE = 0  # everything so far
    DELTA = 1  # what is new
    FINAL_ONLY = 2  # one output, once everything is there


class _NamesNearest(msgspec.StructMeta):
    """Has an unknown field's error name the nearest field that there is."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            fields = cls.__struct_fields__
            unknown = next((name for name in kwargs if name not in fields), None)
            if unknown is None:
                raise
            import difflib  # imported lazily: only needed for an error

            close = difflib.get_close_matches(unknown, fields, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise TypeError(f"{cls.__name__} has no field {unknown!r}{hint}") from error


class SamplingParams(EngineParams, frozen=True, kw_only=True, gc=False, metaclass=_NamesNearest):
    """Sampling parameters. Names and meaning are vLLM's. Valid by construction: a bad value raises InvalidRequest."""

    detokenize: bool = True  # False: token ids only; prompts of ids then need no tokenizer
    spaces_between_special_tokens: bool = True  # both are the same: decoding adds no spaces
    truncate_prompt_tokens: int | None = None  # keep so many of a prompt's last tokens; -1: as many as fit
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("detokenize", "spaces_between_special_tokens"):
            if type(value := getattr(self, name)) is not bool:
                raise InvalidRequest(f"{name} must be True or False, got {quote(value)}", param=name)
        if not self.detokenize and self.stop:
            raise InvalidRequest("stop strings are found in text, so they need detokenize", param="detokenize")
        keep = self.truncate_prompt_tokens
        if keep is not None and (type(keep) is not int or (keep < 1 and keep != -1)):
            raise InvalidRequest(
                f"truncate_prompt_tokens must be -1 (all that fits) or at least 1, got {quote(keep)}",
                param="truncate_prompt_tokens",
            )
        if not isinstance(self.output_kind, RequestOutputKind):
            raise InvalidRequest(
                f"output_kind must be a RequestOutputKind, got {quote(self.output_kind)}", param="output_kind"
            )


def for_engine(params: EngineParams) -> EngineParams:
    """The part of the parameters that the engine computes with."""
    if type(params) is EngineParams:
        return params
    return EngineParams(**{name: getattr(params, name) for name in EngineParams.__struct_fields__})


def of_offline(params: EngineParams) -> SamplingParams:
    """The parameters with all fields of the Python API: some callers have the engine's alone."""
    if isinstance(params, SamplingParams):
        return params
    return SamplingParams(**msgspec.structs.asdict(params))
