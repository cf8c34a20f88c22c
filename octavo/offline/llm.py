"""LLM: the engine as a Python object: generate, chat, embed and stream, without a server. It drives the same loop that serves
requests."""

import gc
import json
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import msgspec

from octavo import config as configuration
from octavo.admission.pairs import PairPrompts, Texts, check_sides, classification, dot, score_pooling
from octavo.admission.validate import admit_embedding, choose_pooling, cut_to, longest_embedding
from octavo.engine.build import start_engine
from octavo.errors import EngineDead, InvalidRequest
from octavo.messages import Abort, BeamSearchParams, GenerateRequest, PoolingParams, StructuredOutputsParams, TokenDelta
from octavo.messages import SamplingParams as EngineParams
from octavo.offline.lora import LoRARequests, read_adapters
from octavo.offline.outputs import (
    Answer,
    BeamSearchOutput,
    BeamSearchSequence,
    ClassificationOutput,
    EmbeddingOutput,
    RequestOutput,
    ScoringOutput,
    Vector,
)
from octavo.offline.params import SamplingParams
from octavo.offline.prompts import OfflinePrompt, Prompt, read_prompt, read_prompts
from octavo.offline.requests import Message, RequestBuilder, read_options, source_of
from octavo.offline.tokenizer import OfflineTokenizer
from octavo.offline.vllm_names import missing
from octavo.text import Text, TextDelta
from octavo.text.grammar.limits import STACK_BYTES, on_stack
from octavo.text.grammar.validate import is_valid
from octavo.text.pooling_config import PoolingConfig, read_pooling_config

_COLLECT_AFTER = 50_000  # new objects


