"""Parameters of one request for sampling, beam search and pooling. They are valid by construction."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

import msgspec

from octavo.config import MAX_LOGPROBS
from octavo.errors import Field, InvalidRequest, quote

# Limits for one request: each entry is work in every step of the request.
MAX_BIASES = 1024
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LEN = 256  # characters
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BEAM_STOPS = 16  # ids that end a beam: each one adds candidates to every beam
MAX_LENGTH_PENALTY = 10
MAX_PATTERN_SIZE = 1024  # tokens
MAX_PATTERN_COUNT = 1024


class RepetitionDetectionParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """When an output counts as a loop: it ends with `min_count` repeats of one pattern of `min_pattern_size` to
    `max_pattern_size` tokens. Names and meaning are vLLM's."""

    max_pattern_size: int = 0  # 0: detection is off
    min_pattern_size: int = 0  # 0 means 1
    min_count: int = 0

    def __post_init__(self) -> None:
        is_on = bool(self.max_pattern_size)
        for name, least, most, why in (
            ("max_pattern_size", 0, MAX_PATTERN_SIZE, ""),
            ("min_pattern_size", 0, self.max_pattern_size if is_on else MAX_PATTERN_SIZE, ", at most max_pattern_size"),
            ("min_count", 2 if is_on else 0, MAX_PATTERN_COUNT, ": how often the pattern must repeat" if is_on else ""),
        ):
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                got = "it is not given" if name == "min_count" and is_on and value == 0 else f"got {quote(value)}"
                raise InvalidRequest(
                    f"repetition_detection.{name} must be a whole number from {least} to {most}{why}; {got}",
                    param=f"repetition_detection.{name}",
                )


class StructuredOutputsParams(TypedDict, total=False):
    """The form of an output: exactly one of the first six. The names are vLLM's."""

    json: str | dict[str, Any] | bool  # a JSON schema
    json_object: bool  # any JSON object
    regex: str
    choice: Sequence[str]  # one of these texts
    grammar: str  # Lark's notation, or GBNF's
    structural_tag: str | dict[str, Any]
    whitespace_pattern: str  # a regex of the whitespace allowed between the parts of JSON
    disable_any_whitespace: bool
    disable_additional_properties: bool
    # Ours: "strict" (the default) refuses a schema with constraints that cannot be enforced; "check" enforces the others, and the
    # finished answer says whether it satisfies the whole schema.
    unenforced: str


