"""Attacks by count: long lists of wrong or small items, unknown fields, and bodies that JSON parsers find hard."""

import gzip
from typing import Any

from benchmarks.torture.attacks.base import BASES, HI, MB, Attack, Door, dumped, one, post, raw_field

SHARE = 1.0
"""Of the items of each list: a test that only builds the attacks needs few."""
_MILLIONS = 2_000_000
_CHAT, _COMPLETIONS, _RESPONSES, _MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"


def _many(item: bytes, count: int = _MILLIONS) -> bytes:
    return b"[" + b",".join([item] * max(1, int(count * SHARE))) + b"]"


def _wrong(path: str, name: str, item: bytes, is_cheap: bool = False) -> Attack:
    route = path.removeprefix("/v1/").strip("/").replace("/", "-")
    label = f"list-{route}-{name.replace('_', '-')}"
    return post(label, path, lambda: raw_field(path, name, _many(item)), is_cheap=is_cheap)


def _members(count: int, value: bytes, key: str = "%d") -> bytes:
    return (
        b"{" + b",".join(b'"%s":%s' % ((key % at).encode(), value) for at in range(max(1, int(count * SHARE)))) + b"}"
    )


def _extended(path: str, members: bytes) -> bytes:
    """A valid body with more members: `members` is an object."""
    return dumped(BASES[path])[:-1] + b"," + members[1:]


def _deep(depth: int, opening: bytes, closing: bytes) -> bytes:
    return opening * depth + b"1" + closing * depth


def _nested_parts(depth: int) -> list[dict[str, Any]]:
    part: Any = {"type": "text", "text": "a"}
    for _ in range(depth):
        part = {"type": "text", "text": [part]}
    return [{"role": "user", "content": [part]}]


def _compressed(door: Door) -> bytes:
    """A gigabyte of spaces as a megabyte: a gzip file of 64 equal members."""
    return door.request("POST", "/tokenize", gzip.compress(b" " * 16 * MB) * 64, {"Content-Encoding": "gzip"})


def _tools(count: int) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object", "properties": {}}}}
        for at in range(count)
    ]


_PART = b'{"type":"text","text":"a"}'
_IMAGE = "data:image/png;base64," + "A" * (20 * MB)

