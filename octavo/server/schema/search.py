"""Fields of a beam search, of best_of and of repetition detection: their shapes, and those that are moot in a request.
Knows nothing of their ranges: SamplingParams has them."""

from collections.abc import Callable, Iterator
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator
from pydantic_core import PydanticCustomError

from octavo.config import ServerConfig
from octavo.errors import InvalidRequest
from octavo.messages import RepetitionDetectionParams


class RepetitionDetection(BaseModel):
    """vLLM's. null is the same as absent."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    max_pattern_size: int | None = None
    min_pattern_size: int | None = None
    min_count: int | None = None

    def params(self) -> RepetitionDetectionParams:
        given = {name: getattr(self, name) for name in type(self).model_fields}
        return RepetitionDetectionParams(**{name: value for name, value in given.items() if value is not None})


class SearchFields(BaseModel):
    """How many answers chat and completions give, and of how many."""

    n: int | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: Any = None  # transformers': true, false or "never"

    @property
    def num_kept(self) -> int | None:
        """How many of each prompt's choices are the answer, where the best of several are asked for. None: all. (Of beams the
        engine sends the best alone.)"""
        return (self.n or 1) if self.best_of is not None and not self.use_beam_search else None

    def check_search(self, server: ServerConfig) -> None:
        for name in ("n", "best_of"):
            count = getattr(self, name)
            if count is not None and count > server.max_n:
                raise InvalidRequest(f"{name} must be at most {server.max_n} (--max-n), got {count}", param=name)
        if getattr(self, "stream", None) and (self.num_kept or 0) and (self.best_of or 0) > (self.n or 1):
            raise InvalidRequest(
                "the best of several is known when all have ended: leave stream or best_of out", param="best_of"
            )

    @field_validator("early_stopping", mode="after")
    @classmethod
    def _one_of_three(cls, value: object) -> object:
        if value is None or isinstance(value, bool) or value == "never":
            return value
        raise PydanticCustomError("early_stopping", 'Input should be true, false or "never"')


_DRAWS: dict[str, Callable[[Any], bool]] = {
    "temperature": lambda value: value in (0, 1),
    "top_p": lambda value: value == 1,
    "top_k": lambda value: value in (-1, 0),
    "min_p": lambda value: value == 0,
}
"""How tokens are drawn: a beam search draws none. With the values that say nothing anyway."""

_OF_BEAMS: dict[str, Callable[[Any], bool]] = {
    "length_penalty": lambda value: value == 1,
    "early_stopping": lambda value: value is False,
}
"""How beams compare: nothing to others. With the values that say nothing anyway."""


def moot(fields: object) -> Iterator[tuple[str, str]]:
    """Fields that the request gives and that have no effect beside its others, and why."""
    loops = getattr(fields, "repetition_detection", None)
    if loops is not None and not loops.max_pattern_size and (loops.min_pattern_size or loops.min_count):
        yield "repetition_detection", "for max_pattern_size is 0 and nothing is looked for"
    is_search = bool(getattr(fields, "use_beam_search", None))
    why = "a beam search weighs tokens by the model's own logprobs" if is_search else "it is for use_beam_search"
    for name, says_nothing in (_DRAWS if is_search else _OF_BEAMS).items():
        value = getattr(fields, name, None)
        if value is not None and not says_nothing(value):
            yield name, why
