"""Tool calls in every format: the same for any cut into pieces, whole or content, never half a call, never lost text.
Needs no model: answers are written here as the formats' models write them."""

import json
from collections.abc import Callable, Iterable
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError
from octavo.text.parsers import (
    AnswerParser,
    CallArguments,
    CallBegin,
    CallEnd,
    CollectedEvents,
    Content,
    Event,
    find_tool_format,
    tool_format,
    tool_formats,
)

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
    },
    "now": {"type": "object", "properties": {}},
    "files.write": {"type": "object", "properties": {"text": {"type": "string"}}},
}
FORMATS = sorted(tool_formats())
PARIS = {"city": "Paris"}


def parse(name: str, pieces: Iterable[str]) -> list[Event]:
    numbers = count()
    parser = AnswerParser(tool_format(name), TOOLS, new_id=lambda: f"id{next(numbers)}")
    events = [event for piece in pieces for event in parser.feed(piece)]
    return events + parser.finish()


def collect(events: Iterable[Event]) -> CollectedEvents:
    answer = CollectedEvents()
    answer.collect(events)
    return answer


def whole(name: str, text: str) -> CollectedEvents:
    return collect(parse(name, [text]))


def merged(events: Iterable[Event]) -> list[Event]:
    """Join neighbouring content events: their split depends on how the text was cut."""
    found: list[Event] = []
    for event in events:
        if isinstance(event, Content) and found and isinstance(found[-1], Content):
            found[-1] = Content(found[-1].text + event.text)
        else:
            found.append(event)
    return found


def calls_of(answer: CollectedEvents) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


# ── calls as each format's models write them ────────────────────────────────────────────────────────

Calls = list[tuple[str, dict[str, Any]]]
JSON_CALL = '{{"name": "{}", "{}": {}}}'


def _hermes(calls: Calls) -> str:
    bodies = [JSON_CALL.format(name, "arguments", json.dumps(value)) for name, value in calls]
    return "\n".join(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)


def _llama(calls: Calls) -> str:
    return "; ".join(JSON_CALL.format(name, "parameters", json.dumps(v, ensure_ascii=False)) for name, v in calls)


def _mistral(calls: Calls) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(value, ensure_ascii=False)}" for name, value in calls)


def _plain(calls: Calls) -> str:
    return "[" + ", ".join(JSON_CALL.format(name, "arguments", json.dumps(value)) for name, value in calls) + "]"


def _deepseek(calls: Calls) -> str:
    bodies = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(value)}\n```<｜tool▁call▁end｜>"
        for name, value in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(bodies) + "<｜tool▁calls▁end｜>"


def _pythonic(calls: Calls) -> str:
    bodies = [f"{name}({', '.join(f'{key}={value!r}' for key, value in values.items())})" for name, values in calls]
    return f"[{', '.join(bodies)}]"


def _coder(calls: Calls) -> str:
    bodies = []
    for name, values in calls:
        texts = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]
        parameters = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in texts)
        bodies.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
    return "\n".join(bodies)


WRITERS: dict[str, Callable[[Calls], str]] = {
    "deepseek_v3": _deepseek,
    "hermes": _hermes,
    "llama3_json": _llama,
    "mistral": _mistral,
    "plain_json": _plain,
    "pythonic": _pythonic,
    "qwen3_coder": _coder,
}
MARKED = ["deepseek_v3", "hermes", "mistral", "qwen3_coder"]  # may have content before a call


def test_every_format_is_written_here() -> None:
    assert sorted(WRITERS) == FORMATS


# ── random texts, cut anywhere ──────────────────────────────────────────────────────────────────────

FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=get_weather>", "</function>", "<parameter=city>", "</parameter>"),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<|python_start|>", "<|python_end|>", "[", "]", "```"),
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *(
        '{"name": "now", "arguments": {}}',
        '{"name": "now", "parameters": {"a": [1, "}"]}}',
        "now(a='x', b={'c': (1,)})",
    ),
    *('{"name": "', '"', "\\", '\\"', "{", "}", "{}", ",", ";", ":", "(", ")", "=", "'", '"""', "now", "function"),
    *(" ", "\n", "\n\n", "é", "🙂", "Hello", "1.5e3", "-", "true", "\\ud83d", "\\u00e9", "\x00"),
]


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[str]:
    """A text in pieces, some of them empty."""
    text = draw(texts)
    at = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in pairwise([0, *at, len(text)])]


