"""--speculative-config: which requests draft tokens ahead, and how many (decision 048). Its names are vLLM's."""

from typing import Any, Literal, get_args

import msgspec

from octavo.config import read_json_object
from octavo.errors import ConfigError, quote
from octavo.messages.plans import MIN_SAMPLES

Method = Literal["ngram", "suffix", "draft_model", "eagle3", "mtp"]
_BY_MODEL = ("draft_model", "eagle3", "mtp")
_NAMES: dict[str, Any] = {"deepseek_mtp": "mtp"}  # other names for a method
_NGRAM_AS_MODEL = ("ngram", "[ngram]")  # as vLLM's earlier start commands name the method
_CACHED = "suffix_decoding_max_cached_requests"
_RANKS = "draft_tensor_parallel_size"  # vLLM's; a draft model has the ranks of the model here
_NEEDS_MODEL = {"draft_model": "a draft model", "eagle3": "an EAGLE-3 head"}
FLAG = "--speculative-config"
MAX_DRAFT = MIN_SAMPLES - 1
MAX_NGRAM = 16
_MOST_CACHED = 1_000_000
_MOST_RANKS = 1024
MAX_PREDICTION = 16384  # tokens
_KEYS = (
    "method",
    "model",
    "num_speculative_tokens",
    "prompt_lookup_min",
    "prompt_lookup_max",
    "adaptive",
    "grammar",
    _CACHED,
    _RANKS,
)


class SpeculationSettings(msgspec.Struct, frozen=True, gc=False):
    method: Method
    most: int = 8  # drafted tokens of a row in a step
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    is_adaptive: bool = True  # False: as many as can be had, whatever they cost
    model: str = ""  # the draft model or the EAGLE-3 head: a folder, a .gguf file or a hub id
    max_len: int = 0  # tokens of a request up to which the draft model can follow it; 0: any number
    # Recordings from before grammars drafted do not have this.
    asks_grammars: bool = False  # draft what a request's grammar leaves as the only way to go on
    # Of a key, whose outputs its next requests draft from; 0: a request drafts from its own text only.
    max_cached_requests: int = 0

    @property
    def is_by_model(self) -> bool:
        """Drafts come from a draft model or a head in the worker; False: from the text."""
        return self.method in _BY_MODEL


def speculation_of(text: str, is_gpu: bool, is_exact: bool = True) -> SpeculationSettings | None:
    """The value of the flag; empty: auto. None: no request drafts. On a GPU, auto is off: what it gains there was not measured with
    real text. `is_exact`: False: bits depend on how tokens are divided into steps; auto is off there, too, because drafts could change
    a token."""
    values = read_json_object(text, FLAG)
    unknown = sorted(values.keys() - set(_KEYS))
    if unknown:
        raise ConfigError(f"{FLAG}: {quote(unknown[0])} is not known; known are {', '.join(_KEYS)}")
    if values.get("model") in _NGRAM_AS_MODEL and values.get("method", "ngram") == "ngram":
        values = {**values, "method": "ngram", "model": ""}
    _number(values, _RANKS, 1, _MOST_RANKS)
    method, model = values.get("method", "draft_model" if "model" in values else "auto"), values.get("model", "")
    method = _NAMES.get(str(method), method)
    if method == "none" or (method == "auto" and (is_gpu or not is_exact)):
        return None
    if method != "auto" and method not in get_args(Method):
        raise ConfigError(f"{FLAG}: the method {quote(method)} is not supported: {_METHODS}")
    if type(model) is not str:
        raise ConfigError(f"{FLAG}: model must be a text, the name of the draft model, got {quote(model)}")
    if method in _NEEDS_MODEL and not model:
        raise ConfigError(f"{FLAG}: the method {method} needs {_NEEDS_MODEL[method]}: name it with `model`")
    if model and method not in _NEEDS_MODEL:
        raise ConfigError(
            f"{FLAG}: model is for the methods {' and '.join(_NEEDS_MODEL)}, not for {quote(method)}: leave one of them out"
        )
    least, most = _number(values, "prompt_lookup_min", 2, MAX_NGRAM), _number(values, "prompt_lookup_max", 4, MAX_NGRAM)
    if "prompt_lookup_max" not in values:
        most = max(least, most)
    elif "prompt_lookup_min" not in values:
        least = min(least, most)
    if least > most:
        raise ConfigError(f"{FLAG}: prompt_lookup_min ({least}) is more than prompt_lookup_max ({most})")
    is_adaptive, asks_grammars = _bool(values, "adaptive"), _bool(values, "grammar")
    num_tokens = _number(values, "num_speculative_tokens", 8, MAX_DRAFT)
    num_cached = _number(values, _CACHED, 0, _MOST_CACHED, least=0)
    if num_cached and method != "suffix":
        raise ConfigError(f"{FLAG}: {_CACHED} is for the method suffix, not for {quote(method)}: leave one of them out")
    chosen: Method = "ngram" if method == "auto" else method
    settings = SpeculationSettings(chosen, num_tokens, least, most, is_adaptive, model)
    return msgspec.structs.replace(
        settings, asks_grammars=asks_grammars and not settings.is_by_model, max_cached_requests=num_cached
    )


def named_ranks(text: str) -> int | None:
    """The ranks that the flag says a draft model has; None: it does not say."""
    found: int | None = read_json_object(text, FLAG).get(_RANKS)
    return found


def is_auto(text: str) -> bool:
    """Whether no method is named, or `auto` is. A server that cannot draft then starts without drafts."""
    values = read_json_object(text, FLAG)
    return bool(values.get("method", "draft_model" if "model" in values else "auto") == "auto")


def names_method(text: str) -> bool:
    """Whether the flag says which method it means. If not, and it names a model, the model's checkpoint decides."""
    return "method" in read_json_object(text, FLAG)


_METHODS = "use auto, ngram, suffix, draft_model, eagle3, mtp or none"


def _bool(values: dict[str, Any], name: str) -> bool:
    """True if it is not there."""
    value = values.get(name, True)
    if type(value) is not bool:
        raise ConfigError(f"{FLAG}: {name} must be true or false, got {quote(value)}")
    return value


def _number(values: dict[str, Any], name: str, default: int, most: int, least: int = 1) -> int:
    value = values.get(name, default)
    if type(value) is not int or not least <= value <= most:
        raise ConfigError(f"{FLAG}: {name} must be a whole number from {least} to {most}, got {quote(value)}")
    return value
