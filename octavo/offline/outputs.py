"""Outputs of the offline API, collected from the deltas of its requests. Names and forms are vLLM's."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from octavo.admission.finish_errors import failure_of
from octavo.admission.searches import likeliest
from octavo.messages import AdapterRef, GenerateRequest, Logprobs, TokenDelta, numbers_of
from octavo.offline.params import SamplingParams
from octavo.text import Text, TextStream


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position. `rank` 1: the most likely. `decoded_token` None: no tokenizer was loaded."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


TokenLogprobs = dict[int, Logprob]
"""At one position, by token id: the chosen token first, then as many of the most likely as requested."""


@dataclass(slots=True)
class CompletionOutput:
    """One of the n choices of a prompt."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None  # sum over the tokens; with logprobs, for a beam, and with best_of
    logprobs: list[TokenLogprobs] | None = None  # one entry per token. None: not requested
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    lora_request: AdapterRef | None = None  # the adapter that it was computed with
    # Whether the text satisfies its whole schema, if structured_outputs has unenforced "check".
    schema_valid: bool | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to a request. `_ts`: of time.monotonic(); 0: not yet."""

    arrival_time: float  # seconds since 1970
    num_generation_tokens: int = 0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0  # seconds from arrival


@dataclass(slots=True)
class RequestOutput:
    """The output of one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False  # all of its choices
    prompt_logprobs: list[TokenLogprobs | None] | None = (
        None  # one per prompt token, None for the first. None: not requested
    )
    metrics: RequestMetrics | None = None
    num_cached_tokens: int = 0
    lora_request: AdapterRef | None = None  # the adapter that it was computed with
    encoder_prompt: None = None  # models with an encoder and a decoder are not supported
    encoder_prompt_token_ids: None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence found by a beam search."""

    tokens: list[int]  # including the prompt's
    logprobs: list[TokenLogprobs]  # one entry per generated token
    cum_logprob: float
    text: str | None  # decoded from all of `tokens`; None: no tokenizer was loaded
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences of one prompt, best first."""

    sequences: list[BeamSearchSequence]


@dataclass(frozen=True, slots=True)
class Embedding:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(slots=True)
class EmbeddingOutput:
    """The embedding of one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    embedding: list[float] = field(default_factory=list)

    @property
    def outputs(self) -> Embedding:
        """The embedding where vLLM has it."""
        return Embedding(self.embedding)

    @property
    def finished(self) -> bool:
        return bool(self.embedding)


@dataclass(frozen=True, slots=True)
class Classification:
    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True)
class ClassificationOutput:
    """The numbers of a classifier's labels for one prompt."""

    request_id: str
    prompt: str | None  # None: it was given as token ids
    prompt_token_ids: list[int]
    probs: list[float]

    @property
    def outputs(self) -> Classification:
        """The same where vLLM has it."""
        return Classification(self.probs)


@dataclass(frozen=True, slots=True)
class Score:
    score: float


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts fit together."""

    request_id: str
    prompt_token_ids: list[int]  # of both
    score: float

    @property
    def outputs(self) -> Score:
        """The same where vLLM has it."""
        return Score(self.score)


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


@dataclass(slots=True)
class _Scored:
    """A choice and its logprobs as the engine gives them, to rank choices by."""

    index: int
    logprobs: list[Logprobs]
    output: CompletionOutput


class Answer:
    """Collects one request's deltas into its output."""

    def __init__(self, request: GenerateRequest, prompt: str | None, text: Text | None, wanted: SamplingParams) -> None:
        """`wanted`: the caller's parameters: with best_of the engine makes more choices. `text` None: token ids alone."""
        choices = range(request.params.n)
        self._wanted = wanted
        self._text = text
        self._started = time.monotonic()
        self.metrics = RequestMetrics(time.time())
        with_scores = wanted.logprobs is not None
        self.output = RequestOutput(
            request.id,
            prompt,
            request.prompt_ids,
            [
                CompletionOutput(index, logprobs=[] if with_scores else None, lora_request=request.adapter)
                for index in choices
            ],
            prompt_logprobs=None if wanted.prompt_logprobs is None else [None],
            metrics=self.metrics,
            lora_request=request.adapter,
        )
        self.is_counted = False
        self._scores: list[list[Logprobs]] = [[] for _ in choices]
        self._streams: list[TextStream | None] = [
            text.stream(request.params, request.prompt_ids) if text is not None else None for _ in choices
        ]

    @property
    def is_done(self) -> bool:
        return all(choice.finish_reason is not None for choice in self.output.outputs)

    def keep_best(self) -> None:
        """Keep the choices that the caller asked for. To be called once all choices have ended."""
        outputs = self.output.outputs
        for choice, scores in zip(outputs, self._scores, strict=True):
            if scores and choice.cumulative_logprob is None:
                choice.cumulative_logprob = sum(entry.logprobs[0] for entry in scores)
        if len(outputs) > self._wanted.n:
            ranked = [_Scored(*its) for its in zip(range(len(outputs)), self._scores, outputs, strict=True)]
            best = likeliest(ranked, self._wanted.n)
            self.output.outputs = [each.output for each in best]
            for each in best:
                each.output.index = each.index
        self.output.finished = True

    def take(self, delta: TokenDelta) -> bool:
        """Add a delta. True: a stop string ended the choice, so the engine must stop it."""
        if delta.finish is not None and delta.finish.reason == "error":
            raise failure_of(delta.finish)
        choice, stream = self.output.outputs[delta.index], self._streams[delta.index]
        if choice.finish_reason is not None:
            return False
        choice.token_ids += delta.token_ids
        self._scores[delta.index] += delta.logprobs
        if choice.logprobs is not None:
            choice.logprobs += self._shown(delta.logprobs, self._wanted.logprob_token_ids)
        self._add_prompt_scores(delta)
        if delta.token_ids:
            self._count(len(delta.token_ids))
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

    def _add_prompt_scores(self, delta: TokenDelta) -> None:
        """A request that began again sends some scores again, from `num_scored` on."""
        if delta.prompt_logprobs and self.output.prompt_logprobs is not None:
            self.output.prompt_logprobs[1 + delta.num_scored :] = self._shown(delta.prompt_logprobs)

    def _count(self, num_tokens: int) -> None:
        now, metrics = time.monotonic(), self.metrics
        if not metrics.num_generation_tokens:
            metrics.first_token_ts, metrics.first_token_latency = now, now - self._started
        metrics.num_generation_tokens += num_tokens
        metrics.last_token_ts = now

    def _shown(self, entries: Sequence[Logprobs], asked: Sequence[int] = ()) -> list[TokenLogprobs]:
        return [self._by_id(entry, asked) for entry in entries]

    def _by_id(self, entry: Logprobs, asked: Sequence[int]) -> TokenLogprobs:
        """`asked`: tokens that the entry has instead of the most likely."""
        found: TokenLogprobs = {}
        ranks: list[int | None] = [entry.rank, *range(1, len(entry.token_ids))]
        if asked:  # these come in the order in which they were asked for
            ranks = [entry.rank, *[None] * len(asked)]
        for token, logprob, rank in zip(entry.token_ids, entry.logprobs, ranks, strict=True):
            spelled = None if self._text is None else self._text.spell(token).decode("utf-8", "replace")
            found.setdefault(token, Logprob(logprob, rank, spelled))
        return found