def soup(name: str) -> st.SearchStrategy[str]:
    good = WRITERS[name]([("get_weather", PARIS), ("now", {})])
    pieces = st.one_of(st.sampled_from([*FRAGMENTS, good]), st.sampled_from(FRAGMENTS), st.text(max_size=3))
    return st.builds(
        lambda parts, drop: "".join(parts)[: len("".join(parts)) - drop],
        st.lists(pieces, max_size=14),
        st.integers(0, 3),
    )


def check_events(events: list[Event]) -> None:
    """Check that calls are complete and in order, and that their arguments are JSON objects."""
    index = 0
    for at, event in enumerate(events):
        if isinstance(event, CallBegin):
            middle, end = events[at + 1 : at + 3]
            assert isinstance(middle, CallArguments) and end == CallEnd(index)
            assert event.index == middle.index == index and event.name and event.id
            assert isinstance(json.loads(middle.text), dict)
            middle.text.encode()
            index += 1
        assert not isinstance(event, Content) or event.text
    assert sum(not isinstance(event, Content) for event in events) == 3 * index


@pytest.mark.parametrize("name", FORMATS)
def test_any_text_gives_the_same_in_any_pieces(name: str) -> None:
    @settings(max_examples=250, deadline=None, derandomize=True)
    @given(cut(soup(name)))
    def check(pieces: list[str]) -> None:
        text = "".join(pieces)
        once = parse(name, [text])
        check_events(once)
        assert merged(parse(name, pieces)) == merged(once)
        assert merged(parse(name, text)) == merged(once)  # one character at a time
        answer = collect(once)
        if not answer.calls:
            assert answer.content == text
        rest = iter(text)
        assert all(character in rest for character in answer.content)  # no text is invented or reordered

    check()


# ── random arguments ────────────────────────────────────────────────────────────────────────────────

MARKS_INSIDE = st.sampled_from(FRAGMENTS)
STRINGS = st.one_of(st.text(max_size=8), MARKS_INSIDE, st.lists(MARKS_INSIDE, max_size=3).map("".join))
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.floats(allow_nan=False, allow_infinity=False), STRINGS
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3), max_leaves=6
)
OBJECTS = st.dictionaries(STRINGS, VALUES, max_size=3)
ARGUMENTS = {
    name: st.dictionaries(st.sampled_from(["city", "a", "b_1"]), VALUES, max_size=3) if name == "pythonic" else OBJECTS
    for name in FORMATS
}
# The schema gives bare values their types. A text that contains the end mark of a call cannot be told from that end.
ARGUMENTS["qwen3_coder"] = st.fixed_dictionaries(
    {},
    optional={
        "city": STRINGS.filter(lambda text: "</parameter>" not in text),
        "days": st.integers(),
        "where": st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
    },
)


@pytest.mark.parametrize("name", FORMATS)
def test_what_was_called_comes_out(name: str) -> None:
    before = st.sampled_from(["", "Let me see.", "1 < 2 [x] {y}"]) if name in MARKED else st.just("")

    @settings(max_examples=150, deadline=None, derandomize=True)
    @given(before, st.lists(st.tuples(st.just("get_weather"), ARGUMENTS[name]), min_size=1, max_size=3), st.data())
    def check(said: str, calls: Calls, data: st.DataObject) -> None:
        text = said + ("\n" if said else "") + WRITERS[name](calls)
        answer = collect(parse(name, data.draw(cut(st.just(text)))))
        assert calls_of(answer) == calls
        assert answer.content == said

    check()


