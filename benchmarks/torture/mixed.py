"""The requests of a soak: every computing endpoint, long and short, shared prefixes, grammars, several choices."""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_WORDS = ("tree", "river", "stone", "cloud", "fish", "lamp", "door", "moon")
_SHARED = "You are a careful gardener. Answer in short sentences, name the plants, and never invent a flower. " * 4
_PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@dataclass(frozen=True, slots=True)
class Ask:
    kind: str
    path: str
    body: bytes
    is_stream: bool


def ask(dice: random.Random) -> Ask:
    kind = dice.choice(list(KINDS))
    path, fields = KINDS[kind](dice)
    is_stream = kind != "embeddings" and dice.random() < 0.7
    if is_stream:
        fields["stream"] = True
    return Ask(kind, path, json.dumps(fields).encode(), is_stream)


def _words(dice: random.Random) -> str:
    return " ".join(dice.choices(_WORDS, k=dice.choice([5, 50, 400])))


def _sampling(dice: random.Random) -> dict[str, Any]:
    return {"max_tokens": dice.choice([4, 40, 200]), "temperature": dice.choice([0, 1.0])}


def _completion(dice: random.Random) -> tuple[str, dict[str, Any]]:
    fields = {"prompt": _words(dice), "stop": dice.choice([None, ["."]]), **_sampling(dice)}
    return "/v1/completions", fields


def _several(dice: random.Random) -> tuple[str, dict[str, Any]]:
    fields = {"prompt": [_words(dice), "Once upon a time"], "n": 3, "logprobs": dice.choice([None, 2])}
    return "/v1/completions", {**fields, **_sampling(dice), "temperature": 1.0}


def _shared(dice: random.Random) -> tuple[str, dict[str, Any]]:
    fields = {"prompt": _SHARED + dice.choice(_WORDS), "ignore_eos": True}
    return "/v1/completions", {**fields, **_sampling(dice)}


def _chat(dice: random.Random) -> tuple[str, dict[str, Any]]:
    messages = [{"role": "system", "content": _SHARED}, {"role": "user", "content": _words(dice)}]
    return "/v1/chat/completions", {"messages": messages[dice.randrange(2) :], **_sampling(dice)}


def _grammar(dice: random.Random) -> tuple[str, dict[str, Any]]:
    wish = {"type": "json_schema", "json_schema": {"name": "person", "schema": _PERSON}}
    messages = [{"role": "user", "content": f"Who likes the {dice.choice(_WORDS)}? Answer in JSON."}]
    return "/v1/chat/completions", {"messages": messages, "response_format": wish, "max_tokens": 60}


def _response(dice: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {"input": _words(dice), "max_output_tokens": dice.choice([16, 80])}


def _message(dice: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": [{"role": "user", "content": _words(dice)}], "max_tokens": 40}


def _embeddings(dice: random.Random) -> tuple[str, dict[str, Any]]:
    return "/v1/embeddings", {"input": [_words(dice), _words(dice)]}


KINDS: dict[str, Callable[[random.Random], tuple[str, dict[str, Any]]]] = {
    "completion": _completion,
    "n of 3": _several,
    "shared beginning": _shared,
    "chat": _chat,
    "grammar": _grammar,
    "response": _response,
    "message": _message,
    "embeddings": _embeddings,
}
