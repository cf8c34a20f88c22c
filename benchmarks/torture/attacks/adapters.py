"""Attacks on what came with adapters, speculation and sessions: loads and unloads, strange names and paths, damaged files in a folder that is
allowed, predictions, keys of sessions; and on routes that operate the server. The server has adapters on (attack_run.py)."""

import json
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.torture.attacks.base import (
    HI,
    MB,
    Answer,
    Attack,
    Door,
    Send,
    Strike,
    dumped,
    must_be,
    one,
    post,
    several,
)
from octavo.gguf import GGUFFile
from octavo.weights.sources.source import resolve

SHARE = 1.0
"""Of the requests of each flood: a test that only builds the attacks needs few."""
_LOAD, _UNLOAD, _CHAT, _COMPLETIONS = (
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/v1/chat/completions",
    "/v1/completions",
)
GOOD = "good"
_MODULE = "base_model.model.model.layers.0.self_attn.q_proj.lora_"


def _many(count: int) -> int:
    return max(1, int(count * SHARE))


# ── the folder of adapters ──


def write_adapters(folder: Path) -> None:
    """What a hostile or careless hand may leave in an allowed folder: empty, cut, huge and lying files, links, a pipe."""
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
    size = _hidden_size()
    matrices, other = _matrices(size), _matrices(2 * size)
    many = {
        f"base_model.model.{at}.lora_{side}.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        for at in range(60_000)
        for side in "AB"
    }
    most = dict(list(many.items())[:80_000])  # about as many as a header may hold
    huge = {"x.lora_A.weight": {"dtype": "F32", "shape": [2**40, 2**20], "data_offsets": [0, 2**62]}}
    patterns = {f"m{at}": 1 for at in range(35_000)}
    _write(folder / GOOD, config, _safetensors(matrices, 32 * size))
    _write(folder / "other-base", config, _safetensors(other, 64 * size))
    _write(folder / "empty", config, b"")
    _write(folder / "cut", config, _safetensors(matrices, 32 * size)[:-9])
    _write(folder / "long-header", config, struct.pack("<Q", 2**62) + b"{}")
    _write(folder / "huge-shapes", config, _safetensors(huge, 0))
    _write(folder / "many", config, _safetensors(many, 0))
    _write(folder / "most", config, _safetensors(most, 0))
    _write(folder / "patterns", config | {"rank_pattern": patterns, "alpha_pattern": patterns}, _safetensors(most, 0))
    _write(folder / "no-float", config | {"lora_alpha": 10**400}, _safetensors(matrices, 32 * size))
    _write(folder / "deep", b"[" * 500_000, _safetensors(matrices, 32 * size))
    _write(folder / "large-config", b" " * (2 * MB), _safetensors(matrices, 32 * size))
    (folder / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60))
    (folder / "link").symlink_to("/etc")
    (folder / "loop").symlink_to("loop")
    os.mkfifo(folder / "pipe")


def _hidden_size() -> int:
    """Of the embedded model, whose query matrices are square."""
    metadata = GGUFFile(Path(resolve("").path)).metadata
    return int(metadata[f"{metadata['general.architecture']}.embedding_length"])


def _matrices(size: int) -> dict[str, Any]:
    half = 16 * size  # bytes of 4 × size floats
    return {
        f"{_MODULE}A.weight": {"dtype": "F32", "shape": [4, size], "data_offsets": [0, half]},
        f"{_MODULE}B.weight": {"dtype": "F32", "shape": [size, 4], "data_offsets": [half, 2 * half]},
    }


def _write(folder: Path, config: dict[str, Any] | bytes, tensors: bytes) -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    (folder / "adapter_model.safetensors").write_bytes(tensors)