@pytest.mark.parametrize("name", FORMATS)
def test_cut_off_anywhere_gives_whole_calls_only(name: str) -> None:
    said = "I'll look.\n\n" if name in MARKED else ""
    calls: Calls = [
        ("get_weather", {"city": 'a "quoted" }]{ <tool_call> \\ é🙂', "where": {"x": {"y": []}}}),
        ("now", {}),
    ]
    text = said + WRITERS[name](calls) + "\n"
    full = whole(name, text)
    assert calls_of(full) == calls and full.content == said.strip()
    seen = set()
    for end in range(len(text)):
        answer = whole(name, text[:end])
        check_events(parse(name, [text[:end]]))
        seen.add(len(answer.calls))
        assert answer.calls == full.calls[: len(answer.calls)]
        if not answer.calls:
            assert answer.content == text[:end]
    assert seen == {0, 1, 2}


# ── how long text is held back ──────────────────────────────────────────────────────────────────────


def said_after_each(name: str, pieces: list[str]) -> list[str]:
    parser = AnswerParser(tool_format(name), TOOLS)
    said = [collect(parser.feed(piece)).content for piece in pieces]
    return [*said, collect(parser.finish()).content]


def test_only_what_may_be_a_mark_is_held_back_and_no_longer_than_that() -> None:
    assert said_after_each("hermes", ["a <", "tool", "_", "box> b", " "]) == ["a", "", "", " <tool_box> b", "", " "]
    assert said_after_each("hermes", ['{"', "ci", 'ty": 1', "}"]) == ["", '{"ci', 'ty": 1', "}", ""]  # other JSON
    assert said_after_each("hermes", ["``", "`py", "thon\n", "x"]) == ["", "```py", "thon", "\nx", ""]  # other code
    assert said_after_each("hermes", ["<tool_call><", "x"]) == ["<tool_call>", "<x", ""]
    assert said_after_each("hermes", ['<tool_call>{"a" 1', "x"]) == ['<tool_call>{"a" 1', "x", ""]  # never JSON
    assert said_after_each("llama3_json", ["{", '"na', 'me"', "x"]) == ["", "", "", '{"name"x', ""]
    assert said_after_each("llama3_json", ["Set {", "1}"]) == [
        "Set {",
        "1}",
        "",
    ]  # a call may only begin at the start of an answer
    assert said_after_each("pythonic", ["[link", "]", "(url)"]) == ["", "[link]", "(url)", ""]
    assert said_after_each("mistral", ["see [", "1", "]"]) == ["see", " [1", "]", ""]


# ── real-world cases ────────────────────────────────────────────────────────────────────────────────

