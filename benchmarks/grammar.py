"""Measures what a grammar costs: time per token at a batch of 32 with and without one, time to first token for a large
schema that was never seen before, and how long the neighbours pause when one arrives. The sides alternate in one process;
medians are shown. The last lines state whether the targets are met.

    python -m benchmarks.grammar [MODEL] [--rows 32] [--tokens 48] [--rounds 5]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from octavo import LLM, SamplingParams
from octavo.messages import Abort

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
MAX_OVERHEAD = 0.05  # per token
MAX_FIRST_TOKEN_MS = 100  # added by a large schema
PROMPT = "List the people who work here, with their age and address, as JSON, one after the other. This is number {}: "


def large_schema(number: int, num_parts: int = 100) -> dict[str, Any]:
    """Return a schema of about 70 kB that is different for each number."""
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
    comes = llm._request(PROMPT, SamplingParams(temperature=0.7, seed=1, max_tokens=1000, structured_outputs=wish))
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


def per_step(llm: LLM, rows: int, tokens: int, wish: Any, seed: int) -> float:
    """Return the seconds of the median step in which all rows decode: noise and prompts do not count. max_tokens is far
    away: near it, answers are brought to their ends."""
    params = SamplingParams(
        temperature=0.7, seed=seed, max_tokens=1000, ignore_eos=wish is None, structured_outputs=wish
    )
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
    params = SamplingParams(temperature=0.0, max_tokens=1000, structured_outputs=wish)
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


def verdict(what: str, seen: str, is_met: bool, target: str) -> None:
    print(f"{'met   ' if is_met else 'MISSED'}  {what}: {seen} (target: {target})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with LLM(options.model or None, max_num_seqs=options.rows) as llm:
        rows, tokens = options.rows, options.tokens
        for wish in (None, {"json": PEOPLE}):
            llm.generate(
                [PROMPT.format(n) for n in range(rows)],
                SamplingParams(max_tokens=4, structured_outputs=wish),
                use_tqdm=False,
            )
        steps = in_turn(
            options.rounds,
            {
                "no grammar": lambda number: per_step(llm, rows, tokens, None, number),
                "JSON schema": lambda number: per_step(llm, rows, tokens, {"json": PEOPLE}, number),
            },
        )
        show(f"time per step of {rows} tokens", steps)
        plain, bound = (statistics.median(seconds) for seconds in steps.values())
        overhead = bound / plain - 1
        print(f"  overhead {overhead:+.1%}")
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
    verdict("overhead per token", f"{overhead:+.1%}", overhead < MAX_OVERHEAD, f"under {MAX_OVERHEAD:.0%}")
    verdict("first token", f"{more_ms:+.0f} ms", more_ms < MAX_FIRST_TOKEN_MS, f"under {MAX_FIRST_TOKEN_MS} ms more")
    print(
        f"        neighbours' longest pause: {new:.0f} ms beside a new schema, {calm:.0f} ms beside one that was seen"
    )


if __name__ == "__main__":
    main()
