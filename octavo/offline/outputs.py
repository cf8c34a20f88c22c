"""What became of prompts that were handed over offline, collected from their deltas.
Knows nothing of the loop that makes them."""

from dataclasses import dataclass, field

from octavo.admission.finish_errors import failure_of
from octavo.admission.searches import likeliest
from octavo.messages import GenerateRequest, Logprobs, SamplingParams, TokenDelta, numbers_of
from octavo.text import Text, TextStream


@dataclass(slots=True)
class CompletionOutput:
    """One of the n choices of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[Logprobs] = field(default_factory=list)  # of each token, where asked for
    cumulative_logprob: float | None = None  # their sum, where asked for, and of a beam


@dataclass(slots=True)
class RequestOutput:
    """What became of one prompt."""

    request_id: str
    prompt: str | None  # None: it came as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # of each prompt token but the first, where asked for


@dataclass(slots=True)
class BeamSearchSequence:
    """One of the answers of a beam search."""

    tokens: list[int]  # the prompt's among them
    logprobs: list[Logprobs]  # of each token of the answer
    cum_logprob: float
    text: str | None  # of all of the tokens; None: the model has no tokenizer
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """What became of one prompt, the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """One prompt's vector."""

    request_id: str
    prompt: str | None  # None: it came as token ids
    prompt_token_ids: list[int]
    embedding: list[float] = field(default_factory=list)


class Vector:
    """Takes one request's vector."""

    def __init__(self, output: EmbeddingOutput) -> None:
        self.output = output
        self.is_counted = False

    @property
    def is_done(self) -> bool:
        return bool(self.output.embedding)

    def take(self, delta: TokenDelta) -> bool:
        if delta.finish is not None and delta.finish.reason == "error":
            raise failure_of(delta.finish)
        self.output.embedding = numbers_of(delta.vector)
        return False


class Answer:
    """Collects one request's deltas into its output."""

    def __init__(
        self, request: GenerateRequest, prompt: str | None, text: Text | None, wanted: SamplingParams | None = None
    ) -> None:
        """`wanted`: what the caller asked for, where that is less than the engine was asked: the best of several."""
        choices = range(request.params.n)
        self._wanted = wanted or request.params
        self.output = RequestOutput(
            request.id, prompt, request.prompt_ids, [CompletionOutput(index) for index in choices]
        )
        self.is_counted = False
        self._streams: list[TextStream | None] = [
            text.stream(request.params, request.prompt_ids) if text is not None else None for _ in choices
        ]

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.output.outputs)

    def keep_best(self) -> None:
        """Once all choices have ended."""
        outputs, wanted = self.output.outputs, self._wanted
        for choice in outputs:
            if choice.logprobs and choice.cumulative_logprob is None:
                choice.cumulative_logprob = sum(entry.logprobs[0] for entry in choice.logprobs)
        if len(outputs) > wanted.n:
            self.output.outputs = likeliest(outputs, wanted.n)
        if wanted.logprobs is None:
            for choice in self.output.outputs:
                choice.logprobs = []

    def take(self, delta: TokenDelta) -> bool:
        """True: a stop string ended the choice, which the engine does not know."""
        if delta.finish is not None and delta.finish.reason == "error":
            raise failure_of(delta.finish)
        choice, stream = self.output.outputs[delta.index], self._streams[delta.index]
        if choice.finish_reason is not None:
            return False
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        if delta.prompt_logprobs and not self.output.prompt_logprobs:
            self.output.prompt_logprobs = [*delta.prompt_logprobs]
        if delta.finish is not None:
            self.output.num_cached_tokens = delta.finish.num_cached_tokens
            choice.cumulative_logprob = delta.finish.cumulative_logprob
        if stream is None:
            choice.finish_reason = delta.finish.reason if delta.finish is not None else None
            return False
        piece = stream.push(delta.token_ids, delta.finish)
        choice.text += piece.text
        choice.finish_reason, choice.stop_reason = piece.finish_reason, piece.stop_reason
        return stream.stopped