HERMES_NOW = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("name", "text", "content", "calls"),
    [
        ("hermes", f"A.\n{HERMES_NOW}\nThen\n{HERMES_NOW}\n", "A.\nThen", [("now", {}), ("now", {})]),
        ("hermes", '<tool_call>{"name": "now"}</tool_call>', "", [("now", {})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("now", {"a": 1})]),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "1\n2"}}</tool_call>', "", [("f", {"a": "1\n2"})]),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}', "", [("now", {})]),  # ended by eos, not by the mark
        ("hermes", '<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": NaN}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {"a": 1e999}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "now", "arguments": {}}}</tool_call>', None, []),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>', None, []),
        ("hermes", "<tool_call>" + '{"a":' * 5000, None, []),
        # Without marks: the whole output, and the name of a tool.
        ("hermes", ' {"name": "now", "arguments": {"a": 1}}\n', "", [("now", {"a": 1})]),
        ("hermes", '{"arguments": {}, "name": "now"}\n{"name": "files.write", "arguments": {}}', "", [("now", {}), ("files.write", {})]),
        ("hermes", '{"name": "now", "arguments": {}}\n</tool_call>', "", [("now", {})]),
        ("hermes", '{"name": "now", "arguments": {}}' + HERMES_NOW, "", [("now", {}), ("now", {})]),
        ("hermes", '{"name": "now", "arguments": {}} is a call', None, []),
        ("hermes", '{"name": "elsewhere", "arguments": {}}', None, []),
        ("hermes", '{"name": "now"}', None, []),
        ("hermes", '{"name": "now", "arguments": {}', None, []),
        ("hermes", 'So: {"name": "now", "arguments": {}}', None, []),
        ("hermes", '{"city": "Rome", "name": "now", "arguments": {}}', None, []),
        ("hermes", '```json\n{\n  "name": "now",\n  "arguments": {"a": 1}\n}\n```', "", [("now", {"a": 1})]),
        ("hermes", '\n```\n{"name": "now", "arguments": {}}\n```\n', "", [("now", {})]),
        ("hermes", '```json\n{"name": "now", "arguments": {}}\n{"name": "files.write", "arguments": {}}\n```', "", [("now", {}), ("files.write", {})]),
        ("hermes", '```json\n{"name": "now", "arguments": {}}\n```\n```json\n{"name": "now", "arguments": {}}\n```', "", [("now", {}), ("now", {})]),
        ("hermes", '```json\n{"name": "now", "arguments": {}}', "", [("now", {})]),  # ended by eos
        ("hermes", '```json\n{"name": "now", "arguments": {}}\n``` calls it.', None, []),
        ("hermes", '```json\n{"name": "now", "arguments": {}}\n```\n`now` is called', None, []),
        ("hermes", '```json\n{"name": "elsewhere", "arguments": {}}\n```', None, []),
        ("hermes", '```json\n{"city": "Rome"}\n```', None, []),
        ("hermes", '```python\n{"name": "now", "arguments": {}}\n```', None, []),
        ("hermes", 'Call:\n```json\n{"name": "now", "arguments": {}}\n```', None, []),
        ("hermes", "`now`", None, []),
        ("hermes", '{"name": "now", "arguments": {}}```', None, []),
        ("hermes", f"<tool_call>oops {HERMES_NOW}", "<tool_call>oops", [("now", {})]),
        ("llama3_json", '{"name": "now", "parameters": {}}', "", [("now", {})]),
        ("llama3_json", '<|python_tag|>{"name": "now", "parameters": {}}', "", [("now", {})]),
        ("llama3_json", '{"name": "Alice", "parameters": {}}', None, []),  # an answer in JSON, not a tool
        ("llama3_json", '{"name": "now"}', None, []),
        ("llama3_json", '{"name": "now", "parameters": {}}; sorry', "; sorry", [("now", {})]),
        ("mistral", '[TOOL_CALLS] [{"name": "now", "arguments": {}}, {"name": "x", "arguments": {"a": "]"}}]', "",
         [("now", {}), ("x", {"a": "]"})]),
        ("mistral", '[TOOL_CALLS]now{"a": 1}[TOOL_CALLS]now[ARGS]{}', "", [("now", {"a": 1}), ("now", {})]),
        ("mistral", "[TOOL_CALLS] [1]", None, []),
        ("pythonic", "[get_weather(city='Pa\\'ris', days=-3,), now()]", "",
         [("get_weather", {"city": "Pa'ris", "days": -3}), ("now", {})]),
        ("pythonic", "<|python_start|>[now(a=True, b=None, c=[1., .5], d=1e2)]<|python_end|>", "",
         [("now", {"a": True, "b": None, "c": [1.0, 0.5], "d": 100.0})]),
        ("pythonic", '[now(a="""x "y" z""", b="\\u00e9\\d")]', "", [("now", {"a": 'x "y" z', "b": "é\\d"})]),
        ("pythonic", "[now(__import__('os'))]", None, []),
        ("pythonic", "[now(a=b)]", None, []),
        ("pythonic", "[now(a={1: 2})]", None, []),
        ("pythonic", "[elsewhere(a=1)]", None, []),
        ("pythonic", "[now(a=" + "[" * 5000, None, []),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>", "",
         [("now", {})]),
        ("deepseek_v3", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n{}", None, []),
        ("qwen3_coder", "<function=now>\n</function>", "", [("now", {})]),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=city>\n 12\n\n</parameter><parameter=days>3</parameter>"
         "</function></tool_call>", "", [("get_weather", {"city": " 12\n", "days": 3})]),
        ("qwen3_coder", "<tool_call><function=get_weather><parameter=days>soon</parameter></function></tool_call>", "",
         [("get_weather", {"days": "soon"})]),
        ("qwen3_coder", "<function=files.write><parameter=text>a</parameter> b</parameter>\n</function>", "",
         [("files.write", {"text": "a</parameter> b"})]),
        ("qwen3_coder", "<tool_call><function=now><parameter=a>1</tool_call>", None, []),
        ("plain_json", '[{"name": "now", "arguments": {}}', "", [("now", {})]),
        ("plain_json", "[1, 2]", None, []),
    ],
)  # fmt: skip
def test_cases(name: str, text: str, content: str | None, calls: Calls) -> None:
    """`content` None: all of the text, unchanged."""
    answer = whole(name, text)
    assert calls_of(answer) == calls
    assert answer.content == (text if content is None else content)


