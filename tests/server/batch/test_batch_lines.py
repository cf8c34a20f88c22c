"""Lines to requests, records to files and back, and what a break leaves."""

import io
import json
import resource
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.server.batch.lines import ROOM_AROUND_BODY, BadLine, Line, Rules, read_lines
from octavo.server.batch.records import (
    Record,
    Seen,
    Tally,
    bad_line_record,
    encode_record,
    open_records,
    read_back,
    response_record,
    unanswered_record,
)
from octavo.server.state.loopback import LoopbackResponse

RULES = Rules(("/a", "/b"), max_body_bytes=1000)
GOOD = {"custom_id": "x", "method": "POST", "url": "/a", "body": {"prompt": "p"}}


def read(*lines: object, rules: Rules = RULES) -> list[Line | BadLine]:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(read_lines(io.BytesIO(b"\n".join(texts)), rules))


def test_a_good_line_keeps_its_body_byte_for_byte():
    raw = b'{"url": "/b", "body":  {"prompt" : "\xc3\xa9\\u00e9", "x": 1.0e2}, "method":"POST","custom_id":"\\u00e9"}'
    assert read(b"\xef\xbb\xbf" + raw, b"", b"  \r", raw.replace(b"\\u00e9", b"2")) == [
        Line(1, "é", "/b", b'{"prompt" : "\xc3\xa9\\u00e9", "x": 1.0e2}'),
        Line(4, "2", "/b", b'{"prompt" : "\xc3\xa92", "x": 1.0e2}'),
    ]


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        (b"{not json", "invalid_json_line", "line 2: it is not valid JSON"),
        (b"\xff\xfe", "invalid_json_line", "line 2"),
        (b"[" * 900, "invalid_json_line", "line 2"),
        (b"[]", "invalid_json_line", "must be a JSON object"),
        ({**GOOD, "custom_id": ""}, "invalid_custom_id", "1 to 512"),
        ({**GOOD, "custom_id": 7}, "invalid_type", "custom_id must be a string"),
        (b'{"custom_id": "\\ud800", "method": "POST", "url": "/a", "body": {}}', "invalid", "line 2"),
        ({key: GOOD[key] for key in ("method", "url", "body")}, "missing_required_parameter", "custom_id is missing"),
        ({key: GOOD[key] for key in ("method", "url", "custom_id")}, "missing_required_parameter", "body is missing"),
        ({**GOOD, "method": "GET"}, "invalid_method", "must be POST"),
        ({**GOOD, "url": "/../a"}, "invalid_url", "/a or /b"),
        ({**GOOD, "body": []}, "invalid_json_line", "body must be a JSON object"),
        ({**GOOD, "body": {"stream": True}}, "invalid_value", "stream"),
        ({**GOOD, "body": {"prompt": "p" * 1000}}, "request_too_large", "1000 bytes"),
        (b"x" * (1000 + ROOM_AROUND_BODY + 5), "line_too_long", "line 2 is longer"),
    ],
)
def test_a_bad_line_says_why_and_where_and_the_next_is_read(line, code, says):
    first, bad, last = read(GOOD, line, {**GOOD, "custom_id": "y"})
    assert isinstance(first, Line) and isinstance(last, Line) and last.number == 3
    assert isinstance(bad, BadLine) and bad.code.startswith(code) and says in bad.message, bad


@pytest.mark.parametrize("where", ["line", "body"])
def test_a_line_with_very_many_members_takes_little_memory(where):
    """Nor is it taken apart in one piece, which would hold all threads up."""
    many = ",".join(f'"k{n}":1' for n in range(200_000))
    body, others = ("{" + many + "}", "") if where == "body" else ("{}", many + ",")
    line = ("{" + others + f'"custom_id":"x","method":"POST","url":"/a","body":{body}' + "}").encode()
    rules = Rules(("/a",), max_body_bytes=10**7)
    tracemalloc.start()
    try:
        (read_line,) = read(line, rules=rules)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(line), "a dictionary of its members would take twenty times as much"
    if where == "body":
        assert isinstance(read_line, Line) and read_line.body == body.encode() and not read_line.limits_its_wait
    else:
        assert isinstance(read_line, BadLine) and read_line.code == "line_too_long", read_line


def test_empty_lines_count_where_there_is_a_limit():
    rules = msgspec.structs.replace(RULES, max_lines=100)
    assert [line.number for line in read(*[b""] * 99, GOOD, rules=rules)] == [100]
    (bad,) = read(*[b""] * 100, GOOD, rules=rules)
    assert isinstance(bad, BadLine) and (bad.code, bad.number) == ("too_many_lines", 101)


