"""LaunchedStep: a step that was launched, whose tokens and vectors arrive on the host later."""

from collections.abc import Container, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from octavo.device import Event
from octavo.messages import DraftWork, StepResult
from octavo.sampling.candidates import FoundCandidates
from octavo.sampling.logprobs import Scores
from octavo.worker.drafts import Drafted


@dataclass(slots=True)
class Extras:
    """Results that some requests want besides tokens."""

    vectors: Sequence[torch.Tensor] = ()  # of the pooled rows
    scores: Scores | None = None  # of the sampled tokens of rows that want them
    prompt_scores: list[list[Scores]] = field(default_factory=list)  # for each row that wants them, in pieces
    failures: dict[int, str] = field(default_factory=dict)  # index of a sampled token → why it is invalid
    grammar_seconds: float = 0.0
    last: list[int] = field(default_factory=list)  # indices of sampled tokens after which their rows end
    candidates: FoundCandidates | None = None  # of the beams' rows
    late: list[int] = field(default_factory=list)  # indices of sampled tokens that do not count
    scored: list[int] = field(default_factory=list)  # indices of the sampled tokens of `scores`

    def sent_home(self) -> "Extras":
        scores = None if self.scores is None else self.scores.sent_home()
        candidates = None if self.candidates is None else self.candidates.sent_home()
        prompt_scores = [[part.sent_home() for part in parts] for parts in self.prompt_scores]
        more = (self.failures, self.grammar_seconds, self.last, candidates, self.late, self.scored)
        return Extras(self.vectors, scores, prompt_scores, *more)


class LaunchedStep:
    """A launched step. On a CPU it is done already; on a GPU its tokens are copied to the host asynchronously."""

    def __init__(
        self, number: int, tokens: torch.Tensor | None, done: Event | None, extras: Extras | None = None
    ) -> None:
        self._number, self._tokens, self._done, self._extras = number, tokens, done, extras
        self.drafted: Drafted | None = None  # None: each row sampled one token at most
        self.has_filled_drafts = False  # the plan left tokens of its drafts to the worker
        self.draft_work: DraftWork | None = None  # None: no draft model was asked

    def is_done(self) -> bool:
        return self._done is None or self._done.is_done()

    def tokens(self) -> list[int]:
        """Wait until the step is done. → the sampled tokens, also those that do not count because a draft was wrong."""
        if self._done is not None:
            self._done.wait()
        return [] if self._tokens is None else self._tokens.tolist()

    def counted(self) -> Container[int] | None:
        """Wait until the step is done. → the indices of sampled tokens that count; None: all of them."""
        if self.drafted is None:
            return None
        tokens, extras = self.tokens(), self._extras or Extras()
        runs = self.drafted.runs(tokens, {*extras.failures, *extras.last, *extras.late})
        return set(self.drafted.kept(runs, len(tokens)))

    def result(self) -> StepResult:
        """Wait until the step is done. → its result."""
        tokens = self.tokens()
        extras = self._extras
        if extras is None and self.drafted is None:
            return StepResult(self._number, tokens)
        extras = extras or Extras()
        result = StepResult(
            self._number,
            tokens,
            [_bytes(vector) for vector in extras.vectors],
            [] if extras.scores is None else extras.scores.entries(),
            [[entry for part in parts for entry in part.entries()] for parts in extras.prompt_scores],
            extras.failures,
            extras.grammar_seconds,
            extras.last,
            [] if extras.candidates is None else extras.candidates.entries(),
            extras.late,
        )
        if self.drafted is None:
            return result
        verified = _verified(result, self.drafted, extras.scored)
        if not self.has_filled_drafts:
            return verified
        counts = [len(draft) for draft in self.drafted.tokens]
        return msgspec.structs.replace(verified, drafted=counts, draft_work=self.draft_work)


def _verified(result: StepResult, drafted: Drafted, scored: list[int]) -> StepResult:
    """The result without samples that do not count. `scored`: samples that it has logprobs of."""
    runs = drafted.runs(result.tokens, {*result.failures, *result.last, *result.late})
    place = {at: number for number, at in enumerate(drafted.kept(runs, len(result.tokens)))}
    return msgspec.structs.replace(
        result,
        tokens=[result.tokens[at] for at in place],
        logprobs=[entry for at, entry in zip(scored, result.logprobs, strict=True) if at in place],
        failures={place[at]: why for at, why in result.failures.items() if at in place},
        last=[place[at] for at in result.last if at in place],
        late=[place[at] for at in result.late if at in place],
        runs=runs,
    )


def _bytes(vector: torch.Tensor) -> bytes:
    """[D] float32, on any device → little endian."""
    return vector.cpu().numpy().astype("<f4").tobytes()