def test_half_a_surrogate_pair_can_still_be_sent() -> None:
    answer = whole("hermes", '<tool_call>{"name": "now", "arguments": {"a": "\\ud800é"}}</tool_call>')
    assert answer.calls[0].arguments.encode() == b'{"a": "\\ud800\\u00e9"}'


def test_ids_are_new_unless_the_model_gave_one_that_its_template_takes_back() -> None:
    def ids(name: str, text: str) -> list[str]:
        parser = AnswerParser(tool_format(name), TOOLS)
        return [call.id for call in collect(parser.feed(text) + parser.finish()).calls]

    first, second = ids("hermes", HERMES_NOW * 2)
    assert first != second and first.startswith("call_")
    assert ids("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "abcDEF123"}]') == ["abcDEF123"]
    assert ids("mistral", "[TOOL_CALLS]now[CALL_ID]abcDEF123[ARGS]{}") == ["abcDEF123"]
    (own,) = ids("mistral", '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "no such id"}]')
    assert len(own) == 9 and own.isalnum()


@example("<tool_call>" * 2000)
@example('<tool_call>{"a": "' * 2000)
@example("<function=a><parameter=b></parameter>" * 1000)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(st.sampled_from(FRAGMENTS).map(lambda text: text * 500))
def test_repetition_is_only_content(text: str) -> None:
    for name in ("hermes", "qwen3_coder"):
        answer = whole(name, text)
        assert answer.calls or answer.content == text


# ── the choice of a format ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>\\n{\"name\": \"' + tool_call.name }}", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=one>", "qwen3_coder"),
        ("<tool_call>{{ name }}\n<arg_key>{{ k }}</arg_key>", None),  # the same mark around another format
        ("<tool_call>{{ '<invoke name=' + tool_call.name }}", None),  # and around a third
        ("{{ '[TOOL_CALLS]' + message.tool_calls | tojson }}", "mistral"),
        ("<|start_header_id|> {\"name\": function name, \"parameters\": dictionary}", "llama3_json"),
        ("<|start_header_id|> [func_name1(params_name1=params_value1)] \"parameters\"", "pythonic"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>'", "deepseek_v3"),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
    ],
)  # fmt: skip
def test_a_template_shows_its_format(template: str, name: str | None) -> None:
    assert find_tool_format(template) == name


def test_names_and_aliases_are_known_and_others_are_refused_with_those_that_are() -> None:
    assert tool_format("deepseek") is tool_format("deepseek_v3")
    with pytest.raises(
        ConfigError, match=r"^--tool-call-parser 'hermess' is not known; .*hermes, llama3_json, mistral"
    ):
        tool_format("hermess")
    names = [name for own, format in tool_formats().items() for name in (own, *format.aliases)]
    assert len(names) == len(set(names))