ATTACKS = [
    # ── two million wrong items ──
    _wrong(_CHAT, "bad_words", b"1", is_cheap=True),
    _wrong(_CHAT, "stop", b"1"),
    _wrong(_CHAT, "stop_token_ids", b'"a"'),
    _wrong(_CHAT, "allowed_token_ids", b'"a"'),
    _wrong(_CHAT, "messages", b"1", is_cheap=True),
    _wrong(_CHAT, "tools", b"1"),
    _wrong(_CHAT, "guided_choice", b"1"),
    _wrong(_COMPLETIONS, "prompt", b"{}"),
    post("list-completions-prompt-of-lists", _COMPLETIONS, lambda: raw_field(_COMPLETIONS, "prompt", _many(b'[1,""]', 1_000_000))),
    _wrong(_RESPONSES, "input", b"1"),
    _wrong(_RESPONSES, "include", b"1"),
    _wrong(_RESPONSES, "tools", b"1"),
    _wrong(_MESSAGES, "messages", b"1"),
    _wrong(_MESSAGES, "system", b"1"),
    _wrong(_MESSAGES, "stop_sequences", b"1"),
    _wrong("/v1/embeddings", "input", b"{}", is_cheap=True),
    _wrong("/detokenize", "tokens", b'"a"'),
    _wrong("/tokenize", "messages", b"1"),
    post("list-chat-logit-bias-wrong-keys", _CHAT, lambda: raw_field(_CHAT, "logit_bias", _members(1_000_000, b"1", "x%d"))),
    post("list-chat-logit-bias-wrong-values", _CHAT, lambda: raw_field(_CHAT, "logit_bias", _members(1_000_000, b'"a"'))),
    post("list-chat-metadata", _CHAT, lambda: raw_field(_CHAT, "metadata", _members(1_000_000, b"1"))),
    post("list-responses-metadata", _RESPONSES, lambda: raw_field(_RESPONSES, "metadata", _members(1_000_000, b"1"))),
    post("list-batches-metadata", "/v1/batches", lambda: raw_field("/v1/batches", "metadata", _members(1_000_000, b"1"))),
    # ── right items, too many of them ──
    post("many-empty-messages", _CHAT, lambda: raw_field(_CHAT, "messages", _many(b"{}", 1_000_000))),
    post("many-messages-10000", _CHAT, lambda: {"messages": HI * 10_000}),
    post("many-messages-of-two-parts", _CHAT, lambda: {"messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}] * 2}] * 9000}),
    post("many-content-parts", _CHAT, lambda: raw_field(_CHAT, "messages", b'[{"role":"user","content":%s}]' % _many(_PART, 500_000))),
    post("many-responses-items", _RESPONSES, lambda: raw_field(_RESPONSES, "input", _many(b'{"role":"user","content":"a"}', 300_000))),
    post("many-responses-references", _RESPONSES, lambda: {"input": [{"type": "item_reference", "id": f"msg_{at}"} for at in range(250)]},
         is_cheap=True),
    post("many-messages-blocks", _MESSAGES, lambda: raw_field(_MESSAGES, "messages", b'[{"role":"user","content":%s}]' % _many(_PART, 300_000))),
    post("many-tools-10000", _CHAT, lambda: {"tools": _tools(10_000), "tool_choice": "auto"}),
    post("many-tools-10000-required", _CHAT, lambda: {"tools": _tools(10_000), "tool_choice": "required"}),
    post("many-unknown-fields", _CHAT, lambda: _extended(_CHAT, _members(1_000_000, b"1", "x%d"))),
    post("many-unknown-fields-of-messages", _CHAT, lambda: raw_field(_CHAT, "messages", b"[{%s,%s]" % (
        b'"role":"user","content":"hi"', _members(1_000_000, b"1", "x%d")[1:]))),
    post("many-template-variables", _CHAT, lambda: raw_field(_CHAT, "chat_template_kwargs", _members(500_000, b"1", "x%d"))),
    post("many-bad-words-100000", _CHAT, lambda: {"bad_words": [f"word{at}" for at in range(100_000)]}),
    post("many-stops-5000", _CHAT, lambda: {"stop": [f"stop{at}" for at in range(5000)]}, is_cheap=True),
    post("many-embeddings-a-million", "/v1/embeddings", lambda: raw_field("/v1/embeddings", "input", _many(b'"a"', 1_000_000))),
    post("many-embeddings-2048", "/v1/embeddings", lambda: {"input": ["once upon a time " * 20] * 2048}, seconds=6.0, is_flood=True),
    post("many-detokenized-ids", "/detokenize", lambda: raw_field("/detokenize", "tokens", _many(b"17", 1_000_000))),
    post("many-prompt-ids", _COMPLETIONS, lambda: raw_field(_COMPLETIONS, "prompt", _many(b"17", 2_000_000))),
    # ── long names ──
    post("long-model-name", _CHAT, lambda: {"model": "m" * 20 * MB}),
    post("long-previous-response-id", _RESPONSES, lambda: {"previous_response_id": "resp_" + "r" * 20 * MB}),
    post("long-item-references", _RESPONSES, lambda: {"input": [
        {"type": "item_reference", "id": f"msg_{at}" + "m" * 80_000} for at in range(200)]}),
    post("long-tool-name", _CHAT, lambda: {"tools": [{"type": "function", "function": {"name": "f" * 20 * MB}}]}),
    post("long-tool-choice", _CHAT, lambda: {"tools": _tools(1), "tool_choice": {"type": "function", "function": {"name": "g" * 20 * MB}}}),
    post("long-role", _CHAT, lambda: {"messages": [{"role": "r" * 20 * MB, "content": "hi"}]}),
    post("long-tool-call-id", _CHAT, lambda: {"messages": [*HI, {"role": "tool", "tool_call_id": "c" * 20 * MB, "content": "4"}]}),
    post("long-schema-name", _CHAT, lambda: {"response_format": {"type": "json_schema", "json_schema": {"name": "n" * 20 * MB, "schema": {}}}}),
    post("long-input-file-id", "/v1/batches", lambda: {"input_file_id": "file-" + "0" * 20 * MB}),
    post("long-completion-window", "/v1/batches", lambda: {"completion_window": "9" * 20 * MB + "h"}),
    post("long-labels", _CHAT, lambda: {"user": "u" * 10 * MB, "prompt_cache_key": "k" * 10 * MB, "safety_identifier": "s" * 10 * MB}),
    post("long-logit-bias-key", _CHAT, lambda: {"logit_bias": {"1" * 20 * MB: 1}}),
    # ── JSON ──
    post("json-deep-lists", _CHAT, lambda: raw_field(_CHAT, "metadata", _deep(500_000, b"[", b"]"))),
    post("json-deep-objects", _CHAT, lambda: raw_field(_CHAT, "metadata", _deep(300_000, b'{"a":', b"}"))),
    post("json-190-deep-unknown", _CHAT, lambda: raw_field(_CHAT, "metadata", _deep(190, b'{"a":', b"}")), is_cheap=True),
    post("json-deep-content-parts", _CHAT, lambda: {"messages": _nested_parts(80)}, is_cheap=True),
    post("json-32mb-of-empty-lists", _CHAT, lambda: raw_field(_CHAT, "metadata", _many(b"[]", 10_600_000))),
    post("json-32mb-of-empty-objects", _CHAT, lambda: raw_field(_CHAT, "messages", _many(b"{}", 10_600_000))),
    post("json-32mb-of-brackets", _CHAT, lambda: b"[" * 32_000_000),
    post("json-duplicate-keys", _COMPLETIONS, lambda: b"{" + b'"prompt":"a",' * 2_000_000 + b'"max_tokens":1}'),
    post("json-number-of-10mb", _CHAT, lambda: raw_field(_CHAT, "seed", b"9" * 10 * MB)),
    post("json-fraction-of-10mb", _CHAT, lambda: raw_field(_CHAT, "temperature", b"0." + b"1" * 10 * MB)),
    post("json-exponent", _CHAT, lambda: raw_field(_CHAT, "temperature", b"1e" + b"9" * MB)),
    post("json-ids-of-4000-digits", _COMPLETIONS, lambda: raw_field(_COMPLETIONS, "prompt", _many(b"9" * 4000, 7000))),
    post("json-invalid-utf8-30mb", _CHAT, lambda: raw_field(_CHAT, "messages", b'[{"role":"user","content":"%s"}]' % (b"\xff" * 30 * MB))),
    post("json-lone-surrogates-10mb", _CHAT, lambda: raw_field(_CHAT, "messages", b'[{"role":"user","content":"%s"}]' % (rb"\ud800" * 1_700_000))),
    post("json-escapes-30mb", _CHAT, lambda: raw_field(_CHAT, "messages", b'[{"role":"user","content":"%s"}]' % (rb"\u0041" * 5_000_000))),
    post("json-key-of-20mb", _CHAT, lambda: _extended(_CHAT, b'{"%s": 1}' % (b"k" * 20 * MB))),
    post("json-whitespace-31mb", _CHAT, lambda: b" " * 31 * MB + dumped(BASES[_CHAT])),
    one("json-gzip-bomb", _compressed),
    one("json-over-the-limit", lambda door: door.request("POST", _CHAT, b"[" * 40 * MB)),
    one("json-form-encoded", lambda door: door.request("POST", _CHAT, b"a=b&" * 5_000_000, {"Content-Type": "application/x-www-form-urlencoded"})),
    # ── images ──
    post("image-data-url-20mb", _CHAT, lambda: {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": _IMAGE}}]}]}),
    post("image-of-a-file", _CHAT, lambda: {"messages": [{"role": "user", "content": [
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}]}, is_cheap=True),
    post("image-in-messages", _MESSAGES, lambda: {"messages": [{"role": "user", "content": [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 20 * MB}}]}]}),
    post("image-in-responses", _RESPONSES, lambda: {"input": [{"role": "user", "content": [
        {"type": "input_image", "image_url": _IMAGE}]}]}),
]  # fmt: skip
