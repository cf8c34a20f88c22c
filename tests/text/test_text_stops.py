"""Stop strings: however the text is cut into pieces, the answer is the one computed on the whole."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.text.stops import StopStrings

letters = st.sampled_from("aabx^]-")  # with letters that begin no word
words = st.text(st.sampled_from("aaab^]-"), min_size=1, max_size=8)


def offline(pieces: list[str], stops: list[str], num_ignored: int) -> tuple[str, str | None]:
    """The definition: the first character that completes a stop string, ignoring the characters of the first pieces."""
    text = "".join(pieces)
    for end in range(len("".join(pieces[:num_ignored])) + 1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def online(pieces: list[str], stops: list[str], num_ignored: int) -> tuple[str, str | None]:
    search = StopStrings(stops)
    shown = ""
    for number, piece in enumerate(pieces):
        released = search.feed(piece, counts=number >= num_ignored)
        shown += released.text
        if released.stop is not None:
            return shown, released.stop
    return shown + search.flush(), None


@settings(max_examples=1000, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text(letters, max_size=4), max_size=12),
    stops=st.lists(words, max_size=4),
    num_ignored=st.integers(0, 6),
)
def test_cut_into_pieces_or_whole_the_answer_is_the_same(pieces: list[str], stops: list[str], num_ignored: int) -> None:
    assert online(pieces, stops, num_ignored) == offline(pieces, stops, num_ignored)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    pieces=st.lists(st.text(letters, max_size=4), max_size=12),
    stops=st.lists(words, min_size=1, max_size=4),
    num_ignored=st.integers(0, 12),
)
def test_nothing_is_held_that_cannot_become_a_stop_string(
    pieces: list[str], stops: list[str], num_ignored: int
) -> None:
    search = StopStrings(stops)
    text = shown = ""
    for number, piece in enumerate(pieces):
        released = search.feed(piece, counts=number >= num_ignored)
        if released.stop is not None:
            return
        text, shown = text + piece, shown + released.text
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_the_match_complete_first_wins_and_at_one_character_the_longest() -> None:
    assert online(list("xabcd"), ["abcd", "bc"], 0) == ("xa", "bc")
    assert online(["xabc"], ["bc", "abc"], 0) == ("x", "abc")


def test_a_stop_string_that_repeats_itself_is_found_after_a_false_start() -> None:
    assert online(["aabaaabaaac"], ["aabaaac"], 0) == ("aaba", "aabaaac")


def test_a_disproved_suffix_is_released() -> None:
    search = StopStrings(["###"])
    assert search.feed("one #").text == "one "
    assert search.feed("#").text == ""
    assert search.feed(" two").text == "## two"


def test_without_stop_strings_text_passes_through() -> None:
    search = StopStrings([])
    assert search.feed("abc").text == "abc"
    assert search.flush() == ""


def test_a_long_stop_string_costs_no_more_for_each_character() -> None:
    search = StopStrings(["a" * 50_000 + "b"])
    assert search.feed("a" * 60_000).text == "a" * 10_000
    assert search.feed("b").stop is not None


def test_choices_share_the_tables_of_their_stop_strings() -> None:
    """Each of 1,024 prompts had tables of its own, for 64 stop strings of 1,024 characters: two gigabytes."""
    stops = [f"{number:04}" + "ab" * 500 for number in range(64)]
    StopStrings(stops)
    tracemalloc.start()
    searches = [StopStrings(stops) for _ in range(200)]
    num_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_bytes < 2_000_000 < 200 * 64 * 1000
    for number, search in enumerate(searches[:3]):  # and have states of their own
        assert search.feed(stops[0][: 10 * number]).text == ""
    assert [search.feed("x").text for search in searches[:3]] == [stops[0][: 10 * number] + "x" for number in range(3)]
