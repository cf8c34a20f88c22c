"""A grammar in its process: what its text says about its answers is known once it is compiled, however large it is."""

import time

from msgspec import structs

from octavo.errors import Field
from octavo.sampling.grammar.mask_slots import MaskSlots
from octavo.sampling.grammar.matching import Matching, SharedVocabulary
from octavo.sampling.grammar.protocol import Begin, Enter, Fill, RowToFill
from octavo.text.grammar.build import schema_grammar
from tests.walks import EOS, SIZE, SPECIAL, TOKENS, VOCABULARY

BEGIN = Begin([*TOKENS, *SPECIAL], tuple(range(EOS, SIZE)), (EOS, EOS + 1), SIZE, 2, 1, 10.0, 2.0, 2**30)


def failure(num_properties: int, max_tokens: int) -> str:
    """Why an answer of at most so many tokens to a schema of so many required properties is refused. Empty: it is not."""
    names = [f"property_{number}" for number in range(num_properties)]
    parts = {name: {"type": "integer", "description": "what it says"} for name in names}
    schema = {"type": "object", "properties": parts, "required": names, "additionalProperties": False}
    matching = Matching(SharedVocabulary(BEGIN), MaskSlots(SIZE, 2), lambda seconds: None)
    compiled = matching.compile(schema_grammar(schema, VOCABULARY, field=Field("schema")))
    assert not compiled.error
    matching.enter(Enter(1, 0, [EOS], 5, 0, max_tokens, False, True))
    return "".join(row.failure for row in matching.fill(Fill([RowToFill(1, [], 5)])).rows)


def test_the_shortest_answer_of_a_large_grammar_is_known_as_that_of_a_small_one() -> None:
    """The text of a large one is read in another thread than the one that compiles it."""
    for num_properties in (8, 600):
        assert not failure(num_properties, 100_000)
        words = failure(num_properties, 20)
        assert "the shortest one that the grammar allows takes" in words and "max_tokens is 20" in words


def test_the_rows_of_a_step_share_one_limit_of_time() -> None:
    limits: list[float] = []
    matching = Matching(SharedVocabulary(structs.replace(BEGIN, step_seconds=1e6)), MaskSlots(SIZE, 8), limits.append)
    assert not matching.compile(schema_grammar({"type": "string"}, VOCABULARY, field=Field("schema"))).error
    for number in range(8):
        matching.enter(Enter(number, number, [EOS], 5, 0, 100, False, True))
    limits.clear()
    filled = matching.fill(Fill([RowToFill(number, [], 5) for number in range(8)]))
    assert not filled.rows, "all are as usual"
    assert limits == [1e6, 0]
    failed, other = matching.fill(Fill([RowToFill(0, [0], 6), RowToFill(1, [ord('"')], 6)])).rows
    assert failed.failure and not other.failure, "each is answered for if one is not as usual"


def test_work_that_takes_long_is_charged_by_its_processor_time() -> None:
    """And no other row is charged for it."""
    matching = Matching(SharedVocabulary(BEGIN), MaskSlots(SIZE, 8), lambda seconds: None)
    matching.compile(schema_grammar({"type": "string"}, VOCABULARY, field=Field("schema")))
    for number in range(3):
        matching.enter(Enter(number, number, [EOS], 5, 0, 100, False, True))
    matching.fill(Fill([RowToFill(number, [], 5) for number in range(3)]))
    before = {number: row.credit for number, row in matching._rows.items()}
    for number, row in matching._rows.items():
        started = matching._begin_work(row)
        until = time.thread_time() + (0.05 if number == 1 else 0)
        while time.thread_time() < until:
            pass
        matching._end_work(row, started)
    used = [before[number] - row.credit for number, row in matching._rows.items()]
    assert 0.045 < used[1] < 0.1 and used[0] < 0.005 and used[2] < 0.005