def prefix_space(adapter: str, salt: str) -> str:
    """Requests share pages of equal prefixes only with those for which this is the same. `adapter`: the id of its content."""
    return f"{adapter}+{salt}" if salt else adapter


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Sampling parameters. Names and meaning are vLLM's. Valid by construction: a bad value raises InvalidRequest."""

    n: int = 1  # independent samples of one prompt
    temperature: float = 1.0  # 0 (anything below 1e-5): greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: the whole vocabulary
    min_p: float = 0.0
    seed: int | None = None  # None: chosen on admission
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16  # None: as many as the context holds
    min_tokens: int = 0
    stop: Sequence[str] = ()  # a single string is taken as one stop string
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    # Log-probabilities are the model's own: before temperature, bias, penalties and bans. None: not returned; k: those of the
    # chosen token and of the k most likely tokens at its position.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: Sequence[int] = ()  # with logprobs: return those of these tokens instead of the most likely
    logit_bias: Mapping[int, float] | None = None  # token id → number added to its logit
    allowed_token_ids: Sequence[int] | None = None  # None: all
    bad_words: Sequence[str] = ()
    bad_word_ids: tuple[tuple[int, ...], ...] = ()  # bad_words as token ids; set where there is a tokenizer
    structured_outputs: StructuredOutputsParams | None = None
    grammar: str = (
        ""  # structured_outputs as a grammar for the sampler; compiled and checked where there is a tokenizer
    )
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    best_of: int | None = None  # sequences to generate; the n most likely are returned. For a beam search: its width
    use_beam_search: bool = False
    length_penalty: float = 1.0  # a beam's score is the sum of its logprobs / its length ** this
    # When a beam search ends, as in transformers. False: when no beam is likely to beat the finished ones; True: when as many
    # have finished as there are beams; "never": when no beam can beat them.
    early_stopping: bool | Literal["never"] = False
    repetition_detection: RepetitionDetectionParams | None = None
    use_speculation: bool = True  # draft tokens ahead where the server does; no token depends on it
    prediction_ids: tuple[int, ...] = ()  # what the output is expected to be; set where there is a tokenizer
    adapter: str = (
        ""  # id of its adapter, which is in memory; set by the engine (engine/adapter_traffic.py). Empty: none
    )
    prefix_salt: str = ""  # a digest: only requests with the same share pages; set by the server. Empty: as all others

    def __post_init__(self) -> None:
        self._check_types()
        for name, ok, limit in (
            ("n", self.n >= 1, "at least 1"),
            ("temperature", 0.0 <= self.temperature <= 100.0, "between 0 and 100"),
            ("top_p", 0.0 < self.top_p <= 1.0, "above 0 and at most 1"),
            ("top_k", self.top_k >= -1, "-1, 0 (both: no limit) or positive"),
            ("min_p", 0.0 <= self.min_p <= 1.0, "between 0 and 1"),
            ("presence_penalty", -2.0 <= self.presence_penalty <= 2.0, "between -2 and 2"),
            ("frequency_penalty", -2.0 <= self.frequency_penalty <= 2.0, "between -2 and 2"),
            ("repetition_penalty", 0.0 < self.repetition_penalty <= 100.0, "above 0 and at most 100"),
            ("max_tokens", self.max_tokens is None or self.max_tokens >= 1, "at least 1"),
            ("min_tokens", self.min_tokens >= 0, "at least 0"),
            ("stop", all(self.stop), "non-empty strings"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
            ("best_of", self.best_of is None or self.best_of >= self.n, f"at least n ({self.n})"),
            (
                "length_penalty",
                -MAX_LENGTH_PENALTY <= self.length_penalty <= MAX_LENGTH_PENALTY,
                f"between -{MAX_LENGTH_PENALTY} and {MAX_LENGTH_PENALTY}",
            ),
            (
                "early_stopping",
                type(self.early_stopping) is bool or self.early_stopping == "never",
                'true, false or "never"',
            ),
        ):
            if not ok:
                raise InvalidRequest(Field(name) + f" must be {limit}, got {quote(getattr(self, name))}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequest(
                Field("min_tokens")
                + " must be at most "
                + Field("max_tokens")
                + f" ({quote(self.max_tokens)}), got {quote(self.min_tokens)}"
            )
        if self.logit_bias or self.allowed_token_ids is not None or self.bad_words:
            self._check_edits()
        if self.logprob_token_ids:
            self._check_logprob_ids()
        if self.use_beam_search:
            self._check_beams()

    def _check_logprob_ids(self) -> None:
        if len(self.logprob_token_ids) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest(
                Field("logprob_token_ids")
                + f" has {len(self.logprob_token_ids)} entries, at most {MAX_LOGPROB_TOKEN_IDS} are allowed"
            )
        if self.logprobs is None:
            raise InvalidRequest(Field("logprob_token_ids") + " needs logprobs")
        if self.logprobs:
            raise InvalidRequest(
                Field("logprob_token_ids")
                + " are returned instead of the most likely tokens: leave the number of these out"
            )

    @property
    def prefix_space(self) -> str:
        """Requests share pages of equal prefixes only with those for which this is the same. Empty: the base model, without a salt."""
        return prefix_space(self.adapter, self.prefix_salt)

    @property
    def num_sequences(self) -> int:
        """Sequences that run at once for one prompt."""
        return self.best_of or self.n

    def num_candidates(self, num_stop_ids: int) -> int:
        """Candidates to consider for each beam: enough to fill all beams from this one alone, after the candidates that end the
        beam are removed, and those that may not end it yet."""
        least = max(2, 1 + num_stop_ids) * self.num_sequences + (num_stop_ids if self.min_tokens else 0)
        return max(least, self.logprobs or 0)

    def _check_beams(self) -> None:
        """Reject what a beam search does not support. It ranks by the model's own logprobs, so parameters that would change
        those, or end a beam by its text, are rejected. Those that only concern random sampling (temperature, top_p, top_k,
        min_p, seed) have no effect."""
        if self.grammar:
            raise InvalidRequest(
                "response_format, structured_outputs and tools that must be called are not supported with use_beam_search: "
                "leave them out",
                param="use_beam_search",
            )
        for name in _NOT_WITH_BEAMS:
            if getattr(self, name) != _DEFAULTS[name]:
                raise InvalidRequest(f"{name} is not supported with use_beam_search: leave it out", param=name)
        if len(self.stop_token_ids) > MAX_BEAM_STOPS:
            raise InvalidRequest(
                f"stop_token_ids has {len(self.stop_token_ids)} entries, with use_beam_search at most {MAX_BEAM_STOPS} are allowed",
                param="stop_token_ids",
            )

    def _check_edits(self) -> None:
        bias, words, allowed = self.logit_bias or {}, self.bad_words, self.allowed_token_ids
        if len(bias) > MAX_BIASES:
            raise InvalidRequest(f"logit_bias has {len(bias)} entries, at most {MAX_BIASES} are allowed", "logit_bias")
        for token, value in bias.items():
            if not -100 <= value <= 100:
                raise InvalidRequest(
                    f"logit_bias of the token id {token} must be between -100 and 100, got {quote(value)}",
                    f"logit_bias.{token}",
                )
        if allowed is not None and not allowed:
            raise InvalidRequest("allowed_token_ids is empty: nothing could be sampled", "allowed_token_ids")
        if len(words) > MAX_BAD_WORDS:
            raise InvalidRequest(
                f"bad_words has {len(words)} entries, at most {MAX_BAD_WORDS} are allowed", "bad_words"
            )
        for at, word in enumerate(words):
            if not word.strip() or len(word) > MAX_BAD_WORD_LEN:
                raise InvalidRequest(
                    f"bad_words[{at}] must be a word of at most {MAX_BAD_WORD_LEN} characters", f"bad_words[{at}]"
                )

    def _check_types(self) -> None:
        """Require exact types, because msgpack carries no others: no 50.0 for an integer, no NumPy scalars, no lone surrogates.
        The range checks exclude non-finite floats."""
        for name in ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of"):
            value = getattr(self, name)
            if not (type(value) is int and value in _INT64) and (value is not None or name in _NEVER_NONE):
                raise InvalidRequest(Field(name) + f" must be a plain 64-bit integer, got {quote(value)}")
        for name in _NUMBERS:
            value = getattr(self, name)
            if type(value) is not float and type(value) is not int:
                raise InvalidRequest(Field(name) + f" must be a plain int or float, got {quote(value)}")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "use_beam_search"):
            if type(getattr(self, name)) is not bool:
                raise InvalidRequest(f"{name} must be True or False, got {quote(getattr(self, name))}", param=name)
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, values, fits, kind in (
            ("stop", stop, _is_text, "a string or a list of strings, all valid Unicode"),
            ("stop_token_ids", self.stop_token_ids, _is_int64, "a list of 64-bit integers"),
            ("logprob_token_ids", self.logprob_token_ids, _is_int64, "a list of 64-bit integers"),
            ("allowed_token_ids", self.allowed_token_ids, _is_int64, "a list of 64-bit integers"),
            ("bad_words", self.bad_words, _is_text, "a list of strings, all valid Unicode"),
        ):
            if values is None and name == "allowed_token_ids":
                continue
            if not isinstance(values, list | tuple) or not all(map(fits, values)):
                raise InvalidRequest(Field(name) + f" must be {kind}, got {quote(values)}")
            msgspec.structs.force_setattr(self, name, tuple(values))
        loops = self.repetition_detection
        if loops is not None and not isinstance(loops, RepetitionDetectionParams):
            raise InvalidRequest(
                f"repetition_detection must be RepetitionDetectionParams, got {quote(loops)}",
                param="repetition_detection",
            )
        bias = self.logit_bias
        if bias is not None and not (isinstance(bias, dict) and all(map(_is_bias, bias.items()))):
            raise InvalidRequest(f"logit_bias must map token ids to numbers, got {quote(bias)}", param="logit_bias")


