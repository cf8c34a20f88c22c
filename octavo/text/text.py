"""Text: all text operations for one model: encode, decode, render a chat, stream an output. load.py builds it."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from octavo.errors import ConfigError, ContextTooLong, Field, InvalidRequest, RequestError, Unsupported
from octavo.messages import SamplingParams
from octavo.text.chat.template import ChatTemplate, DescribedTemplate
from octavo.text.chat.tool_prompt import spell_out
from octavo.text.classifier_config import ClassifierConfig
from octavo.text.formats import AnswerFormats, choose_formats
from octavo.text.pooling_config import PoolingConfig
from octavo.text.stream import TextStream
from octavo.text.tokenize.tokenizer import PairForm, Tokenizer
from octavo.text.tokenize.vocabulary import Vocabulary
from octavo.text.tokenize.windows import WINDOW

_MAX_SHRINKING = 4
"""Normalizing may shorten a text before it is tokenized (by composing characters), by less than this factor."""


_END = "\ue000\ue001\ue000"
"""Marks the end of the text of a message that is to be continued: private-use characters. The last occurrence counts."""


@dataclass(frozen=True, slots=True)
class RenderCall:
    """What a chat template is called with."""

    messages: list[dict[str, Any]]
    add_generation_prompt: bool
    tools: list[dict[str, Any]] | None
    variables: dict[str, Any]
    is_open: bool  # the last message is to be continued


class Text:
    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | DescribedTemplate,
        eos_ids: Sequence[int],
        default_sampling: Mapping[str, float | int] | None = None,
        pooling_config: PoolingConfig | None = None,
        formats: AnswerFormats | None = None,
        classifier_config: ClassifierConfig | None = None,
    ) -> None:
        self.vocab_size = tokenizer.vocab_size
        self.eos_ids: tuple[int, ...] = tuple(eos_ids)
        self.default_sampling: dict[str, float | int] = dict(default_sampling or {})  # names of SamplingParams
        self.pooling_config = pooling_config or PoolingConfig()
        self.classifier_config = classifier_config or ClassifierConfig({})
        self.formats = formats or choose_formats(template)  # formats of tool calls and reasoning
        self._tokenizer = tokenizer
        self._template = template

    def require_fit(self, model_vocab_size: int) -> None:
        """Raise ConfigError if the tokenizer's vocabulary is larger than the model's. Some tokenizers add a token or two after the
        vocabulary that the model was not trained with: those are rejected when a request uses them."""
        if self._tokenizer.num_ordinary > model_vocab_size:
            raise ConfigError(
                f"the tokenizer has {self._tokenizer.num_ordinary} tokens, but the model's vocabulary has {model_vocab_size}: "
                "they do not belong together; give --tokenizer this model's own folder or file"
            )

    def encode(
        self, text: str, add_special_tokens: bool = True, *, param: str = "prompt", max_tokens: int | None = None
    ) -> list[int]:
        """Encode a text. `param`: the request's field that it came in, for error messages. A text that is too long for
        `max_tokens`, even if every token were the longest, is rejected without being tokenized. Text that reads like a control
        token becomes one, which is how completion prompts are written; chat messages go through encode_chat."""
        self._check(text, param, max_tokens)
        with _naming(param):
            return _fitting(self._tokenizer.encode(text, add_special_tokens, max_tokens), text, max_tokens)

    def encode_cut(self, text: str, max_tokens: int, *, param: str = "prompt") -> list[int]:
        """Encode like encode(), but cut at the end to `max_tokens`. Special tokens that the vocabulary adds around a text stay."""
        text = text[: max_tokens * self._tokenizer.longest_token * _MAX_SHRINKING]
        ids = self.encode(text, param=param)
        if len(ids) <= max_tokens:
            return ids
        inner = self._tokenizer.encode(text, False)
        around = len(ids) - len(inner)
        before = next((n for n in range(around + 1) if ids[n : n + len(inner)] == inner), 0)
        kept = inner[: max(0, max_tokens - around)]
        return [*ids[:before], *kept, *ids[before + len(inner) :]][:max_tokens]

    def encode_part(self, text: str, max_tokens: int, *, param: str, is_cut: bool = False) -> list[int]:
        """Encode one text of a pair, without special tokens. `is_cut`: what is beyond `max_tokens` is left out."""
        if not text:
            raise InvalidRequest(Field(param) + " is empty: at least one token is needed")
        if is_cut:
            text = text[: max_tokens * self._tokenizer.longest_token * _MAX_SHRINKING]
        ids = self.encode(text, False, param=param, max_tokens=None if is_cut else max_tokens)
        return ids[:max_tokens] if is_cut else ids

    @property
    def pair_form(self) -> PairForm:
        """How two texts become one prompt. Raises Unsupported if the vocabulary does not say it."""
        form = self._tokenizer.pair_form
        if form is None:
            raise Unsupported(
                "this model's vocabulary does not say how two texts become one prompt: serve it with its tokenizer.json"
            )
        return form

    def join_pair(
        self, first: Sequence[int], second: Sequence[int], max_tokens: int | None = None
    ) -> tuple[list[int], int]:
        """(ids of the pair, position at which tokens of the second type begin; 0: nowhere). `max_tokens`: tokens of the longer text are left
        out at its end until all fit, as the tokenizers library does by default."""
        form = self.pair_form
        if max_tokens is not None:
            num_first, num_second = _fit_pair(len(first), len(second), max(0, max_tokens - form.num_added))
            first, second = first[:num_first], second[:num_second]
        head = [*form.before, *first, *form.between]
        return [*head, *second, *form.after], len(head) if form.has_types else 0

    def _check(self, text: str, param: str, max_tokens: int | None) -> None:
        if max_tokens is not None and len(text) > max_tokens * _MAX_SHRINKING:
            limit = max_tokens * self._tokenizer.longest_token * _MAX_SHRINKING
            if len(text) > limit:
                raise ContextTooLong(
                    Field(param)
                    + f" has {len(text)} characters, which cannot fit into a context of {max_tokens} tokens"
                )
        if not text.isascii():
            try:
                text.encode("utf-8")
            except UnicodeEncodeError as error:
                raise InvalidRequest(
                    Field(param)
                    + f" is not valid Unicode: a lone surrogate (U+{ord(text[error.start]):04X}) at character {error.start}"
                ) from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens)

    def token_names(self, token_ids: Sequence[int]) -> list[str | None]:
        """Names of the tokens in the vocabulary: "Ġhello", "▁hello". None: no token has this id."""
        return [self._tokenizer.token_name(token_id) for token_id in token_ids]

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name in the vocabulary. None: there is none."""
        return self._tokenizer.token_id(name)

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, as far as they are known: at least those that end an output."""
        pieces = self._tokenizer.pieces
        return frozenset(self.eos_ids) if pieces is None else pieces.special_ids

    def spell(self, token_id: int) -> bytes:
        """Bytes that one token adds to a text: maybe only part of a character."""
        return self._tokenizer.spell(token_id)

    def bad_word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token ids of the words, at the start of a line and after a space. vLLM uses the second form only if it has as many
        tokens as the first: many words that are one token after a space are two tokens without it, and are not banned there."""
        found: list[list[int]] = []
        for word in words:
            unspaced = self._tokenizer.encode(word.lstrip(), False)
            spaced = self._tokenizer.encode(" " + word.lstrip(), False)
            found.append(unspaced)
            if unspaced and spaced[-len(unspaced) :] != unspaced:  # else the first ban covers both
                found.append(spaced)
        return tuple(map(tuple, found))

    @functools.cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary for grammars. Raises Unsupported if the model cannot be constrained by a grammar."""
        pieces = self._tokenizer.pieces
        if pieces is None:
            raise Unsupported("this model's tokens do not map to bytes one by one: grammars are not supported")
        if not self.eos_ids:
            raise Unsupported("this model has no end-of-sequence token: grammars are not supported")
        return Vocabulary(self.vocab_size, self._tokenizer.spell, pieces.special_ids, self.eos_ids)

    @property
    def has_chat_template(self) -> bool:
        return isinstance(self._template, DescribedTemplate) or self._template.is_there

    @property
    def template_variables(self) -> dict[str, Any]:
        """Variables that every chat template gets: bos_token, eos_token, …"""
        assert isinstance(self._template, ChatTemplate)
        return self._template.variables

    @property
    def template_source(self) -> str | None:
        """The chat template as Jinja text. None: there is none."""
        return self._template.source() if isinstance(self._template, ChatTemplate) and self.has_chat_template else None

    @property
    def tokenizer_kind(self) -> str:
        """The class that reads the vocabulary."""
        return type(self._tokenizer).__name__

    def template_reads(self, variable: str) -> bool:
        """Whether the chat template uses a variable of this name, such as enable_thinking."""
        return self._template.reads(variable)

    def with_template(self, template: ChatTemplate | DescribedTemplate) -> "Text":
        """Return this Text with a request's own chat template. The formats stay the model's own, because they come from its
        training. If the template shows tools in another format, tools are described in words."""
        shown, own = choose_formats(template), self.formats
        takes_tools = shown.template_takes_tools and shown.tools is own.tools
        formats = AnswerFormats(own.tools, own.thinking, takes_tools)
        return Text(
            self._tokenizer,
            template,
            self.eos_ids,
            self.default_sampling,
            self.pooling_config,
            formats,
            self.classifier_config,
        )

    @property
    def described_template(self) -> DescribedTemplate | None:
        """The request's own template, which is rendered in another process. None: this Text renders its template itself."""
        return self._template if isinstance(self._template, DescribedTemplate) else None

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        return self.rendered(
            self.render_call(messages, add_generation_prompt, continue_final_message, tools, variables)
        )

    def rendered(self, call: RenderCall) -> str:
        """The chat by render_call() as text, as people read it."""
        return self.shown(call, self._render(call))

    def shown(self, call: RenderCall, rendered: str) -> str:
        """What the template has rendered, as people read it."""
        return self._tokenizer.lookalikes.reveal(self._finished(call, rendered))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        max_tokens: int | None = None,
        **variables: Any,
    ) -> list[int]:
        """Render and encode a chat. No special tokens are added: the template writes the BOS itself if the model wants one. Only
        the template can write control tokens: text that reads like one in a message, a tool or a variable stays text."""
        call = self.render_call(messages, add_generation_prompt, continue_final_message, tools, variables)
        return self.encode_called(call, max_tokens)

    def encode_called(self, call: RenderCall, max_tokens: int | None = None) -> list[int]:
        """Render and encode a chat by render_call()."""
        return self.encode_rendered(call, self._render(call), max_tokens)

    def render_call(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any],
    ) -> RenderCall:
        """What the template is called with: look-alikes of control tokens are hidden (special_token_escape.py), and tools are
        described in messages if the template does not take any.

        It renders up to the beginning of the output, to the end of the last message, or to the end of its text. The latter is
        marked with _END, because a template may write anything after it and trim what is before it."""
        if continue_final_message:
            last = {**messages[-1], "content": messages[-1]["content"] + _END}
            messages, add_generation_prompt = [*messages[:-1], last], False
        if not self.formats.template_takes_tools and (tools or any(map(_is_about_tools, messages))):
            messages, tools = spell_out(messages, tools or (), self._template), None
        hide = self._tokenizer.lookalikes.hide
        try:
            return RenderCall(
                hide(messages),
                add_generation_prompt,
                hide(tools) if tools else None,
                hide(variables),
                continue_final_message,
            )
        except RecursionError:
            raise InvalidRequest(Field("messages") + " are nested too deeply") from None

    def encode_rendered(self, call: RenderCall, rendered: str, max_tokens: int | None = None) -> list[int]:
        """Encode what the template has rendered."""
        text = self._finished(call, rendered)
        self._check(text, "messages", max_tokens)
        with _naming("messages"):
            return _fitting(self._tokenizer.encode_chat(text, max_tokens), text, max_tokens)

    def revealed(self, error: InvalidRequest) -> InvalidRequest:
        """The error of a template, whose message may quote hidden text."""
        return InvalidRequest(error.sentence.reworded(self._tokenizer.lookalikes.reveal), error.field)

    def _render(self, call: RenderCall) -> str:
        assert isinstance(self._template, ChatTemplate), "a described template is rendered in another process"
        try:
            return self._template.render(
                call.messages, add_generation_prompt=call.add_generation_prompt, tools=call.tools, **call.variables
            )
        except InvalidRequest as error:
            raise self.revealed(error) from error

    def _finished(self, call: RenderCall, rendered: str) -> str:
        if not call.is_open:
            return rendered
        before, found, _ = rendered.rpartition(_END)
        if not found:
            raise InvalidRequest(
                "the chat template does not render the last message unchanged, so it cannot be continued",
                param="continue_final_message",
            )
        return before

    def stream(self, params: SamplingParams, prompt_ids: Sequence[int] = (), marks: Sequence[str] = ()) -> TextStream:
        """Return a stream for one choice, whose text continues the prompt's (detokenizer.py). `marks`: special tokens that are
        part of the text."""
        detokenizer = self._tokenizer.detokenizer(prompt_ids, params.skip_special_tokens, marks)
        return TextStream(detokenizer, params, self.eos_ids)


def _fit_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of two texts are kept, so that they have `room`: the longer one gives up its own first."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    kept = (shorter, room - shorter) if shorter <= room - shorter else (room // 2, room - room // 2)
    return kept if first <= second else (kept[1], kept[0])


def _fitting(ids: list[int], text: str, max_tokens: int | None) -> list[int]:
    """The ids. A long text with too many is rejected here, because some may be missing; a short one on admission."""
    if max_tokens is not None and len(ids) > max_tokens and len(text) > WINDOW:
        raise ContextTooLong(f"the text has more than {max_tokens} tokens, which is what the context holds")
    return ids


@contextmanager
def _naming(param: str) -> Iterator[None]:
    """Name the field in errors about its text."""
    try:
        yield
    except RequestError as error:
        raise type(error)(Field(param) + f": {error.message}") from error


def _is_about_tools(message: Mapping[str, Any]) -> bool:
    """Whether the message calls a tool or holds a tool's result."""
    return message.get("role") == "tool" or bool(message.get("tool_calls"))