def _safetensors(header: Any, num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(num_bytes)


# ── loads ──


def _load(door: Door, name: str, path: str, **more: Any) -> bytes:
    return door.request("POST", _LOAD, dumped({"lora_name": name, "lora_path": path, **more}), key=door.admin_key)


def _inside(door: Door, name: str) -> str:
    return str(Path(door.log).parent / "adapters" / name)


def _bad(label: str, name: str, path: Callable[[Door], str], *statuses: int) -> Attack:
    return one(f"adapter-{label}", lambda door: _load(door, name, path(door)), check=must_be(*(statuses or (400, 403))))


def _of_folder(name: str) -> Attack:
    return _bad(f"file-{name.replace('.', '-')}", "x", lambda door: _inside(door, name))


def _good(door: Door, dice: random.Random) -> Strike:
    """Load the one that fits, have it answer, and unload it."""
    for request in (
        _load(door, "fits", _inside(door, GOOD)),
        door.request("POST", _COMPLETIONS, dumped({"model": "fits", "prompt": "a", "max_tokens": 1})),
        door.request("POST", _UNLOAD, dumped({"lora_name": "fits"}), key=door.admin_key),
    ):
        (answer,) = yield [Send([request])]
        if answer.status != 200:
            return


def _flood(door: Door) -> list[Send]:
    names = ("most", GOOD, "cut", "patterns", "nothing")
    return [Send([_load(door, f"n{at}", _inside(door, names[at % 5]))]) for at in range(_many(150))]


def _load_and_unload(door: Door) -> list[Send]:
    sends = []
    for at in range(_many(100)):
        sends.append(Send([_load(door, f"u{at % 5}", _inside(door, GOOD), load_inplace=True)]))
        sends.append(Send([door.request("POST", _UNLOAD, dumped({"lora_name": f"u{at % 5}"}), key=door.admin_key)]))
    return sends


def _leave(door: Door) -> list[Send]:
    return [Send([_load(door, f"l{at}", _inside(door, "most"))], "reset") for at in range(_many(100))]


def _unknown_models(door: Door) -> list[Send]:
    bodies = (dumped({"model": f"nobody/{at}" * 20, "prompt": "a", "max_tokens": 1}) for at in range(_many(600)))
    return [Send([door.request("POST", _COMPLETIONS, body)]) for body in bodies]


# ── other routes ──


def _gets(*paths: str) -> Callable[[Door], list[Send]]:
    return lambda door: [Send([door.request("GET", path)]) for path in paths for _ in range(_many(60))]


def _posts(path: str, body: dict[str, Any], count: int) -> Callable[[Door], list[Send]]:
    return lambda door: [Send([door.request("POST", path, dumped(body))]) for _ in range(_many(count))]


def _foreign_streams(door: Door, dice: random.Random) -> Strike:
    """Ids as other processes give them, which no process has."""
    ids = [
        f"{kind}{dice.randbytes(16).hex()}"
        for kind in ("cmpl-", "chatcmpl-", "resp_", "msg_")
        for _ in range(_many(60))
    ]
    ids += ["cmpl-" + "0" * 31, "stream-cmpl-" + "0" * 32, "..%2fstream-cmpl-" + "0" * 32, "cmpl-" + "a" * 100_000]
    yield [Send([door.request(method, f"/v1/stream/{each}?from=0")]) for each in ids for method in ("GET", "DELETE")]


def _no_server_error(answers: Sequence[Answer], door: Door) -> str:
    wrong = [answer.status for answer in answers if answer.status >= 500]
    return f"status {wrong[0]}" if wrong else ""


def _predicted(text: Any, **more: Any) -> dict[str, Any]:
    return {"messages": HI, "max_tokens": 4, "prediction": {"type": "content", "content": text}, **more}


_PARTS = [{"type": "text", "text": "once upon a time "}]

ATTACKS: list[Attack] = [
    # ── names and paths ──
    _bad("name-of-1mb", "n" * MB, lambda door: _inside(door, GOOD), 400),
    _bad("name-with-controls", "a\x1b[2J\nforged: x", lambda door: _inside(door, GOOD), 400),
    _bad("name-of-surrogates", "\ud800", lambda door: _inside(door, GOOD), 400),
    _bad("path-of-4mb", "x", lambda door: _inside(door, "a/" * (2 * MB)), 400),
    _bad("path-of-dots", "x", lambda door: _inside(door, "./" * (2 * MB)), 400),
    _bad("path-up", "x", lambda door: _inside(door, "../" * 40 + "etc")),
    _bad("path-of-a-long-name", "x", lambda door: _inside(door, "n" * 300), 400),
    _bad("path-of-surrogates", "x", lambda door: _inside(door, "\ud800"), 400),
    _bad("path-with-null", "x", lambda door: _inside(door, "a\0b"), 400),
    _bad("path-of-devices", "x", lambda door: "/dev/zero", 403),
    _bad("path-of-a-process", "x", lambda door: "/proc/self/environ", 403),
    _bad("path-relative", "x", lambda door: "adapters/good", 403),
    _bad("path-empty", "x", lambda door: "", 400),
    # ── files ──
    Attack("adapter-that-fits", _good, seconds=15.0, check=must_be(200)),
    *(_of_folder(name) for name in (
        "other-base", "empty", "cut", "long-header", "huge-shapes", "many", "most", "patterns", "no-float", "deep", "large-config", "x.gguf", "link", "loop",
        "pipe", "nothing",
    )),
    # ── floods ──
    several("adapter-150-loads", _flood, is_flood=True),
    several("adapter-loads-and-unloads", _load_and_unload, is_flood=True),
    several("adapter-100-loads-that-leave", _leave, is_flood=True),
    several("adapter-600-models-that-are-not", _unknown_models, is_flood=True, check=must_be(404, 429, 503)),
    one("adapter-model-of-1mb", lambda door: door.request("POST", _CHAT, dumped({"model": "m" * MB, "messages": HI})), check=must_be(404)),
    one("adapter-load-by-a-user", lambda door: door.request("POST", _LOAD, dumped({"lora_name": "x", "lora_path": _inside(door, GOOD)})),
        needs="key", check=must_be(403)),
    one("adapter-unload-by-a-user", lambda door: door.request("POST", _UNLOAD, dumped({"lora_name": "x"})), needs="key", check=must_be(403)),
    # ── predictions and sessions ──
    post("prediction-of-12mb", _CHAT, lambda: _predicted("1" * (12 * MB))),
    post("prediction-of-words", _CHAT, lambda: _predicted("once upon a time " * 60_000)),
    post("prediction-of-300000-parts", _CHAT, lambda: _predicted(_PARTS * _many(300_000))),
    post("prediction-in-64", _CHAT, lambda: _predicted("once upon a time there was a fish " * 800, n=64)),
    post("prediction-wrong", _CHAT, lambda: {"prediction": {"type": "content", "content": [[1]] * _many(300_000)}}),
    post("session-key-of-1mb", _CHAT, lambda: {"prompt_cache_key": "k" * MB}),
    post("session-key-of-1mb-responses", "/v1/responses", lambda: {"prompt_cache_key": "k" * MB}),
    post("session-salt-of-1mb", _CHAT, lambda: {"cache_salt": "k" * MB}),
    several("session-600-keys", lambda door: [
        Send([door.request("POST", _CHAT, dumped({"messages": HI, "max_tokens": 1, "prompt_cache_key": f"k{at}"}))]) for at in range(_many(600))
    ], is_flood=True),
    post("speculation-fields", _CHAT, lambda: {"speculative": {"num": 10**9}, "use_speculation": "yes", "num_speculative_tokens": 10**30}),
    # ── routes that operate the server ──
    several("operate-usage", _gets("/v1/usage"), is_flood=True),
    several("operate-fleet", _gets("/v1/fleet", "/v1/prefix", "/slots", "/props", "/api/ps", "/api/tags", "/tokenizer_info"), is_flood=True),
    several("operate-live-history", _gets("/v1/live/history?seconds=86400", "/v1/live/history?seconds=1e400", "/v1/live/history?seconds=-1"),
            is_flood=True),
    several("operate-documents", _gets("/openapi.json", "/v1/compat", "/metrics"), is_flood=True),
    one("operate-scale-by-a-user", lambda door: door.request("POST", "/v1/fleet", dumped({"replicas": 64})), needs="key", check=must_be(403)),
    one("operate-scale-huge", lambda door: door.request("POST", "/v1/fleet", b'{"replicas": 1e30}', key=door.admin_key), check=must_be(400)),
    several("operate-sleep-and-wake", lambda door: [
        Send([door.request("POST", path, b"{}", key=door.other_key)]) for path in ("/sleep", "/wake_up", "/sleep?level=2") for _ in range(_many(40))
    ], is_flood=True, check=_no_server_error),
    several("operate-warm-prefixes", _posts("/v1/prefix", {"action": "warm", "prompt": "once upon a time " * 200}, 100), is_flood=True),
    Attack("streams-of-other-processes", _foreign_streams, is_flood=True, seconds=15.0, check=_no_server_error),
    # ── llama.cpp's and Ollama's routes ──
    post("other-completion-prompts", "/completion", lambda: b'{"n_predict": 1, "prompt": [%s]}' % b",".join([b'"a"'] * _many(900_000))),
    post("other-completion-logit-bias", "/completion", lambda: b'{"prompt": "a", "n_predict": 1, "logit_bias": [%s]}' % b",".join(
        [b'["once upon a time", 1]'] * _many(200_000))),
    post("other-completion-fields", "/completion", lambda: b'{"prompt": "a", "n_predict": 1, "response_fields": [%s]}' % b",".join(
        [b'"a/b/c/d/e/f"'] * _many(200_000))),
    post("other-infill", "/infill", lambda: b'{"input_prefix": "a", "input_suffix": "b", "n_predict": 1, "input_extra": [%s]}' % b",".join(
        [b'{"filename": "f", "text": "t"}'] * _many(200_000))),
    post("other-template", "/apply-template", lambda: b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"a"}'] * _many(200_000))),
    post("other-ollama-chat", "/api/chat", lambda: b'{"messages": [%s]}' % b",".join([b'{"role":"user","content":"a"}'] * _many(200_000))),
    post("other-ollama-generate", "/api/generate", lambda: dumped({"prompt": "1" * (12 * MB), "options": {"num_predict": 1}})),
    post("other-ollama-options", "/api/generate", lambda: dumped({"prompt": "a", "options": {"num_predict": 1} | {f"o{at}": at for at in range(
        _many(200_000))}})),
    post("other-ollama-keep-alive", "/api/generate", lambda: dumped({"prompt": "a", "options": {"num_predict": 1}, "keep_alive": "9" * MB})),
    post("other-ollama-embed", "/api/embed", lambda: b'{"input": [%s]}' % b",".join([b'"a"'] * _many(900_000))),
    post("other-ollama-show", "/api/show", lambda: dumped({"model": "../" * MB})),
    one("other-ollama-delete", lambda door: door.request("DELETE", "/api/delete", dumped({"model": "../" * 1000}), {
        "Content-Type": "application/json"}), check=_no_server_error),
    post("other-compact", "/v1/responses/compact", lambda: b'{"input": [%s]}' % b",".join([b'{"role":"user","content":"a"}'] * _many(200_000))),
]  # fmt: skip
