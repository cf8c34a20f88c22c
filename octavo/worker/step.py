"""Step: a step on its way, whose tokens and vectors will be home some time later.
Knows nothing of how it is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from octavo.device import Event
from octavo.messages import StepResult
from octavo.sampling.candidates import Found
from octavo.sampling.logprobs import Scores


@dataclass(slots=True)
class Extras:
    """What a few requests want beside tokens."""

    vectors: Sequence[torch.Tensor] = ()  # of the rows that are pooled
    scores: Scores | None = None  # of the tokens whose row wants them
    prompt_scores: list[list[Scores]] = field(default_factory=list)  # of each row that wants them, piece by piece
    failures: dict[int, str] = field(default_factory=dict)  # sampled token → why it does not count
    grammar_seconds: float = 0.0
    last: list[int] = field(default_factory=list)  # sampled tokens after which their rows end
    candidates: Found | None = None  # of the rows that are beams

    def sent_home(self) -> "Extras":
        scores = None if self.scores is None else self.scores.sent_home()
        candidates = None if self.candidates is None else self.candidates.sent_home()
        prompt_scores = [[part.sent_home() for part in parts] for parts in self.prompt_scores]
        more = (self.failures, self.grammar_seconds, self.last, candidates)
        return Extras(self.vectors, scores, prompt_scores, *more)


class Step:
    """A step on its way. On a CPU it is done; on a GPU its tokens are copied to the host behind it."""

    def __init__(
        self, number: int, tokens: torch.Tensor | None, done: Event | None, extras: Extras | None = None
    ) -> None:
        self._number, self._tokens, self._done, self._extras = number, tokens, done, extras

    def is_done(self) -> bool:
        return self._done is None or self._done.is_done()

    def tokens(self) -> list[int]:
        """Waits until the step is done."""
        if self._done is not None:
            self._done.wait()
        return [] if self._tokens is None else self._tokens.tolist()

    def result(self) -> StepResult:
        """Waits until the step is done."""
        tokens = self.tokens()
        extras = self._extras
        if extras is None:
            return StepResult(self._number, tokens)
        return StepResult(
            self._number,
            tokens,
            [_bytes(vector) for vector in extras.vectors],
            [] if extras.scores is None else extras.scores.entries(),
            [[entry for part in parts for entry in part.entries()] for parts in extras.prompt_scores],
            extras.failures,
            extras.grammar_seconds,
            extras.last,
            [] if extras.candidates is None else extras.candidates.entries(),
        )


def _bytes(vector: torch.Tensor) -> bytes:
    """[D] float32, on any device → little endian."""
    return vector.cpu().numpy().astype("<f4").tobytes()