def test_custom_ids_with_nul_differ_behind_it():
    ids = ["a", "a\0", "a\0b", "a\0c"]
    assert [line.custom_id for line in read(*[{**GOOD, "custom_id": each} for each in ids])] == ids
    seen = Seen()
    assert [seen.add(each) for each in [*ids, *ids]] == [True] * 4 + [False] * 4
    seen.close()


def test_invalid_utf8_is_an_error_of_its_line():
    raw = json.dumps(GOOD).encode()
    for bad in (
        raw.replace(b'"x"', b'"\xff"'),
        raw.replace(b"{", b'{"\xff":1,', 1),
        raw.replace(b'"POST"', b'"\xc0\x80"'),
    ):
        (line,) = read(bad)
        assert isinstance(line, BadLine), line


def test_other_keys_are_named_or_refused():
    (line,) = read({**GOOD, "note": 1})
    assert line.ignored == ("note",)
    (bad,) = read({**GOOD, "note": 1}, rules=msgspec.structs.replace(RULES, is_strict=True))
    assert isinstance(bad, BadLine) and "note" in bad.message


def test_a_seed_is_the_requests_own():
    """Whatever comes before it in the file; and a seed that is given, or has no meaning, is left alone."""
    rules = msgspec.structs.replace(RULES, seeded=frozenset(("/a",)), seed=5)

    def seeds(*lines: dict) -> list[object]:
        return [json.loads(line.body).get("seed") for line in read(*lines, rules=rules)]

    one, two = seeds(GOOD, {**GOOD, "custom_id": "y"})
    assert one != two and seeds({**GOOD, "custom_id": "y"}, GOOD) == [two, one]
    assert seeds({**GOOD, "body": {"seed": None}}, {**GOOD, "body": {"seed": 3}}) == [one, 3]
    assert seeds({**GOOD, "url": "/b"}) == [None]


def records() -> list[Record]:
    answer = LoopbackResponse(
        200, "req-1", None, b'{"usage":{"prompt_tokens":3,"completion_tokens":4,"prompt_tokens_details":null}}\n'
    )
    return [
        response_record(Line(1, "a\n\u2028b", "/a", b"{}"), answer),
        response_record(Line(2, "c", "/a", b"{}", ("note",)), LoopbackResponse(400, "req-2", None, b'{"error":{}}')),
        bad_line_record(BadLine(3, "invalid_url", "line 3: no", "url")),
        unanswered_record(Line(4, "d", "/a", b"{}"), "batch_expired", "late"),
    ]


@given(cut=st.integers(0, 2000))
def test_what_a_break_leaves_is_read_back_and_gone_on_with(cut, tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "out"
    whole = [encode_record(record) for record in records()]
    data = b"".join(whole)[:cut]
    path.write_bytes(data)
    seen, tally = Seen(), Tally()
    with open_records(path) as file:
        read_back(file, "out", seen, tally)
        kept = data.count(b"\n")
        keys = ["a\n\u2028b", "c", 3, "d"]
        assert [key in seen for key in keys] == [at < kept for at in range(4)]
        assert (tally.completed, tally.failed) == (min(kept, 1), max(0, kept - 1))
        assert (tally.input_tokens, tally.output_tokens) == ((3, 4) if kept else (0, 0))
        for record in whole[kept:]:
            file.write(record)
            assert path.read_bytes().endswith(record)  # with the system at once
    assert path.read_bytes() == b"".join(whole)
    seen.close()


@pytest.mark.parametrize("text", [b"my diary", b'{"custom_id": "a"}\n', b"\x00" * 50, b'{"id":"other'])
def test_a_file_of_something_else_is_left_alone(text, tmp_path):
    path = tmp_path / "out"
    path.write_bytes(text)
    with open_records(path) as file, pytest.raises(ConfigError, match="line 1 is not a batch record"):
        read_back(file, "out", Seen(), Tally())
    assert path.read_bytes() == text


def test_seen_tells_numbers_from_names():
    seen = Seen()
    assert seen.add("1") and not seen.add("1") and 1 not in seen and seen.add(1) and "line 1" not in seen
    seen.close()


def test_a_record_that_does_not_fit_is_not_begun(tmp_path):
    record = encode_record(records()[0])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with open_records(tmp_path / "out") as file:
        file.write(record)
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (len(record) + 10, before[1]))  # as a disk that is full
            with pytest.raises(OSError, match="too large"):
                file.write(record)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert (tmp_path / "out").read_bytes() == record
        file.write(record)
    assert (tmp_path / "out").read_bytes() == 2 * record
