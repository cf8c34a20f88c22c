"""AsyncLLM: the engine on a thread of this process, for asyncio: every request is a stream of outputs, and any number run at once."""

import asyncio
import copy
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec

from octavo.engine.build import start_engine
from octavo.engine.in_process_client import InProcessClient
from octavo.errors import EngineDead, InvalidRequest
from octavo.messages import AdapterRef, GenerateRequest, Ping, ResetPrefixCache
from octavo.messages import SamplingParams as EngineParams
from octavo.offline.lora import LoRARequest, read_adapters
from octavo.offline.outputs import Answer, RequestOutput
from octavo.offline.params import RequestOutputKind, SamplingParams
from octavo.offline.prompts import OfflinePrompt, Prompt, read_prompt
from octavo.offline.requests import Message, RequestBuilder, read_options, source_of
from octavo.offline.tokenizer import OfflineTokenizer
from octavo.offline.vllm_names import missing

T = TypeVar("T")

LONG_TEXT = 10_000  # characters: longer prompts are tokenized in a thread, so that streams go on meanwhile
MAX_ID_LEN = 256


class AsyncEngineArgs:
    """The options of an AsyncLLM: AsyncLLM.from_engine_args(AsyncEngineArgs(model="…")), as in vLLM."""

    def __init__(self, model: str = "", **options: Any) -> None:
        self.model, self.options = model, options


