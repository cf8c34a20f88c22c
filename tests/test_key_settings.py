"""Lines of a file of keys: what they were, and what columns behind a key set."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.key_settings import KeySettings, decode, encode, read_key_file


def test_files_of_before_mean_what_they_meant() -> None:
    text = "# keys\n\none\n  two  \nadmin: boss\na pass phrase\ntwo words\n"
    found = read_key_file(text, "FILE")
    assert found.keys == ["one", "two", "a pass phrase", "two words"]
    assert found.admin_keys == ["boss"] and not found.settings


def test_columns_and_words() -> None:
    text = "k1 team-a 2 60 50k 8192 1M/day\nk2 team-b - - - - 500\nk3 rpm=5 name=c\nadmin: k4 ops 0.5 budget_tokens=7\nk5 d 4\n"
    found = read_key_file(text, "FILE")
    assert found.keys == ["k1", "k2", "k3", "k5"] and found.admin_keys == ["k4"]
    assert found.settings == {
        "k1": KeySettings("team-a", 2.0, 60, 50_000, 8192, 1_000_000),
        "k2": KeySettings("team-b", budget_tokens=500),
        "k3": KeySettings("c", rpm=5),
        "k4": KeySettings("ops", 0.5, budget_tokens=7),
        "k5": KeySettings("d", 4.0),
    }
    assert decode(encode(found.settings)) == found.settings


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a\nk team 0", "line 2: weight '0' must be a number from 0.001 to 1000"),
        ("k team 1e9", "line 1: weight"),
        ("k te/am 1", "line 1: name 'te/am' must be at most 64"),
        ("k team 1 -5", "line 1: rpm '-5' must be a whole number above 0"),
        ("k team 1 0", "line 1: rpm '0'"),
        ("k team 1 1 1 1 1/hour", "line 1: budget_tokens '1/hour'"),
        ("k team 1 1 1 1 1 1", "line 1: 8 columns; a line has at most 7"),
        ("k rpm=1 rpm=2", "line 1: rpm is given twice"),
        ("k rpm=1 rps=2", "line 1: 'rps' is no setting of a key"),
        ("k rpm=1 5", "line 1: '5' stands behind a name=value"),
        ("k team 1\n\nk team 2", "line 3: the key is in line 1, too"),
        ("k team 1\nk", "line 2: the key is in line 1, too"),
        ("k team 1\nl team 1", "line 2: the name 'team' is in line 1, too"),
        ("k,l team 1", "line 1: the key has a comma"),
        ("admin:", "line 1: 'admin:' without a key"),
        ("k team 99999999999999999999", "line 1: weight"),
        ("k team 1 99999999999999999999", "line 1: rpm"),
    ],
)
def test_errors_name_the_line(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_key_file(text, "--api-key-file FILE")
    assert words in str(raised.value) and str(raised.value).startswith("--api-key-file FILE, ")


@given(st.text(max_size=200))
def test_any_file_is_read_or_refused(text: str) -> None:
    try:
        found = read_key_file(text, "FILE")
    except ConfigError as error:
        assert "line" in str(error)
    else:
        assert all(key and "," not in key for key in [*found.keys, *found.admin_keys])


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"k": 1}',
        '{"k": {"rps": 1}}',
        '{"k": {"rpm": -1}}',
        '{"a": {"name": "x"}, "b": {"name": "x"}}',
        '{"k": {"name": "a b"}}',
    ],
)
def test_settings_as_json_are_checked_as_well(text: str) -> None:
    with pytest.raises(ConfigError, match="--key-settings"):
        decode(text)


def test_weights_reach_other_processes_as_they_are() -> None:
    """What a file of keys says is passed on as --key-settings."""
    found = read_key_file("sk-1 a 2.592233720368547\nsk-2 b 0.001\nsk-3 c 3 60\n", "keys").settings
    assert decode(encode(found)) == found
