"""Attacks by long texts, and by answers that cost much: logprobs, many choices, beams, templates."""

from typing import Any

from benchmarks.torture.attacks.base import HI, MB, Attack, dumped, post

_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
_SIZE = 12 * 10**6  # bytes
_VOCABULARY = 49_152
_TEXTS: dict[str, str] = {
    "digits": "1",
    "spaces": " ",
    "newlines": "\n",
    "one-letter": "a",
    "emoji": "\U0001f468\u200d\U0001f469\u200d\U0001f467",
    "combining-marks": "\u0301",
    "punctuation": "!",
    "words": "once upon a time ",
    "special-tokens": "<|im_start|>",
    "near-special-tokens": "<|im_star",
    "cjk": "\u4e2d\u6587",
    "mixed-spaces": " \t\u00a0\n",
}
_LONG = "once upon a time there was a small fish who lived in the river and "


def _text(kind: str) -> str:
    piece = _TEXTS[kind]
    return piece * (_SIZE // len(piece.encode()))


def _raw(body: dict[str, Any]) -> bytes:
    """As UTF-8: escapes would make emoji three times as long."""
    import json

    return json.dumps(body, ensure_ascii=False).encode()


def _tokenize(kind: str) -> Attack:
    return post(f"text-tokenize-{kind}", "/tokenize", lambda: _raw({"prompt": _text(kind)}))


def _prompt(num_tokens: int) -> list[int]:
    """Ids of frequent words, without a repetition that a prefix cache would know."""
    return [300 + at * 7919 % 20_000 for at in range(num_tokens)]


def _template(name: str, source: str) -> Attack:
    return post(
        f"template-{name}", _CHAT, lambda: {"chat_template": source}, is_cheap=name not in ("loops", "range", "macros")
    )


ATTACKS = [
    *(_tokenize(kind) for kind in _TEXTS),
    post("text-tokenize-strings", "/tokenize", lambda: _raw({"prompt": "a b " * 1_000_000, "return_token_strs": True})),
    post("text-tokenize-messages", "/tokenize", lambda: _raw({"messages": [{"role": "user", "content": _text("digits")}]})),
    post("text-tokenize-special-names-30mb", "/tokenize", lambda: _raw({"messages": [{"role": "user", "content": "<|im_end|>" * 3_000_000}]})),
    post("text-completion", _COMPLETIONS, lambda: {"prompt": _text("digits")}),
    post("text-completion-of-spaces", _COMPLETIONS, lambda: {"prompt": _text("spaces")}),
    post("text-completion-cut", _COMPLETIONS, lambda: {"prompt": _text("words"), "truncate_prompt_tokens": 10}),
    post("text-1024-prompts-of-12kb", _COMPLETIONS, lambda: {"prompt": ["1" * 12_000] * 1024, "truncate_prompt_tokens": 4}, is_flood=True,
         seconds=5.0),
    post("text-chat", _CHAT, lambda: {"messages": [{"role": "user", "content": _text("words")}]}),
    post("text-chat-one-letter", _CHAT, lambda: {"messages": [{"role": "user", "content": _text("one-letter")}]}),
    post("text-chat-system", _CHAT, lambda: {"messages": [{"role": "system", "content": _text("emoji")}, *HI]}),
    post("text-responses", _RESPONSES, lambda: {"input": _text("digits")}),
    post("text-responses-cut", _RESPONSES, lambda: {
        "input": [{"role": "user", "content": "a " * 500} for _ in range(9000)], "truncation": "auto"}),
    post("text-responses-count", "/v1/responses/input_tokens", lambda: {"input": _text("spaces")}),
    post("text-messages", _MESSAGES, lambda: {"messages": [{"role": "user", "content": _text("digits")}]}),
    post("text-messages-count", "/v1/messages/count_tokens", lambda: {"messages": [{"role": "user", "content": _text("combining-marks")}]}),
    post("text-embeddings", "/v1/embeddings", lambda: {"input": _text("digits")}),
    post("text-embeddings-cut", "/v1/embeddings", lambda: {"input": _text("words"), "truncate_prompt_tokens": -1}),
    post("text-tool-results", _CHAT, lambda: {"messages": [
        *HI, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "' + "1" * 10**7 + '"}'}}]},
        {"role": "tool", "tool_call_id": "c", "content": "4"}]}),
    post("text-deep-tool-arguments", _CHAT, lambda: {"messages": [
        *HI, {"role": "assistant", "content": None, "tool_calls": [
            {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 50_000 + "1" + "}" * 50_000}}]},
        {"role": "tool", "tool_call_id": "c", "content": "4"}]}),
    # ── answers that cost much ──
    post("cost-prompt-logprobs-6000", _COMPLETIONS, lambda: {"prompt": _prompt(6000), "prompt_logprobs": 20}, seconds=30.0, is_long=True),
    post("cost-echo-logprobs-6000", _COMPLETIONS, lambda: {"prompt": _prompt(6000), "echo": True, "logprobs": 20}, seconds=30.0, is_long=True),
    post("cost-prompt-8000", _COMPLETIONS, lambda: {"prompt": _prompt(8000)}, seconds=30.0, is_long=True),
    post("cost-logprobs-of-64", _CHAT, lambda: {"n": 64, "logprobs": True, "top_logprobs": 20, "max_tokens": 40, "ignore_eos": True},
         seconds=20.0),
    post("cost-64-choices", _COMPLETIONS, lambda: {"n": 64, "max_tokens": 8000, "ignore_eos": True, "temperature": 1}, seconds=5.0),
    post("cost-64-choices-stream", _COMPLETIONS, lambda: {"n": 64, "max_tokens": 500, "ignore_eos": True, "stream": True}, seconds=5.0),
    post("cost-best-of-64", _COMPLETIONS, lambda: {"n": 1, "best_of": 64, "max_tokens": 500, "ignore_eos": True}, seconds=5.0),
    post("cost-128-choices", _COMPLETIONS, lambda: {"n": 128, "max_tokens": 8000, "ignore_eos": True}, seconds=5.0),
    post("cost-beams-64", _COMPLETIONS, lambda: {"n": 64, "use_beam_search": True, "max_tokens": 200, "ignore_eos": True}, seconds=6.0),
    post("cost-beams-64-stops", _COMPLETIONS, lambda: {
        "n": 64, "use_beam_search": True, "max_tokens": 200, "stop_token_ids": list(range(100, 116)), "min_tokens": 100}, seconds=6.0),
    post("cost-1024-prompts-of-64-choices", _COMPLETIONS, lambda: {"prompt": ["a"] * 1024, "n": 64, "max_tokens": 1000, "ignore_eos": True},
         seconds=6.0, is_flood=True),
    post("cost-1024-prompts-stream", _COMPLETIONS, lambda: {"prompt": ["a"] * 1024, "max_tokens": 1000, "ignore_eos": True, "stream": True},
         seconds=5.0, is_flood=True),
    post("cost-1024-prompts-of-1000-tokens", _COMPLETIONS, lambda: {"prompt": [_prompt(1000 + at) for at in range(300)]},
         seconds=5.0, is_flood=True),
    post("cost-min-tokens", _COMPLETIONS, lambda: {"max_tokens": 8000, "min_tokens": 8000, "stop_token_ids": list(range(1024))}, seconds=4.0),
    post("cost-64-stops-of-1024", _COMPLETIONS, lambda: {
        "max_tokens": 400, "ignore_eos": True, "n": 16, "stop": ["a" * 1000 + f"{at}" for at in range(64)]}, seconds=5.0),
    post("cost-256-bad-words", _COMPLETIONS, lambda: {
        "max_tokens": 200, "ignore_eos": True, "n": 16, "bad_words": [(f"{at} " * 120)[:250] for at in range(256)]}, seconds=5.0),
    post("cost-logit-bias-49000", _COMPLETIONS, lambda: {"logit_bias": {str(at): 1 for at in range(49_000)}}, is_cheap=True),
    post("cost-logit-bias-1024-of-64", _COMPLETIONS, lambda: {
        "logit_bias": {str(at): 1 for at in range(1024)}, "n": 64, "max_tokens": 60, "ignore_eos": True}, seconds=6.0),
    post("cost-allow-everything-of-64", _COMPLETIONS, lambda: {
        "allowed_token_ids": list(range(_VOCABULARY)), "n": 64, "max_tokens": 40, "ignore_eos": True}, seconds=6.0),
    post("cost-repetition-detection", _COMPLETIONS, lambda: {
        "max_tokens": 300, "ignore_eos": True, "n": 32,
        "repetition_detection": {"max_pattern_size": 1024, "min_pattern_size": 1, "min_count": 1024}}, seconds=5.0),
    post("cost-penalties-of-64", _COMPLETIONS, lambda: {
        "prompt": _prompt(4000), "n": 64, "max_tokens": 60, "ignore_eos": True, "presence_penalty": 1, "repetition_penalty": 1.2},
         seconds=15.0),
    post("cost-huge-numbers", _COMPLETIONS, lambda: {"max_tokens": 2**62, "min_tokens": 2**61, "top_k": 2**62, "seed": -(2**63)}, is_cheap=True),
    post("cost-infinite-stream-interval", _COMPLETIONS, lambda: {"stream": True, "stream_interval": 2**62, "max_tokens": 20}, is_cheap=True),
    post("cost-grammar-of-64", _CHAT, lambda: {
        "n": 64, "max_tokens": 60, "structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 100}}},
         seconds=10.0),
    # ── templates in requests ──
    _template("format-width", "{{ '{:.{}f}'.format(1.5, 2000000000) }}"),
    _template("format-nested-width", "{{ '{:>{}}'.format('a', 10**9) }}"),
    _template("percent-width", "{{ '%1000000000d' % 1 }}"),
    _template("percent-star", "{{ '%*d' % (10**9, 1) }}"),
    _template("wordwrap", "{{ ('a' * 100000) | wordwrap(1, true, 'b' * 100000) }}"),
    _template("range", "{% for a in range(10**9) %}x{% endfor %}"),
    _template("loops", "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}"),
    _template("multiplied", "{{ 'a' * 10**10 }}"),
    _template("multiplied-lists", "{{ [[0] * 100000] * 100000 }}"),
    _template("power", "{{ 10 ** 10 ** 9 }}"),
    _template("powers-slowly", "{% set x = namespace(v=3) %}{% for a in range(99) %}{% set x.v = x.v * x.v %}{% endfor %}{{ x.v }}"),
    _template("macros", "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}"),
    _template("joins", "{{ range(99999) | map('string') | join('a' * 99999) }}"),
    _template("replaced", "{{ ('a' * 99999).replace('', 'b' * 99999) }}"),
    _template("doubling", "{% set x = namespace(v='ab') %}{% for a in range(60) %}{% set x.v = x.v ~ x.v %}{% endfor %}{{ x.v }}"),
    _template("include", "{% include '/etc/passwd' %}{% import 'os' as os %}"),
    _template("attributes", "{{ ''.__class__.__mro__[1].__subclasses__() }}"),
    _template("nested-10000", "{% if 1 %}" * 10_000 + "{% endif %}" * 10_000),
    _template("expression-100000", "{{ " + "1 + " * 100_000 + "1 }}"),
    _template("parentheses-50000", "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}"),
    _template("constants-folded", "{{ 'a' * 100000 * 100000 }}{{ (1, 2) * 10**9 }}{{ 2 ** 10000000 }}"),
    _template("sorted", "{{ (range(99999) | list * 99) | sort | unique | list | length }}"),
    _template("tojson", "{% set x = [[[[0] * 99] * 99] * 99] * 99 %}{{ x | tojson(indent=32) }}"),
    _template("regexlike", "{{ ('a ' * 99999) | title | urlize | striptags | wordcount }}"),
    _template("20mb-source", "{# " + "x" * 20 * MB + " #}"),
    post("template-100000-expressions", _CHAT, lambda: {"chat_template": "{{ a }}" * 100_000}),
    post("template-many-at-tokenize", "/tokenize", lambda: dumped({"messages": HI, "chat_template": "{% set a = 1 %}" * 200_000})),
    post("template-variables-deep", _CHAT, lambda: {"chat_template_kwargs": {"a": _deep_list(150)}, "chat_template": "{{ a }}"}),
]  # fmt: skip


def _deep_list(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found, found] if depth < 20 else [found]
    return found
