"""Outputs of the offline API, collected from the deltas of its requests."""

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
    logprobs: list[Logprobs] = field(default_factory=list)  # one entry per token, if requested
    cumulative_logprob: float | None = None  # their sum; also set for a beam, or for best_of, without logprobs
    # Whether the text satisfies its whole schema, if structured_outputs has unenforced "check".
    schema_valid: bool | None = None


@dataclass(slots=True)
class RequestOutput:
    """The output of one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[Logprobs] = field(default_factory=list)  # for each prompt token but the first, if requested


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence found by a beam search."""

    tokens: list[int]  # including the prompt's
    logprobs: list[Logprobs]  # one entry per generated token
    cum_logprob: float
    text: str | None  # decoded from all of `tokens`; None: no tokenizer was loaded
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    embedding: list[float] = field(default_factory=list)


class Vector:
    """Collects one request's embedding."""

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
        """`wanted`: the caller's parameters, if they differ from the engine's: with best_of the engine makes more choices."""
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
        """Keep the choices and logprobs that the caller asked for. To be called once all choices have ended."""
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
        """Add a delta. True: a stop string ended the choice, so the engine must stop it."""
        if delta.finish is not None and delta.finish.reason == "error":
            raise failure_of(delta.finish)
        choice, stream = self.output.outputs[delta.index], self._streams[delta.index]
        if choice.finish_reason is not None:
            return False
        choice.token_ids += delta.token_ids
        choice.logprobs += delta.logprobs
        if delta.prompt_logprobs:
            delta.add_scores_to(self.output.prompt_logprobs)
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
