"""Structured output with the official openai client: `.parse()`, streams, choices, and a neighbour that does not notice."""

import itertools
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import openai
import pytest
from pydantic import BaseModel, Field

from tests.e2e.servers import Server

pytestmark = pytest.mark.model


class City(BaseModel):
    name: str = Field(max_length=20)
    kind: Literal["capital", "town"]
    rivers: list[str] = Field(max_length=2)
    inhabitants: int | None = Field(ge=0)


class Guide(BaseModel):
    city: City
    next: City | None


def ask(text: str) -> list:
    return [{"role": "user", "content": text}]


def test_parse_gives_an_object(client, model):
    answer = client.chat.completions.parse(
        model=model, messages=ask("Describe Paris as JSON."), response_format=City, temperature=0, max_tokens=200
    )
    assert isinstance(answer.choices[0].message.parsed, City) and answer.choices[0].finish_reason == "stop"


def test_a_stream_is_the_same_object(client, model):
    with client.chat.completions.stream(
        model=model, messages=ask("Describe Paris, then Lyon."), response_format=Guide, temperature=0, max_tokens=300
    ) as stream:
        final = stream.get_final_completion()
    assert isinstance(final.choices[0].message.parsed, Guide)


def test_what_cuts_an_answer_says_so(client, model):
    answer = client.chat.completions.create(
        model=model, messages=ask("Describe Paris."), response_format={"type": "json_object"}, max_tokens=3
    )
    assert answer.choices[0].finish_reason == "length"


def test_forms_beyond_json_and_a_neighbour(client, model):
    def plain(_: int) -> str:
        answer = client.completions.create(model=model, prompt="The sea is", max_tokens=40, temperature=1, seed=7)
        return answer.choices[0].text

    def bound(body: dict) -> str:
        answer = client.chat.completions.create(
            model=model, messages=ask("Is the sea blue?"), temperature=1, max_tokens=60, extra_body=body
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    alone = plain(0)
    wishes = [
        {"structured_outputs": {"choice": ["yes", "no", "at night"]}},
        {"structured_outputs": {"regex": r"[A-Z][a-z]{2,9}, \d{2}\."}},
        {"guided_grammar": 'root ::= ("blue" | "grey") (" and " ("deep" | "wide"))?'},
        {"guided_json": {"type": "array", "items": {"enum": ["blue", 3]}, "minItems": 1, "maxItems": 3}},
    ]
    with ThreadPoolExecutor(8) as pool:
        neighbours = [pool.submit(plain, number) for number in range(4)]
        answers = [pool.submit(bound, wish) for wish in wishes]
        choice, regex, grammar, array = (answer.result() for answer in answers)
        assert {neighbour.result() for neighbour in neighbours} == {alone}
    assert choice in ("yes", "no", "at night") and re.fullmatch(r"[A-Z][a-z]{2,9}, \d{2}\.", regex)
    assert re.fullmatch("(blue|grey)( and (deep|wide))?", grammar)
    assert {*json.loads(array)} <= {"blue", 3}


def test_what_cannot_be_kept_to_is_refused(client, model):
    with pytest.raises(openai.BadRequestError, match="contains"):
        schema = {"type": "array", "not": {"not": {"contains": {"const": 1}}}}
        client.completions.create(model=model, prompt="a", extra_body={"guided_json": schema})


@pytest.fixture
def hasty():
    """A server on which a grammar has little time. Its process has a low priority: on a busy machine, a second of computing takes ten."""
    with Server("--kv-cache-memory-bytes", "128M", "--grammar-step-seconds", "0.2") as server:
        yield server
        assert server.terminate() == 0, server.lines


def test_a_grammar_that_takes_too_long_fails_alone(hasty):
    """Each letter that it lets follow makes the next mask slower, up to minutes. A neighbour's stream goes on meanwhile, and
    the server answers. (The check of the request tries the "!", which ends it.)"""
    server, model = hasty, ""
    client = openai.OpenAI(base_url=server.base + "/v1", api_key="unused", max_retries=0, timeout=120)
    rules = range(1000)
    grammar = 'start: "!" | slow\nslow: "a" slow | ' + " | ".join(f"r{n}" for n in rules) + '\nas: "a" as | "a" "c"\n'
    grammar += "".join(f'r{n}: as "b{n}"\n' for n in rules)
    letter = json.loads(server.post("/tokenize", {"prompt": "a", "add_special_tokens": False})[1])["tokens"][0]
    is_over, arrivals, health = threading.Event(), [], []

    def neighbour() -> None:
        stream = client.completions.create(
            model=model,
            prompt="The sea is",
            max_tokens=4000,
            temperature=1,
            seed=7,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        with stream:
            for _ in stream:
                arrivals.append(time.monotonic())
                if is_over.is_set():
                    return

    def watch() -> None:
        while not is_over.is_set():
            health.append(server.get("/health")[0])
            time.sleep(0.1)

    with client, ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(neighbour), pool.submit(watch)]
        try:
            while len(arrivals) < 20:
                time.sleep(0.01)
            started = time.monotonic()
            with pytest.raises(openai.BadRequestError, match="--grammar-step-seconds"):
                client.completions.create(
                    model=model, prompt="a", max_tokens=200, temperature=0, logit_bias={str(letter): 100},
                    extra_body={"structured_outputs": {"grammar": grammar}},
                )  # fmt: skip
            ended = time.monotonic()
        finally:
            is_over.set()
        for thread in threads:
            thread.result()
    during = [started, *(moment for moment in arrivals if started <= moment <= ended), ended]
    assert len(during) > 20 and {*health} == {200}
    # A step waits 0.1 s at most. The bound is that of a busy machine: steps that wait for the mask take 40 s and more.
    assert max(after - before for before, after in itertools.pairwise(during)) < 10
