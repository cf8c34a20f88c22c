"""A grammar in its process: what its text says about its answers is known once it is compiled, however large it is."""

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
