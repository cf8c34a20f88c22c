"""Measures what a grammar costs: time per token at a batch of 32 with and without one, far from max_tokens and near it, with and
without an end in reach, and with items that must differ; time to first token for a schema of 100 kB that was never seen before;
how long the neighbours pause when one arrives; and that schemas of 500 properties, 100 kB and 60 levels are answered. The sides alternate
in one process; medians are shown, of costs those of each round's ratio. The last lines state whether the targets are met; the exit
code is 1 if one is not.

    python -m benchmarks.grammar [MODEL] [--rows 32] [--tokens 48] [--rounds 5]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.messages import Abort
from octavo.text.grammar.validate import is_valid

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "email": {"type": "string", "format": "email"},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "friend", "colleague"]}, "maxItems": 3},
        "notes": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    },
    "required": ["name", "age", "email", "tags", "notes"],
    "additionalProperties": False,
}
PEOPLE = {"type": "array", "items": PERSON, "minItems": 100}  # longer than any answer here
OPEN_PEOPLE = {"type": "array", "items": PERSON}
NAMES = {"type": "array", "items": {"type": "string", "minLength": 3}, "uniqueItems": True, "minItems": 100}
# A schema whose shortest answer has no room is refused. A grammar around schemas is not.
ENDLESS_PEOPLE = f'start: "[" (person ", "){{99}} person "]"\nperson: %json {json.dumps(PERSON)}'
LONG = 4000  # max_tokens with room for the shortest answer of a large schema
FAR, NEAR = LONG, 150  # max_tokens: ends are searched for from about 200 tokens before it on
# Name of a side → its grammar, max_tokens, and what it may cost of a step; None: it has no target.
SIDES: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "schema, limit is far": ({"json": PEOPLE}, FAR, 0.04),
    "an end in reach": ({"json": OPEN_PEOPLE}, NEAR, 0.04),
    "no end in reach": ({"grammar": ENDLESS_PEOPLE}, NEAR, 0.08),
    "items that differ": ({"json": NAMES}, FAR, None),
}
MAX_FIRST_TOKEN_MS = 130  # added by a schema of 100 kB
PROMPT = "List the people who work here, with their age and address, as JSON, one after the other. This is number {}: "


def large_schema(number: int, num_parts: int = 142) -> dict[str, Any]:
    """Return a schema of about 100 kB that is different for each number."""
    fields = {
        f"part_{number}_{at}": {"$ref": f"#/$defs/kind_{at}"}
        if at % 3
        else {"type": "string", "pattern": "^[a-z]{2,8}$"}
        for at in range(num_parts)
    }
    kinds = {
        f"kind_{at}": {
            "type": "object",
            "description": f"Part {at} of form {number}, which says what there is to say of it, at some length.",
            "properties": {
                **PERSON["properties"],  # type: ignore[dict-item]
                f"choice_{at}": {"enum": [f"{number} {at} {option}" for option in range(12)]},
            },
            "required": ["name", f"choice_{at}"],
            "additionalProperties": False,
        }
        for at in range(num_parts)
    }
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
        "$defs": kinds,
    }


def deep_schema(num_levels: int = 60) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for level in range(num_levels):
        name = f"level_{level}"
        schema = {"type": "object", "properties": {name: schema}, "required": [name], "additionalProperties": False}
    return schema


def wide_schema(number: int, num_properties: int = 600) -> dict[str, Any]:
    """Return a schema that is slow to compile: every second of its properties is optional."""
    kinds = ("string", "integer", "boolean", "number")
    names = [f"property_{number}_{at}" for at in range(num_properties)]
    return {
        "type": "object",
        "properties": {name: {"type": kinds[at % 4]} for at, name in enumerate(names)},
        "required": names[::2],
        "additionalProperties": False,
    }


def longest_pause(llm: LLM, wish: Any, num_neighbours: int = 4, num_steps: int = 60) -> float:
    """Return the seconds of the longest step of some decoding rows while a request with this grammar arrives. Its schema is
    checked before that, as a server does in its API processes."""
    free = SamplingParams(temperature=0.7, seed=1, max_tokens=1000, ignore_eos=True)
    neighbours = [llm._request(PROMPT.format(number), free) for number in range(num_neighbours)]
    comes = llm._request(PROMPT, SamplingParams(temperature=0.7, seed=1, max_tokens=LONG, structured_outputs=wish))
    for request in neighbours:
        llm._loop.add(request)
    for _ in range(8):
        llm._loop.step()
    llm._loop.add(comes)
    took = []
    for _ in range(num_steps):
        started = time.perf_counter()
        llm._loop.step()
        took.append(time.perf_counter() - started)
    for request in (*neighbours, comes):
        llm._loop.abort(Abort(request.id))
    while llm._loop.has_work:
        llm._loop.step()
    return max(took)


def per_step(llm: LLM, rows: int, tokens: int, wish: Any, max_tokens: int, seed: int) -> float:
    """Return the seconds of the median step in which all rows decode: noise and prompts do not count."""
    params = SamplingParams(temperature=0.7, seed=seed, max_tokens=max_tokens, ignore_eos=True, structured_outputs=wish)
    requests = [llm._request(PROMPT.format(number), params) for number in range(rows)]
    for request in requests:
        llm._loop.add(request)
    took = []
    for _ in range(tokens):
        started = time.perf_counter()
        llm._loop.step()
        took.append(time.perf_counter() - started)
    for request in requests:
        llm._loop.abort(Abort(request.id))
    while llm._loop.has_work:
        llm._loop.step()
    return statistics.median(took[4:])  # the first ones compute prompts


def first_token(llm: LLM, wish: Any) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=LONG, structured_outputs=wish)
    started = time.perf_counter()
    stream = llm.stream(PROMPT, params)
    next(stream)
    took = time.perf_counter() - started
    stream.close()  # type: ignore[attr-defined]
    return took


def in_turn(rounds: int, sides: dict[str, Callable[[int], float]]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 else reversed(sides):
            found[name].append(sides[name](number))
    return found


def show(title: str, found: dict[str, list[float]]) -> None:
    print(title)
    for name, seconds in found.items():
        print(
            f"  {name:24} median {statistics.median(seconds) * 1e3:8.2f} ms  ({min(seconds) * 1e3:.2f} to {max(seconds) * 1e3:.2f})"
        )


def is_answered(llm: LLM, schema: dict[str, Any], max_tokens: int) -> bool:
    """Whether an answer to a schema is valid, also where it comes to max_tokens."""
    room = min(max_tokens, llm.report.max_model_len - 200)
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=room, structured_outputs={"json": schema})
    try:
        (output,) = llm.generate(["JSON: "], params, use_tqdm=False)
    except RequestError as error:
        print(f"  refused: {error}")
        return False
    return is_valid(schema, output.outputs[0].text)


def verdict(what: str, seen: str, is_met: bool, target: str) -> bool:
    print(f"{'met   ' if is_met else 'MISSED'}  {what}: {seen} (target: {target})")
    return is_met


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with LLM(options.model or None, max_num_seqs=options.rows) as llm:
        rows, tokens = options.rows, options.tokens
        for wish in (None, {"json": OPEN_PEOPLE}):
            llm.generate(
                [PROMPT.format(n) for n in range(rows)],
                SamplingParams(max_tokens=4, structured_outputs=wish),
                use_tqdm=False,
            )
        steps = in_turn(
            options.rounds,
            {
                "no grammar": lambda number: per_step(llm, rows, tokens, None, FAR, number),
                **{
                    name: lambda number, wish=wish, limit=limit: per_step(  # type: ignore[misc]
                        llm, rows, tokens, wish, limit, number
                    )
                    for name, (wish, limit, _) in SIDES.items()
                },
            },
        )
        show(f"time per step of {rows} tokens", steps)
        costs = {
            name: statistics.median(
                bound / plain - 1 for bound, plain in zip(steps[name], steps["no grammar"], strict=True)
            )
            for name in SIDES
        }
        answered = {
            name: is_answered(llm, schema, max_tokens)
            for name, schema, max_tokens in (
                ("500 properties", wide_schema(-1, 500), LONG),
                ("100 kB", large_schema(-1), LONG),
                ("60 levels", deep_schema(), 1000),
            )
        }
        first = in_turn(
            max(3, options.rounds),
            {
                "no grammar": lambda number: first_token(llm, None),
                "small schema": lambda number: first_token(llm, {"json": PEOPLE}),
                "large schema, new": lambda number: first_token(llm, {"json": large_schema(number)}),
                "large schema, seen": lambda number: first_token(llm, {"json": large_schema(0)}),
            },
        )
        show("time to first token", first)
        pauses = in_turn(
            max(3, options.rounds),
            {
                "small regex, seen": lambda number: longest_pause(llm, {"regex": "a+"}),
                "600 properties, new": lambda number: longest_pause(llm, {"json": wide_schema(number)}),
            },
        )
        show("longest step of 4 neighbours while a request comes", pauses)
    more_ms = 1e3 * (statistics.median(first["large schema, new"]) - statistics.median(first["no grammar"]))
    calm, new = (statistics.median(seconds) * 1e3 for seconds in pauses.values())
    print()
    are_met = [
        verdict(name, f"{cost:+.1%} of a step", cost <= limit, f"at most {limit:.0%}")
        for name, cost in costs.items()
        if (limit := SIDES[name][2]) is not None
    ]
    kilobytes = len(json.dumps(large_schema(0))) / 1000
    words = f"at most {MAX_FIRST_TOKEN_MS} ms more than without"
    are_met.append(
        verdict(
            f"first token of a new schema of {kilobytes:.0f} kB",
            f"{more_ms:+.0f} ms",
            more_ms <= MAX_FIRST_TOKEN_MS,
            words,
        )
    )
    are_met += [
        verdict(f"a schema of {name}", "valid" if is_good else "not valid", is_good, "a valid answer")
        for name, is_good in answered.items()
    ]
    print(f"        items that differ: {costs['items that differ']:+.1%} of a step")
    print(
        f"        neighbours' longest pause: {new:.0f} ms beside a new schema, {calm:.0f} ms beside one that was seen"
    )
    sys.exit(0 if all(are_met) else 1)


if __name__ == "__main__":
    main()
