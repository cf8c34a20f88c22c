"""TextStream: what ends a choice, how the end is reported, and the remaining text. The deltas are made by hand."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vocabularies import byte_level, gguf_of_byte_level

from octavo.messages import Finish, SamplingParams
from octavo.text import Text, TextDelta, TextStream
from octavo.text.chat.template import ChatTemplate
from octavo.text.tokenize.gguf_vocab import gguf_tokenizer, read_vocabulary

TOKENIZER = gguf_tokenizer(read_vocabulary(gguf_of_byte_level(byte_level(), "gpt-2")))
EOS = TOKENIZER.token_id("<|end|>")
assert EOS is not None
TEXT = Text(TOKENIZER, ChatTemplate({}, {}), [EOS])


def stream(**params: Any) -> TextStream:
    return TEXT.stream(SamplingParams(max_tokens=None, **params))


def letters(text: str) -> list[int]:
    """One token for each byte, so that a test can place boundaries."""
    return [TEXT.encode(character, False)[0] for character in text]


def run(stream: TextStream, token_ids: list[int], finish: Finish, step: int = 1) -> Iterator[TextDelta]:
    for at in range(0, len(token_ids), step):
        last = at + step >= len(token_ids)
        yield stream.push(token_ids[at : at + step], finish if last else None)
        if stream.stopped:
            return


def test_the_end_of_sequence_ends_with_stop_and_no_reason() -> None:
    delta = stream().push([*letters("ab"), EOS], Finish("stop", stop_token=EOS))
    assert delta == TextDelta("ab", "stop", None, 3)


def test_a_stop_token_is_named_and_its_text_left_out() -> None:
    b = letters("b")[0]
    delta = stream(stop_token_ids=[b]).push(letters("ab"), Finish("stop", stop_token=b))
    assert delta == TextDelta("a", "stop", b, 2)


def test_an_end_of_sequence_that_is_also_a_stop_id_is_named_only_when_ignored_as_such() -> None:
    finish = Finish("stop", stop_token=EOS)
    assert stream(stop_token_ids=[EOS]).push([EOS], finish).stop_reason is None
    assert stream(stop_token_ids=[EOS], ignore_eos=True).push([EOS], finish).stop_reason == EOS


def test_a_stop_token_in_mid_output_is_text_like_any_other() -> None:
    b = letters("b")[0]
    delta = stream(stop_token_ids=[b], min_tokens=2).push(letters("bab"), Finish("stop", stop_token=b))
    assert delta == TextDelta("ba", "stop", b, 3)


def test_a_stop_string_across_tokens_stops_counts_and_cuts() -> None:
    one = stream(stop=["cd"])
    deltas = list(run(one, letters("abcdefg"), Finish("length")))
    assert "".join(delta.text for delta in deltas) == "ab"
    assert deltas[-1] == TextDelta("", "stop", "cd", 4)
    assert one.stopped
    assert one.push(letters("zz"), Finish("abort")) == TextDelta("", None, None, 4)


def test_held_text_is_released_when_the_length_is_reached() -> None:
    deltas = list(run(stream(stop=["cd"]), letters("abc"), Finish("length")))
    assert [delta.text for delta in deltas] == ["a", "b", "c"]
    assert deltas[-1].finish_reason == "length"


def test_a_stop_string_beats_the_length_reached_with_it() -> None:
    delta = stream(stop="c").push(letters("abc"), Finish("length"))
    assert delta == TextDelta("ab", "stop", "c", 3)


def test_held_bytes_are_flushed_at_the_end_through_the_stop_strings() -> None:
    half = TEXT.encode("Ω", False)[:1]
    assert stream().push(half, Finish("length")).text == "\ufffd"
    assert stream(stop="\ufffd").push(half, Finish("length")) == TextDelta("", "stop", "\ufffd", 1)


def test_an_error_and_an_abort_pass_through() -> None:
    assert stream().push([], Finish("abort")) == TextDelta("", "abort", None, 0)
    assert stream().push([], Finish("error", message="lost")).finish_reason == "error"


@pytest.mark.parametrize(
    ("min_tokens", "expected"), [(0, ("", 2)), (1, ("", 2)), (2, ("ab", 4)), (3, ("ab", 4)), (4, ("abab", 4))]
)
def test_min_tokens_passes_over_stop_strings_completed_too_early(min_tokens: int, expected: tuple[str, int]) -> None:
    deltas = list(run(stream(stop="ab", min_tokens=min_tokens), letters("abab"), Finish("length")))
    assert ("".join(delta.text for delta in deltas), deltas[-1].num_tokens) == expected


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    output=st.lists(st.integers(0, TEXT.vocab_size - 1), max_size=25),
    stops=st.lists(st.text("ab \ufffdé", min_size=1, max_size=3), max_size=3),
    step=st.integers(1, 5),
    min_tokens=st.integers(0, 4),
)
def test_the_number_of_tokens_in_a_delta_changes_nothing(
    output: list[int], stops: list[str], step: int, min_tokens: int
) -> None:
    one_by_one = list(run(stream(stop=stops, min_tokens=min_tokens), output, Finish("length")))
    at_once = list(run(stream(stop=stops, min_tokens=min_tokens), output, Finish("length"), step))
    assert "".join(d.text for d in one_by_one) == "".join(d.text for d in at_once)
    if output:
        assert (one_by_one[-1].stop_reason, one_by_one[-1].num_tokens) == (
            at_once[-1].stop_reason,
            at_once[-1].num_tokens,
        )
        if one_by_one[-1].stop_reason is None:
            assert "".join(d.text for d in at_once) == TEXT.decode(output)