class LLM:
    """`LLM()` runs the embedded model; `LLM("folder", max_model_len="8k", …)` takes any option of the configuration, and vLLM's."""

    def __init__(self, model: str = "", **options: Any) -> None:
        self.config = configuration.offline(read_options(model, options))
        source = source_of(self.config)
        self.model_name = self.config.model.name_of(source.name)
        self._loop, self.report, _ = start_engine(self.config, source, self.model_name)
        self._source = source
        self._requests = RequestBuilder(self.config, source, self.report)
        self._boxes: dict[str, list[TokenDelta]] = {}  # open request → the list that its deltas are appended to
        self._failure: EngineDead | None = None
        self._peak_pages = 0
        self._next_look = 0.0  # when slot use is measured again
        self._slots: list[int] = [0, 0]  # filled and allocated KV slots, summed over the measured steps

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self, name)

    @property
    def text(self) -> Text:
        """Tokenizer and chat template. Loaded on first use: prompts of token ids do not need them."""
        return self._requests.text

    def get_tokenizer(self) -> OfflineTokenizer:
        """The model's tokenizer, with the methods of transformers' that scripts use."""
        return OfflineTokenizer(self.text)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: EngineParams | Sequence[EngineParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Complete every prompt: a text, token ids, {"prompt": …} or {"prompt_token_ids": …}; outputs come in the order of the prompts.
        `priority`: one number for each prompt, lower first, if `scheduling_policy` is "priority". `lora_request`: the adapter to complete
        them with, or one (or None) for each."""
        every = read_prompts(prompts, prompt_token_ids)
        wanted = self._requests.params_for(len(every), sampling_params)
        if priority is not None and len(priority) != len(every):
            raise InvalidRequest(f"{len(every)} prompts need {len(every)} priorities, got {len(priority)}", "priority")
        ranks = priority or [0] * len(every)
        requests = [self._requests.request(*its) for its in zip(every, wanted, ranks, strict=True)]
        return self._run(self._adapted(requests, lora_request), wanted, every, use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """Find the `beam_width` best continuations of each prompt, as transformers' beam search does."""
        outputs = self.generate(prompts, params.sampling(), use_tqdm=use_tqdm)
        return [self._beams_of(output) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: EngineParams | Sequence[EngineParams] | None = None,
        use_tqdm: bool = True,
        *,
        lora_request: LoRARequests = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several. `tools`: as in OpenAI's API; an answer that calls one is text. `lora_request`: the adapter
        to answer with, or one (or None) for each conversation."""
        if not messages:
            raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
        conversations: Any = [messages] if isinstance(messages[0], Mapping) else messages
        wanted = self._requests.params_for(len(conversations), sampling_params)
        prompts = [
            self._requests.chat_prompt(
                conversation,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )
            for conversation in conversations
        ]
        requests = [self._requests.request(*its) for its in zip(prompts, wanted, strict=True)]
        return self._run(self._adapted(requests, lora_request), wanted, prompts, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """Compute one vector for each prompt (text or token ids), in their order. `pooling` ("cls", "mean", "last") and
        `normalize` default to the model's own configuration; `dimensions` keeps only that many leading numbers. A prompt that is
        too long is refused, or truncated at its end to `truncate_prompt_tokens` tokens (-1: as many as the model takes)."""
        every = read_prompts(prompts)
        pooling_config = (
            self.text.pooling_config if any(prompt.ids is None for prompt in every) else self._pooling_config()
        )
        params = choose_pooling(pooling_config, self.report, pooling, normalize, dimensions)
        longest = cut_to(truncate_prompt_tokens, longest_embedding(params, pooling_config, self.report))
        given = [(prompt.text, self._ids_of(prompt, longest), params) for prompt in every]
        return self._pooled(given, pooling_config, use_tqdm)

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationOutput]:
        """The numbers of a sequence classifier's labels for each prompt (text or token ids), in their order. `use_activation` False: before
        the activation, which makes them probabilities."""
        params = classification(self.text, self.report, use_activation)
        config = self.text.pooling_config
        longest = cut_to(truncate_prompt_tokens, longest_embedding(params, config, self.report))
        given = [(prompt.text, self._ids_of(prompt, longest), params) for prompt in read_prompts(prompts)]
        return [
            ClassificationOutput(each.request_id, each.prompt, each.prompt_token_ids, each.embedding)
            for each in self._pooled(given, config, use_tqdm)
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        use_activation: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringOutput]:
        """How well texts fit together: one text of the first side with each of the second, or as many of both. A cross-encoder (a sequence
        classifier with one label) reads both at once; with any other model it is the cosine of their vectors."""
        firsts, seconds = Texts.of(data_1, "data_1"), Texts.of(data_2, "data_2")
        check_sides(firsts, seconds)
        text, config = self.text, self.text.pooling_config
        params = score_pooling(text, self.report, use_activation)
        longest = longest_embedding(params, config, self.report)
        prompts = PairPrompts(text, params, longest, cut_to(truncate_prompt_tokens, longest))
        if params.kind == "classify":
            pairs = self._pooled([(None, *its[1:]) for its in prompts.pairs(firsts, seconds)], config, use_tqdm)
            return [ScoringOutput(each.request_id, each.prompt_token_ids, each.embedding[0]) for each in pairs]
        made = [*prompts.alone(firsts), *prompts.alone(seconds)]
        found = self._pooled([(None, *its[1:]) for its in made], config, use_tqdm)
        heads, others = found[: len(firsts.texts)], found[len(firsts.texts) :]
        heads = heads * len(others) if len(heads) == 1 else heads
        return [
            ScoringOutput(
                other.request_id,
                [*head.prompt_token_ids, *other.prompt_token_ids],
                dot(head.embedding, other.embedding),
            )
            for head, other in zip(heads, others, strict=True)
        ]

    def _pooled(
        self, given: Sequence[tuple[str | None, list[int], PoolingParams]], config: PoolingConfig, use_tqdm: bool
    ) -> list[EmbeddingOutput]:
        """`given`: (text, ids, pooling) of each prompt."""
        answers: dict[str, Vector] = {}
        requests: list[GenerateRequest] = []
        for number, (text, ids, params) in enumerate(given, self._requests.take_number(len(given))):
            requests.append(admit_embedding(f"offline-{number}", ids, params, config, self.report))
            answers[requests[-1].id] = Vector(EmbeddingOutput(requests[-1].id, text, ids))
        self._collect(requests, answers, use_tqdm)
        return [answers[request.id].output for request in requests]

    def stream(self, prompt: Prompt, sampling_params: EngineParams | None = None) -> Iterator[TextDelta]:
        """Yield one prompt's text as it is generated. Leaving the iterator early aborts the request; several may be open at
        once."""
        return self._stream(self._single(self._request(prompt, sampling_params)))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: EngineParams | None = None
    ) -> Iterator[TextDelta]:
        return self._stream(self._single(self._request(self.text.encode_chat(messages), sampling_params)))

    def default_params(self) -> SamplingParams:
        """The sampling parameters of the model's own configuration, with as many tokens as fit."""
        return self._requests.default_params()

    def get_default_sampling_params(self) -> SamplingParams:
        """The same, by vLLM's name."""
        return self.default_params()

    def engine_stats(self) -> dict[str, float]:
        """Statistics of all steps so far: pages, their use, steps, preemptions."""
        cache = self._loop.scheduler.cache
        return {
            "num_pages": self.report.num_pages,
            "pages_used_peak": self._peak_pages,
            "slot_use_ratio": self._slots[0] / self._slots[1] if self._slots[1] else 1.0,
            "steps": self._loop.scheduler.num_steps,
            "preemptions": self._loop.scheduler.num_preemptions,
            "prefix_hit_tokens": cache.hit_tokens,
            "prefix_queried_tokens": cache.queried_tokens,
        }

    def reset_prefix_cache(self) -> int:
        """Empty the prefix cache. Returns how many pages it held."""
        return self._loop.scheduler.cache.reset_prefixes()

    def close(self) -> None:
        self._loop.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # ── private ──

    def _request(self, prompt: Prompt, sampling_params: EngineParams | None) -> GenerateRequest:
        (wanted,) = self._requests.params_for(1, sampling_params)
        return self._requests.request(read_prompt(prompt), wanted)

    def _single(self, request: GenerateRequest) -> GenerateRequest:
        if request.params.n != 1:
            raise InvalidRequest(f"a stream has one choice: n must be 1, got {request.params.n}", param="n")
        return request

    def _adapted(self, requests: list[GenerateRequest], given: LoRARequests) -> list[GenerateRequest]:
        adapters = read_adapters(given, len(requests), self.config.lora)
        return [msgspec.structs.replace(one, adapter=ref) for one, ref in zip(requests, adapters, strict=True)]

    def _run(
        self,
        requests: list[GenerateRequest],
        wanted: Sequence[SamplingParams],
        prompts: Sequence[OfflinePrompt],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        answers = {
            request.id: Answer(request, prompt.text, self._requests.text_for(params), params)
            for request, prompt, params in zip(requests, prompts, wanted, strict=True)
        }
        self._collect(requests, answers, use_tqdm)
        for answer in answers.values():
            answer.keep_best()
        for request, params in zip(requests, wanted, strict=True):
            if params.structured_outputs and params.structured_outputs.get("unenforced") == "check":
                _check_answers(answers[request.id].output, params.structured_outputs)
        return [answers[request.id].output for request in requests]

    def _beams_of(self, output: RequestOutput) -> BeamSearchOutput:
        sequences = []
        for choice in output.outputs:
            tokens = output.prompt_token_ids + choice.token_ids
            text = None if (words := self._requests.loaded_text) is None else words.decode(tokens)
            ends = (choice.finish_reason, choice.stop_reason)
            scores = choice.logprobs or []
            sequences.append(BeamSearchSequence(tokens, scores, choice.cumulative_logprob or 0.0, text, *ends))
        return BeamSearchOutput(sequences)

    def _collect(self, requests: list[GenerateRequest], answers: Mapping[str, Answer | Vector], use_tqdm: bool) -> None:
        """Submit the requests and step until every answer is complete."""
        from tqdm import tqdm

        box: list[TokenDelta] = []
        num_open = len(requests)
        with _rare_collections(), tqdm(total=num_open, disable=not use_tqdm, desc="prompts", dynamic_ncols=True) as bar:
            try:
                # One response: choices follow their prompt at once, while its pages are at hand, before later prompts.
                for part, request in enumerate(requests):
                    self._submit(msgspec.structs.replace(request, response_id=requests[0].id, part=part), box)
                while num_open:
                    for delta in self._next(box):
                        answer = answers[delta.request_id]
                        if answer.take(delta):
                            self._loop.abort(Abort(delta.request_id, delta.index, "stop"))
                        if answer.is_done and not answer.is_counted:
                            answer.is_counted = True
                            num_open -= 1
                            bar.update()
            finally:  # also after Ctrl-C the engine is left empty and usable
                for request in requests:
                    self._withdraw(request)

    def _pooling_config(self) -> PoolingConfig:
        """Read the pooling configuration without loading a tokenizer: prompts of token ids do not need one."""
        text = self._requests.loaded_text
        return text.pooling_config if text is not None else read_pooling_config(self._source.path)

    def _ids_of(self, prompt: OfflinePrompt, longest: int | None) -> list[int]:
        """Token ids of a prompt, truncated to `longest` tokens (None: not truncated)."""
        if prompt.ids is not None:
            return prompt.ids[:longest]
        text = prompt.text or ""
        return self.text.encode(text) if longest is None else self.text.encode_cut(text, longest)

    def _stream(self, request: GenerateRequest) -> Iterator[TextDelta]:
        stream = self.text.stream(request.params, request.prompt_ids)
        box: list[TokenDelta] = []
        self._submit(request, box)
        try:
            while True:
                for delta in self._next(box):
                    piece = stream.push(delta.token_ids, delta.finish)
                    if piece.text or piece.finish_reason is not None:
                        yield piece
                    if piece.finish_reason is not None:
                        return
        finally:
            self._withdraw(request)

    def _submit(self, request: GenerateRequest, box: list[TokenDelta]) -> None:
        self._boxes[request.id] = box
        self._loop.add(request)

    def _withdraw(self, request: GenerateRequest) -> None:
        if self._boxes.pop(request.id, None) is not None:
            self._loop.abort(Abort(request.id))

    def _next(self, box: list[TokenDelta]) -> list[TokenDelta]:
        """Step until `box` has deltas, then empty it and return them. Other open requests advance as well."""
        while not box:
            self._step()
        deltas = box[:]
        box.clear()
        return deltas

    def _step(self) -> None:
        if self._failure is not None:
            raise self._failure
        with _uninterrupted_steps():
            try:
                for delta in self._loop.step():
                    self._boxes[delta.request_id].append(delta)
            except BaseException as error:  # a partial step cannot be undone
                self._failure = EngineDead(f"the engine failed in an earlier step: {type(error).__name__}: {error}")
                raise
        scheduler = self._loop.scheduler
        self._peak_pages = max(self._peak_pages, scheduler.cache.pool.num_used)
        if (started := time.perf_counter()) >= self._next_look:
            filled, allocated = scheduler.slot_use()
            self._slots[0] += filled
            self._slots[1] += allocated
            # slot_use() walks every page: wait so that it takes at most a hundredth of the time.
            now = time.perf_counter()
            self._next_look = now + 100 * (now - started)


@contextmanager
def _uninterrupted_steps() -> Iterator[None]:
    """Delay Ctrl-C to the end of the step: an exception in the middle of one would leave the engine in an inconsistent state."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[tuple[int, FrameType | None]] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: came.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if previous is None else previous)
    if came and callable(previous):
        previous(*came[0])


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Look for cyclic garbage rarely, as the engine's own process does: steps make none, and each look goes through the prompts of all
    requests that have come since the last. Of two threads in here, the first one that came sets it back."""
    before = gc.get_threshold()
    is_rarer = 0 < before[0] < _COLLECT_AFTER
    if is_rarer:
        gc.set_threshold(_COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        if is_rarer:
            gc.set_threshold(*before)


def _check_answers(output: RequestOutput, wish: StructuredOutputsParams) -> None:
    """Note whether each choice satisfies the whole schema."""
    schema = wish.get("json") or {"type": "object"}
    if isinstance(schema, str):
        schema = json.loads(schema)
    for choice in output.outputs:
        choice.schema_valid = on_stack(STACK_BYTES, lambda text=choice.text: is_valid(schema, text))  # type: ignore[misc]
