"""Runs JSON-Schema-Test-Suite, or cases in its form, against the grammars of its schemas. For each schema the verdict is one of:

    enforced   every invalid value of its tests is rejected, and every valid one accepted
    narrower   enforced, but a valid value is rejected for a reason that the guide documents
    checked    refused by name in the strict mode; with unenforced "check", the verdict on every value is right
    refused    refused by name in both modes
    WRONG      an invalid value is accepted, or a valid one rejected for no such reason

    python -m benchmarks.schemas.suite DIRECTORY... [--show VERDICT] [--only NAME]

A directory's name says its draft (draft4, draft7, draft2019-09, …), which schemas without a $schema get."""

import argparse
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from llguidance import LLMatcher

from octavo.errors import Field, RequestError
from octavo.sampling.grammar.guarded_matcher import TokenKinds, guarded
from octavo.text.grammar.build import build_schema
from octavo.text.grammar.keywords import draft_of
from octavo.text.grammar.limits import STACK_BYTES, on_stack, parser_limits
from octavo.text.grammar.validate import is_valid
from octavo.text.tokenize.vocabulary import Vocabulary

DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
VOCABULARY = Vocabulary(257, lambda token: bytes([token]) if token < 256 else b"<end>", frozenset({256}), (256,))
KINDS = TokenKinds(
    Vocabulary(VOCABULARY.size, lambda token: bytes([VOCABULARY.byte_ids.index(token)]), frozenset({256}), (256,)), 256
)
_MAX_SAFE = 2**53
_MAX_ORDERS = 120


class Verdict(NamedTuple):
    kind: str
    why: str = ""


def judge(schema: Any, tests: list[dict[str, Any]]) -> Verdict:
    try:
        grammar = build_schema(schema, VOCABULARY, field=Field("schema")).grammar
    except RequestError as error:
        return _checked(schema, tests, str(error.message))
    narrower = ""
    tells_floats = isinstance(schema, dict) and draft_of(schema.get("$schema")) == 4  # 1.0 is no integer there
    for test in tests:
        value = test["data"]
        is_accepted = any(accepts(grammar, text) for text in spellings(value, tells_floats and not test["valid"]))
        if is_accepted and not test["valid"]:
            return Verdict("WRONG", f"accepts {json.dumps(value)}: {test['description']}")
        if test["valid"] and not is_accepted:
            why = documented(schema, value)
            if not why:
                return Verdict("WRONG", f"rejects {json.dumps(value)}: {test['description']}")
            narrower = f"{json.dumps(value)[:60]}: {why}"
    return Verdict("narrower", narrower) if narrower else Verdict("enforced")


def _checked(schema: Any, tests: list[dict[str, Any]], refusal: str) -> Verdict:
    try:
        build_schema(schema, VOCABULARY, field=Field("schema"), may_leave_out=True)
    except RequestError:
        return Verdict("refused", refusal)
    for test in tests:
        if is_valid(schema, json.dumps(test["data"])) != test["valid"]:
            return Verdict("WRONG", f"the check of {json.dumps(test['data'])} is wrong: {test['description']}")
    return Verdict("checked", refusal)


def accepts(grammar: str, text: str) -> bool:
    compiled = LLMatcher(VOCABULARY.stand_in, grammar, log_level=0, limits=parser_limits())
    matcher = guarded(compiled, grammar, KINDS)
    ids = [VOCABULARY.byte_ids[byte] for byte in text.encode()]
    return bool(matcher.consume_tokens(ids)) and matcher.is_accepting()


def spellings(value: Any, tells_floats: bool = False) -> Iterator[str]:
    """A value as JSON, with its properties in any order, and whole numbers as integers unless `tells_floats`."""
    seen = set()
    for ordered in itertools.islice(_orders(value), _MAX_ORDERS):
        for given in (ordered, ordered if tells_floats else _whole(ordered)):
            text = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
            if text not in seen and not _has_surrogates(text):
                seen.add(text)
                yield text


def _has_surrogates(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


def _orders(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for keys in itertools.permutations(value):
            for parts in itertools.product(*(list(itertools.islice(_orders(value[key]), 24)) for key in keys)):
                yield dict(zip(keys, parts, strict=True))
    elif isinstance(value, list):
        for parts in itertools.product(*(list(itertools.islice(_orders(part), 24)) for part in value)):
            yield list(parts)
    else:
        yield value


def _whole(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < _MAX_SAFE:
        return int(value)
    if isinstance(value, list):
        return [_whole(part) for part in value]
    return {key: _whole(part) for key, part in value.items()} if isinstance(value, dict) else value


def documented(schema: Any, value: Any) -> str:
    """Why a valid value may be rejected. Empty: it may not."""
    text = json.dumps(value)
    if any(isinstance(part, int | float) and abs(part) >= _MAX_SAFE for part in _leaves(value)):
        return "an integer beyond 2**53"
    if any(isinstance(part, float) and "e" in repr(part) for part in _leaves(value)):
        return "a number with an exponent"
    if "\\u007f" in text or any(
        ord(character) < 32 for part in _leaves(value) if isinstance(part, str) for character in part
    ):
        return "a control character"
    if re.search(r"\\\\[sSdDwW]", json.dumps(schema)) and any(
        ord(character) > 127 for part in _leaves(value) if isinstance(part, str) for character in part
    ):
        return "\\s, \\d, \\w and their opposites match ASCII characters only"
    if isinstance(schema, dict) and draft_of(schema.get("$schema")) is None:
        return "a metaschema of its own is not read"
    if "format" in json.dumps(schema):
        return "a format is enforced"
    return ""


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    elif not isinstance(value, bool):
        yield value


def cases(directory: Path) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    name = next((part for part in reversed(directory.parts) if part in DRAFTS), None)
    if name is None:
        raise SystemExit(f"{directory}: the path names none of the drafts {', '.join(DRAFTS)}")
    draft = DRAFTS[name]
    for file in sorted(directory.rglob("*.json")):
        if "format" in file.parts or file.name in ("format.json", "content.json"):
            continue  # both are asserted or not, as an implementation likes: some formats are here, contents are not
        for case in json.loads(file.read_text()):
            schema = case["schema"]
            if isinstance(schema, dict) and "$schema" not in schema:
                schema = {"$schema": draft, **schema}
            yield f"{file.relative_to(directory)}: {case['description']}", schema, case["tests"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--show", action="append", default=["WRONG"])
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    num_wrong = 0
    for directory in options.directories:
        counts: Counter[str] = Counter()
        for name, schema, tests in cases(directory):
            if options.only and options.only not in name:
                continue
            verdict = on_stack(STACK_BYTES, lambda schema=schema, tests=tests: judge(schema, tests))  # type: ignore[misc]
            counts[verdict.kind] += 1
            if verdict.kind in options.show:
                print(f"{verdict.kind:9} {name}: {verdict.why}")
        num_wrong += counts["WRONG"]
        print(
            f"{directory}: {sum(counts.values())} schemas: "
            + ", ".join(f"{kind} {counts[kind]}" for kind in sorted(counts))
        )
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