class AsyncLLM:
    """Takes the options of LLM. It belongs to the event loop that uses it first."""

    def __init__(self, model: str = "", **options: Any) -> None:
        self.config = read_options(model, options)
        source = source_of(self.config)
        self.model_name = self.config.model.name_of(source.name)
        self._engine = start_engine(self.config, source, self.model_name)
        self.report = self._engine.report
        self._requests = RequestBuilder(self.config, source, self.report)
        self._client: InProcessClient | None = None  # made on the event loop
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._open: set[str] = set()  # ids of requests whose stream is being read
        self._is_closed = False

    if not TYPE_CHECKING:  # a type checker knows the attributes

        def __getattr__(self, name: str) -> NoReturn:
            raise missing(self, name)

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> "AsyncLLM":
        return cls(engine_args.model, **engine_args.options)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: EngineParams | None = None,
        request_id: str = "",
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt. Yields its output as it grows: all of it so far, what is new, or once at the end, as
        SamplingParams.output_kind says; the last one is `finished`. Leaving the generator aborts the request. With best_of or a beam
        search there is only the last one."""
        read = read_prompt(prompt)
        (wanted,) = self._requests.params_for(1, sampling_params)
        (adapter,) = read_adapters(lora_request, 1, self.config.lora)
        async with aclosing(self._answer(read, wanted, request_id, priority, adapter)) as outputs:
            async for output in outputs:
                yield output

    async def chat(
        self,
        messages: Sequence[Message],
        sampling_params: EngineParams | None = None,
        request_id: str = "",
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, in the same way."""
        if not messages:
            raise InvalidRequest("messages is empty: at least one message is needed", param="messages")
        (wanted,) = self._requests.params_for(1, sampling_params)

        def render() -> OfflinePrompt:
            return self._requests.chat_prompt(
                messages,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tools=tools,
                chat_template_kwargs=chat_template_kwargs,
            )

        prompt = await _aside(sum(len(str(message.get("content"))) for message in messages), render)
        async with aclosing(self._answer(prompt, wanted, request_id, priority)) as outputs:
            async for output in outputs:
                yield output

    async def abort(self, request_id: str) -> None:
        """End a request. Its generator yields what there is, with the finish reason "abort". Does nothing for an unknown id."""
        if request_id in self._open and self._client is not None:
            self._client.abort(request_id)

    async def get_tokenizer(self) -> OfflineTokenizer:
        """The model's tokenizer, with the methods of transformers' that scripts use."""
        return OfflineTokenizer(self._requests.text)

    async def check_health(self) -> None:
        """Raise EngineDead unless the engine's loop answers."""
        await self._connected().control(Ping(call=0))

    async def reset_prefix_cache(self) -> int:
        """Empty the prefix cache. Returns how many pages it held."""
        return int(await self._connected().control(ResetPrefixCache(call=0)))

    def shutdown(self) -> None:
        """End the engine, once its current step is over. Open requests end with EngineDead."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._client is None:
            self._engine.loop.close()
        else:
            self._client.fail_open(EngineDead("the AsyncLLM was shut down"))
            self._client.close()

    async def __aenter__(self) -> "AsyncLLM":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.shutdown()

    # ── private ──

    def _connected(self) -> InProcessClient:
        """The client, made on the first call: it delivers to the event loop that it was made on."""
        loop = asyncio.get_running_loop()
        if self._is_closed:
            raise EngineDead("the AsyncLLM was shut down")
        if self._client is None:
            self._client, self._event_loop = InProcessClient(self._engine), loop
        if self._event_loop is not loop:
            raise EngineDead("this AsyncLLM belongs to another event loop: use it from the one that used it first")
        return self._client

    async def _answer(
        self,
        prompt: OfflinePrompt,
        wanted: SamplingParams,
        request_id: str,
        priority: int,
        adapter: AdapterRef | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        client = self._connected()
        if len(request_id) > MAX_ID_LEN:
            raise InvalidRequest(f"request_id must have at most {MAX_ID_LEN} characters", param="request_id")
        if request_id in self._open:
            raise InvalidRequest(f"request_id {request_id[:60]!r} is in use by an open request", param="request_id")
        request: GenerateRequest = await _aside(
            len(prompt.text or ""), lambda: self._requests.request(prompt, wanted, priority, request_id)
        )
        request = msgspec.structs.replace(request, adapter=adapter)
        if request.id in self._open:  # another request has taken it meanwhile
            raise InvalidRequest(f"request_id {request.id[:60]!r} is in use by an open request", param="request_id")
        answer = Answer(request, prompt.text, self._requests.text_for(wanted), wanted)
        kind = wanted.output_kind
        if wanted.use_beam_search or wanted.num_sequences > wanted.n:
            kind = RequestOutputKind.FINAL_ONLY  # which choices are the best is known at the end
        sent = _Sent(answer.output)
        self._open.add(request.id)
        try:
            client.submit(request)
            async with aclosing(client.deltas(request.id)) as steps:
                async for deltas in steps:
                    for delta in deltas:
                        if answer.take(delta):  # a stop string, which only this side looks for
                            client.abort(request.id, delta.index, "stop")
                    if answer.is_done:
                        break
                    if kind is RequestOutputKind.CUMULATIVE:
                        yield _snapshot(answer.output)
                    elif kind is RequestOutputKind.DELTA and (new := sent.take(answer.output)) is not None:
                        yield new
        finally:
            self._open.discard(request.id)
        for choice in answer.output.outputs:
            choice.finish_reason = choice.finish_reason or "abort"
        answer.keep_best()
        last = sent.take(answer.output) if kind is RequestOutputKind.DELTA else answer.output
        assert last is not None
        yield last


class _Sent:
    """How much of an output has been sent in deltas."""

    def __init__(self, output: RequestOutput) -> None:
        self._lens = [(0, 0) for _ in output.outputs]  # characters and tokens of each choice
        self._ended: set[int] = set()

    def take(self, output: RequestOutput) -> RequestOutput | None:
        """What is new since the last call: the choices with new tokens, or that have ended. None: nothing."""
        new = []
        for choice in output.outputs:
            num_characters, num_tokens = self._lens[choice.index]
            has_ended = choice.finished() and choice.index not in self._ended
            if len(choice.token_ids) > num_tokens or has_ended or (output.finished and choice.index not in self._ended):
                part = copy.copy(choice)
                part.text, part.token_ids = choice.text[num_characters:], choice.token_ids[num_tokens:]
                part.logprobs = None if choice.logprobs is None else choice.logprobs[num_tokens:]
                new.append(part)
                self._lens[choice.index] = (len(choice.text), len(choice.token_ids))
                self._ended |= {choice.index} if choice.finished() else set()
        if not new and not output.finished:
            return None
        found = copy.copy(output)
        found.outputs = new
        return found


def _snapshot(output: RequestOutput) -> RequestOutput:
    """A copy that does not grow any more."""
    found = copy.copy(output)
    found.metrics = copy.copy(output.metrics)
    found.outputs = []
    for choice in output.outputs:
        part = copy.copy(choice)
        part.token_ids = choice.token_ids.copy()
        part.logprobs = None if choice.logprobs is None else choice.logprobs.copy()
        found.outputs.append(part)
    return found


async def _aside(num_characters: int, work: Callable[[], T]) -> T:
    return await asyncio.to_thread(work) if num_characters > LONG_TEXT else work()