_INT64 = range(-(2**63), 2**63)
_NEVER_NONE = ("n", "top_k", "min_tokens")
_NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "length_penalty",
)
_NOT_WITH_BEAMS = (
    "logprob_token_ids",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "stop",
    "repetition_detection",
    "structured_outputs",
)
_DEFAULTS = dict(zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True))


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Parameters of `LLM.beam_search`. Names and meaning are vLLM's; early_stopping is transformers'."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # no effect, as in vLLM: beams are ranked by the model's own logprobs
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def sampling(self) -> SamplingParams:
        if type(self.beam_width) is not int or self.beam_width < 1:
            raise InvalidRequest(
                f"beam_width must be a whole number of at least 1, got {quote(self.beam_width)}", "beam_width"
            )
        return SamplingParams(
            n=self.beam_width,
            use_beam_search=True,
            logprobs=0,
            **{name: getattr(self, name) for name in self.__struct_fields__ if name != "beam_width"},
        )


def _is_int64(value: object) -> bool:
    return type(value) is int and value in _INT64


def _is_bias(item: tuple[object, object]) -> bool:
    return _is_int64(item[0]) and type(item[1]) in (int, float)


def _is_text(value: object) -> bool:
    if type(value) is not str:
        return False
    try:
        return value.isascii() or bool(value.encode())
    except UnicodeEncodeError:
        return False


Pooling = Literal["cls", "mean", "last"]
Activation = Literal["none", "sigmoid", "softmax"]


class PoolingParams(msgspec.Struct, frozen=True, gc=False):
    """How a prompt's hidden states become numbers. Checked on admission."""

    # The first token's, the mean of all tokens', or the last token's; every token's, one after the other; or a number for each label of the
    # model's classification head.
    kind: Pooling | Literal["tokens", "classify"]
    normalize: bool = True  # each vector to length 1; not for labels
    dimensions: int = 0  # leading numbers of a vector to keep, cut before normalising; 0: all
    second_at: int = 0  # position at which the second text of a pair begins; 0: there is one text
    activation: Activation = "none"  # of labels


def choice_seed(seed: int, index: int) -> int:
    """Seed of one choice. Choice 0 keeps the caller's seed, so that n = 1 and the first of n agree; the others' seeds are spread
    over the signed 64-bit range."""
    return (seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
