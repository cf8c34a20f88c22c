"""Measures coverage: which schemas of the collection are accepted, in the strict mode and with unenforced "check", and whether all
answers to them are valid. An answer is made of random tokens that the grammar allows, ended within its max_tokens as the engine does it.

    python -m benchmarks.schemas [--answers 2] [--max-tokens 150] [--every N [--offset K]] [--style NAME] [--seed OTHER] [--show REFUSALS]

Exit code 1: fewer than 95 % are accepted in the strict mode, an answer is invalid, or the collection has changed."""

import argparse
import functools
import json
import random
import re
import sys
import time
from collections import Counter
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for
from llguidance import LLMatcher

from benchmarks.schemas.collection import DIGEST, SEED, collection, digest
from octavo.errors import Field, RequestError
from octavo.sampling.grammar.budgeted_end import BudgetedEnd, Ends
from octavo.sampling.grammar.growth import growth_of_grammar
from octavo.sampling.grammar.guarded_matcher import TokenKinds, guarded
from octavo.sampling.grammar.matching import shortest_answer
from octavo.text.grammar.build import BuiltGrammar, build_schema
from octavo.text.grammar.keywords import FORMATS
from octavo.text.grammar.limits import STACK_BYTES, on_stack, parser_limits
from octavo.text.grammar.schema_tree import rebuilt
from octavo.text.grammar.validate import _modern, _with_null
from octavo.text.tokenize.vocabulary import Vocabulary

MIN_ACCEPTED = 0.95
# Beside single bytes: pieces as the tokens of models are, across the parts of JSON.
PIECES = ['":', '": ', '","', '", "', '{"', '"}', "},", '"},', "}}", "null", "true", "false", ' "', "00", "12", "20", "type", "name",
          "]]", "[]", "{}", '"]', "\n  ", "kind", "é", "日", "\\n", ".5", "-0", "the ", " and", "value", '":"', "a", "or"]  # fmt: skip
TOKENS = [*(bytes([byte]) for byte in range(256)), *dict.fromkeys(piece.encode() for piece in PIECES if len(piece) > 1)]
EOS = len(TOKENS)
CHECKER = jsonschema.FormatChecker(
    [name for name in FORMATS if name in jsonschema.FormatChecker.checkers and name != "time"]
)
VOCABULARY = Vocabulary(EOS + 1, [*TOKENS, b"<end>"].__getitem__, frozenset({EOS}), (EOS,))


class Answers:
    """Random answers within grammars."""

    def __init__(self, max_tokens: int) -> None:
        self._tokenizer = VOCABULARY.tokenizer(EOS + 1)
        self._ends = Ends(VOCABULARY, EOS + 1)
        self._kinds = TokenKinds(VOCABULARY, EOS + 1)
        self._max_tokens = max_tokens

    def one(self, built: BuiltGrammar, seed: str) -> str | None:
        """None: the shortest answer does not fit."""
        rng = random.Random(seed)
        compiled = LLMatcher(self._tokenizer, built.grammar, log_level=0, limits=parser_limits())
        matcher = guarded(compiled, built.grammar, self._kinds)
        proposals = self._ends.proposals(built.grammar, self._kinds.fewest_tokens)
        shortest = shortest_answer(self._ends, self._kinds, matcher, built.grammar, proposals)
        ending, text = (
            BudgetedEnd.of(shortest, proposals, growth_of_grammar(built.grammar, self._kinds.fewest_tokens)),
            b"",
        )
        bits = np.zeros(-(-(EOS + 1) // 32), dtype=np.int32)
        # A request that has no room for the shortest answer is refused.
        max_tokens = max(self._max_tokens, len(shortest.tokens) if shortest else 0)
        for num_left in range(max_tokens, 0, -1):
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
            is_last = self._ends.restrict(ending, matcher, bits, num_left)
            ids = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")[: EOS + 1]).tolist()
            assert ids, f"nothing can follow {text!r}: {matcher.get_error()}"
            token = EOS if EOS in ids and (len(ids) == 1 or rng.random() < 0.5) else rng.choice(ids)
            if token == EOS:
                return text.decode()
            text += TOKENS[token]
            assert matcher.consume_token(token), matcher.get_error()
            ending.last = token
            if is_last:
                return text.decode()
        return text.decode() if matcher.is_accepting() else None


def validator_of(schema: dict[str, Any]) -> Any:
    """jsonschema's own validator of the schema's draft, with `nullable` as a union, and the formats that are enforced."""
    known = validator_for(schema, default=jsonschema.Draft202012Validator)
    if known is jsonschema.Draft202012Validator:
        schema = rebuilt(schema, _modern)
    return known(rebuilt(schema, _with_null), format_checker=CHECKER)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--answers", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=150)
    parser.add_argument("--every", type=int, default=1, help="measure every n-th schema only")
    parser.add_argument(
        "--offset", type=int, default=0, help="with --every: the first schema to measure, from 0 to N - 1"
    )
    parser.add_argument("--style", default="")
    parser.add_argument("--seed", default=SEED, help="another collection in the same styles")
    parser.add_argument("--show", type=int, default=20, help="kinds of refusals to list")
    options = parser.parse_args()
    has_changed = options.seed == SEED and digest() != DIGEST
    chosen = [(name, schema) for name, schema in collection(options.seed) if name.startswith(options.style)][
        options.offset :: options.every
    ]
    answers, counts, reasons, by_style = Answers(options.max_tokens), Counter[str](), Counter[str](), Counter[str]()
    slowest = (0.0, "")
    for name, schema in chosen:
        started = time.process_time()
        try:
            built = on_stack(STACK_BYTES, functools.partial(build_schema, schema, VOCABULARY, field=Field("schema")))
        except RequestError as error:
            message = str(error.message)
            reasons[re.sub(r"\(at .*?\)|'[^']{12,}'|[0-9]+", "…", message)[:110]] += 1
            by_style[name.rpartition("-")[0]] += 1
            try:
                on_stack(
                    STACK_BYTES,
                    functools.partial(build_schema, schema, VOCABULARY, field=Field("schema"), may_leave_out=True),
                )
                counts["checked"] += 1
            except RequestError:
                counts["refused"] += 1
            continue
        slowest = max(slowest, (time.process_time() - started, name))
        counts["enforced"] += 1
        validator = validator_of(schema)
        for number in range(options.answers):
            text = answers.one(built, f"{name} {number}")
            if text is None:
                counts["cut"] += 1
                print(f"CUT      {name}")
                continue
            counts["answers"] += 1
            try:
                validator.validate(json.loads(text))
            except (ValueError, jsonschema.ValidationError) as error:
                counts["invalid"] += 1
                print(f"INVALID  {name}: {text[:200]}: {str(error).splitlines()[0][:200]}")
    for reason, number in reasons.most_common(options.show):
        print(f"  {number:4} × {reason}")
    print(
        "  refused in strict mode, by style: "
        + ", ".join(f"{style} {number}" for style, number in by_style.most_common())
    )
    share = counts["enforced"] / len(chosen)
    print(
        f"{len(chosen)} schemas: {counts['enforced']} accepted ({share:.1%}), {counts['checked']} more with check, "
        f"{counts['refused']} refused; {counts['answers']} answers, {counts['invalid']} invalid, {counts['cut']} cut; "
        f"slowest check {slowest[0] * 1e3:.0f} ms ({slowest[1]})"
    )
    if has_changed:
        print("the collection has changed")
    sys.exit(1 if share < MIN_ACCEPTED or counts["invalid"] or counts["cut"] or has_changed else 0)


if __name__ == "__main__":
    main()
