"""What LLM and AsyncLLM share: their options as a configuration, the model's text, and prompts and parameters as requests."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from octavo import config as configuration
from octavo.admission.validate import admit
from octavo.errors import ConfigError, Field, InvalidRequest
from octavo.foreign_flags import translate_options
from octavo.messages import EngineReport, GenerateRequest
from octavo.messages import SamplingParams as EngineParams
from octavo.messages.params import choice_seed
from octavo.offline.params import SamplingParams, for_engine, of_offline
from octavo.offline.prompts import OfflinePrompt
from octavo.text import Text, load_text
from octavo.text.chat.template import ChatTemplate
from octavo.text.chat.tools import parse_tools, template_form
from octavo.text.grammar.build import grammar_of
from octavo.text.grammar.limits import STACK_BYTES, on_stack
from octavo.weights.sources.source import ModelSource, resolve

Message = Mapping[str, Any]
_OF_SERVERS = ("server", "budget", "batches", "recorder")  # sections of the configuration that only a server has


def read_options(model: str, options: Mapping[str, Any]) -> configuration.Config:
    """The configuration of keyword arguments: any option of the configuration that is not the server's, and vLLM's. Options of vLLM
    without effect here are warned of; others are refused with the reason, and an unknown one with the nearest name."""
    own = {name for section, _ in configuration.sections() for name in configuration.field_names(section)}
    of_servers = {name for section in _OF_SERVERS for name in configuration.field_names(section)}
    for name in options:
        if name in of_servers:
            raise ConfigError(f"{name} is an option of the server, which LLM does not start: leave it out")
    found, notes, refusal = translate_options(options, own)
    if refusal:
        raise ConfigError(refusal)
    for name in found:
        if name not in own:
            raise configuration.unknown_option(name, own - of_servers)
    for note in notes:
        warnings.warn(note, stacklevel=3)  # the line that makes the LLM
    return configuration.replace(configuration.Config(), model=model, **found)


def source_of(config: configuration.Config) -> ModelSource:
    model = config.model
    return resolve(
        model.model,
        model.revision,
        allow_missing_weights=model.load_format == "dummy",
        download_dir=model.download_dir,
    )


class RequestBuilder:
    """Builds the engine's requests for one model."""

    def __init__(self, config: configuration.Config, source: ModelSource, report: EngineReport) -> None:
        self._config, self._source, self.report = config, source, report
        self._text: Text | None = None
        self._num_requests = 0

    @property
    def text(self) -> Text:
        """Tokenizer and chat template. Loaded on first use: prompts of token ids do not need them."""
        if self._text is None:
            model = self._config.model
            self._text = load_text(
                self._source.path,
                tokenizer=model.tokenizer,
                chat_template=model.chat_template,
                default_chat_template_kwargs=model.default_chat_template_kwargs,
                default_sampling=self._source.default_sampling,
                generation_config=model.generation_config,
                override_generation_config=model.override_generation_config,
                hf_overrides=model.hf_overrides,
            )
            self._text.require_fit(self.report.vocab_size)
        return self._text

    @property
    def loaded_text(self) -> Text | None:
        """None: nothing has needed it so far."""
        return self._text

    def take_number(self, count: int = 1) -> int:
        """The next request's number. It is part of the seed, so that runs are repeatable."""
        self._num_requests += count
        return self._num_requests - count

    def default_params(self) -> SamplingParams:
        """The sampling parameters of the model's own configuration, with as many tokens as fit."""
        return SamplingParams(**{"max_tokens": None, **self.text.default_sampling})  # type: ignore[arg-type]

    def params_for(self, count: int, params: EngineParams | Sequence[EngineParams] | None) -> list[SamplingParams]:
        """One for each of `count` prompts."""
        if params is None:
            return [self.default_params()] * count
        if isinstance(params, EngineParams):
            return [of_offline(params)] * count
        if not isinstance(params, Sequence) or not all(isinstance(each, EngineParams) for each in params):
            raise InvalidRequest("sampling_params must be SamplingParams, or a list of these", param="sampling_params")
        if len(params) != count:
            raise InvalidRequest(
                f"{count} prompts need one or {count} SamplingParams, got {len(params)}", param="sampling_params"
            )
        return [of_offline(each) for each in params]

    def request(
        self, prompt: OfflinePrompt, params: SamplingParams, priority: int = 0, request_id: str = ""
    ) -> GenerateRequest:
        """`request_id` empty: one is made."""
        number = self.take_number()
        ids = self.text.encode(prompt.text or "") if prompt.ids is None else prompt.ids
        wanted, made = params, for_engine(params)
        if made.seed is None:  # offline runs are repeatable: the n-th request of a given --seed samples the same
            made = msgspec.structs.replace(made, seed=choice_seed(self._config.model.seed, number))
        if made.bad_words:
            made = msgspec.structs.replace(made, bad_word_ids=self.text.bad_word_ids(made.bad_words))
        if made.structured_outputs:
            # Compiled here and not in a sandbox: the caller trusts its own grammar, which runs with the caller's rights.
            wish, vocabulary = made.structured_outputs, self.text.vocabulary
            grammar = on_stack(STACK_BYTES, lambda: grammar_of(wish, vocabulary))
            made = msgspec.structs.replace(made, grammar=grammar)
        if wanted.truncate_prompt_tokens is not None:
            ids = self._cut(ids, wanted)
        has_text = self._text is not None or not made.ignore_eos or bool(made.stop or made.grammar)
        eos_ids = self.text.eos_ids if has_text else ()
        return admit(request_id or f"offline-{number}", ids, made, self.report, eos_ids, priority=priority)

    def _cut(self, ids: list[int], params: SamplingParams) -> list[int]:
        """The end of a prompt, which generation continues."""
        keep, longest = params.truncate_prompt_tokens, self.report.max_model_len - (params.max_tokens or 1)
        return ids[-(max(1, longest) if keep == -1 else keep or 1) :]

    def text_for(self, params: SamplingParams) -> Text | None:
        """What detokenizes an output. None: the caller wants token ids alone, or nothing has needed a tokenizer."""
        return self._text if params.detokenize else None

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        chat_template: str | None,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        chat_template_kwargs: Mapping[str, Any] | None,
    ) -> OfflinePrompt:
        """The prompt of a conversation, as text and as token ids."""
        if continue_final_message:
            last = messages[-1]
            if last.get("role") != "assistant" or not isinstance(last.get("content"), str):
                raise InvalidRequest(
                    Field("continue_final_message") + " needs a last message of the assistant, with text"
                )
        text = self.text
        if chat_template is not None:
            # Jinja's sandbox is enough: the caller could run any code.
            text = text.with_template(ChatTemplate({"default": chat_template}, text.template_variables))
        described = template_form(parse_tools(list(tools))) if tools else None
        given = dict(chat_template_kwargs or {})
        if reserved := given.keys() & {"messages", "tools", "add_generation_prompt", "continue_final_message"}:
            raise InvalidRequest(f"chat_template_kwargs must not set {sorted(reserved)[0]}", "chat_template_kwargs")
        call = text.render_call(
            messages, add_generation_prompt and not continue_final_message, continue_final_message, described, given
        )
        return OfflinePrompt(text.rendered(call), text.encode_called(call))
