"""Follows an answer's bytes through its schema, and knows the items so far of each open array whose items must differ.

Values are compared as JSON: 1 is 1.0, "a" is "\\u0061", and the order of properties does not matter. For that, an item is kept without
white space, its numbers without trailing zeros, its strings with as few escapes as possible. The state follows from the bytes alone, and
is never changed: a copy is a reference."""

import bisect
import json
import re
from collections.abc import Hashable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple

from octavo.sampling.grammar.schema_places import Place

_STRING_STOP = re.compile(rb'["\\]')
_SPACES = frozenset(b" \t\r\n")
_IN_NUMBER = frozenset(b"0123456789.-+eE")
_LITERALS = {ord("t"): 3, ord("f"): 4, ord("n"): 3}  # bytes after the first
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_OPEN_ARRAY, _CLOSE_ARRAY, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"


class Mode(IntEnum):
    """What the next byte belongs to."""

    FRAME = 0  # text before or after the schema's value
    VALUE = 1  # the beginning of a value, or the end of an empty array
    STRING = 2
    ESCAPE = 3
    NUMBER = 4
    LITERAL = 5
    AFTER = 6  # what follows a value in an array or object
    BEFORE_KEY = 7
    KEY = 8
    KEY_ESCAPE = 9
    COLON = 10


class Items(NamedTuple):
    """Complete items of one array."""

    values: frozenset[Hashable] = frozenset()
    spelled: tuple[bytes, ...] = ()  # sorted; empty where beginnings of items need not be looked at

    def with_item(self, item: bytes, is_free: bool) -> "Items | None":
        """None: an equal one is among them."""
        value = _value_of(item)
        if value in self.values:
            return None
        spelled = self.spelled
        if not is_free:
            at = bisect.bisect(spelled, item)
            spelled = (*spelled[:at], item, *spelled[at:])
        return Items(self.values | {value}, spelled)

    def beginning_with(self, start: bytes) -> Iterator[bytes]:
        for at in range(bisect.bisect_left(self.spelled, start), len(self.spelled)):
            if not self.spelled[at].startswith(start):
                return
            yield self.spelled[at]

    def can_become_other(self, start: bytes, values: tuple[bytes, ...]) -> bool:
        """Whether one of `values`, which are sorted, begins with `start` and is none of these items."""
        for at in range(bisect.bisect_left(values, start), len(values)):
            if not values[at].startswith(start):
                return False
            if values[at] not in self.values:
                return True
        return False


class TagState(NamedTuple):
    """Where in a text with tags an answer is: outside of them, in the beginning of some, in the value or the end of one."""

    numbers: tuple[int, ...] = ()  # of the tags that it may be in; empty: none
    num_read: int = 0  # bytes behind the trigger, or behind the value
    is_value: bool = False  # the beginning is complete
    tail: bytes = b""  # outside of tags: the last bytes of the text


class Level(NamedTuple):
    """An open array or object."""

    around: "Level | None"
    is_array: bool
    place: Place | None
    depth: int
    num_unique: int  # arrays whose items must differ: this one and those around it
    child: Place | None = None  # place of the value that is next or being written
    number: int = 0  # of an array's item, from 0 on
    items: Items | None = None  # of an array whose items must differ
    start: int = -1  # where in `State.written` the item begins that is next or being written; −1: none is


class State(NamedTuple):
    mode: Mode
    level: Level | None = None
    # Of the item of the outermost array whose items must differ: what is written of it.
    written: bytes = b""
    scalar_at: int = 0  # in `written`: the beginning of the string or number
    key: bytes = b""  # of a property, as far as it is written
    num_left: int = 0  # bytes of the frame or of a literal
    is_after: bool = False  # of the frame: the part after the value
    tag: TagState = TagState()  # in a text with tags

    @property
    def open_items(self) -> Iterator[Level]:
        """Arrays whose items must differ and of which one is next or being written, innermost first."""
        level = self.level
        while level is not None and level.num_unique:
            if level.items is not None and level.start >= 0:
                yield level
            level = level.around

    @property
    def is_in_unique(self) -> bool:
        return self.level is not None and self.level.num_unique > 0


class UniqueItems:
    """The schema of an answer, and the number of bytes before and after it. A frame may be followed by another."""

    def __init__(self, root: Place | None, num_before: int = 0, num_after: int = 0) -> None:
        self._root = root
        self._num_before, self._num_after = num_before, num_after

    def start(self) -> State:
        return State(Mode.FRAME, num_left=self._num_before) if self._num_before else State(Mode.VALUE)

    def after(self, state: State, data: bytes) -> State | None:
        """The state after more bytes, which the grammar allows. None: they complete an item that equals an earlier one of its array,
        or write a number with an exponent, of which equal ones are not recognised."""
        mode, level, written, scalar_at, key, num_left, is_after, tag = state
        at, end = 0, len(data)
        while at < end:
            if mode in (Mode.STRING, Mode.KEY):
                stop = _STRING_STOP.search(data, at)
                part = data[at:] if stop is None else data[at : stop.end()]
                at += len(part)
                if level is not None:
                    if level.num_unique:
                        written += part
                    if mode == Mode.KEY and level.place is not None:
                        key += part
                if stop is None:
                    break
                if data[at - 1] == _BACKSLASH:
                    mode = Mode.ESCAPE if mode == Mode.STRING else Mode.KEY_ESCAPE
                elif mode == Mode.KEY:
                    mode = Mode.COLON
                    if level is not None and level.num_unique:
                        written = written[:scalar_at] + _plain_string(written[scalar_at:])
                else:
                    if level is not None and level.num_unique:
                        written = written[:scalar_at] + _plain_string(written[scalar_at:])
                    ended = self._end_value(level, written)
                    if ended is None:
                        return None
                    mode, level, written, num_left, is_after = ended
                continue
            byte = data[at]
            at += 1
            if mode in (Mode.ESCAPE, Mode.KEY_ESCAPE):
                if level is not None:
                    if level.num_unique:
                        written += data[at - 1 : at]
                    if mode == Mode.KEY_ESCAPE and level.place is not None:
                        key += data[at - 1 : at]
                mode = Mode.STRING if mode == Mode.ESCAPE else Mode.KEY
                continue
            if mode == Mode.FRAME:
                mode, num_left, is_after, tag = self._in_frame(byte, num_left, is_after, tag)
                continue
            if mode == Mode.NUMBER:
                if byte in _IN_NUMBER:
                    if level is not None and level.num_unique:
                        if byte in b"eE":
                            return None
                        written += data[at - 1 : at]
                    continue
                if level is not None and level.num_unique:
                    written = written[:scalar_at] + plain_number(written[scalar_at:])
                ended = self._end_value(level, written)
                if ended is None:
                    return None
                mode, level, written, num_left, is_after = ended
                if mode == Mode.FRAME:  # the byte after a number that is all of the value
                    at -= 1
                    continue
            if byte in _SPACES:
                continue
            is_kept = level is not None and level.num_unique > 0
            match mode:
                case Mode.VALUE:
                    if byte == _QUOTE:
                        mode, scalar_at = Mode.STRING, len(written)
                    elif byte in (_OPEN_ARRAY, _OPEN_OBJECT):
                        written += data[at - 1 : at] if is_kept else b""
                        mode, level = self._open(level, byte == _OPEN_ARRAY, len(written), tag)
                        continue
                    elif byte == _CLOSE_ARRAY:
                        ended = self._close(level, written, b"]")
                        if ended is None:
                            return None
                        mode, level, written, num_left, is_after = ended
                        continue
                    elif byte in _LITERALS:
                        mode, num_left = Mode.LITERAL, _LITERALS[byte]
                    else:
                        mode, scalar_at = Mode.NUMBER, len(written)
                    if is_kept:
                        written += data[at - 1 : at]
                case Mode.LITERAL:
                    num_left -= 1
                    if is_kept:
                        written += data[at - 1 : at]
                    if not num_left:
                        ended = self._end_value(level, written)
                        if ended is None:
                            return None
                        mode, level, written, num_left, is_after = ended
                case Mode.AFTER if byte == _COMMA:
                    assert level is not None
                    if not level.is_array:
                        mode = Mode.BEFORE_KEY
                        written += b"," if is_kept else b""
                    else:
                        mode = Mode.VALUE
                        if level.num_unique > (level.items is not None):
                            written += b","
                        number = level.number + 1
                        child = None if level.place is None else level.place.item(number)
                        start = len(written) if level.items is not None else -1
                        level = level._replace(number=number, child=child, start=start)
                case Mode.AFTER | Mode.BEFORE_KEY if byte in (_CLOSE_ARRAY, _CLOSE_OBJECT):
                    ended = self._close(level, written, data[at - 1 : at])
                    if ended is None:
                        return None
                    mode, level, written, num_left, is_after = ended
                case Mode.BEFORE_KEY:
                    mode, key, scalar_at = Mode.KEY, b'"', len(written)
                    written += b'"' if is_kept else b""
                case Mode.COLON:
                    assert level is not None
                    mode = Mode.VALUE
                    written += b":" if is_kept else b""
                    child = None if level.place is None else level.place.property(_text_of(key))
                    level = level._replace(child=child)
                case _:
                    pass  # the grammar would not allow it
        return State(mode, level, written, scalar_at, key, num_left, is_after, tag)

    def _in_frame(self, byte: int, num_left: int, is_after: bool, tag: TagState) -> tuple[Mode, int, bool, TagState]:
        """The mode after a byte of the frame, and what else is known of the frame."""
        num_left -= 1
        if num_left == 0 and is_after:
            num_left, is_after = self._num_before, False
        return Mode.FRAME if num_left else Mode.VALUE, num_left, is_after, tag

    def _root_of(self, tag: TagState) -> Place | None:
        return self._root

    def _open(self, around: Level | None, is_array: bool, start: int, tag: TagState) -> tuple[Mode, Level]:
        place = self._root_of(tag) if around is None else around.child
        depth, num_unique = (0, 0) if around is None else (around.depth + 1, around.num_unique)
        if not is_array:
            return Mode.BEFORE_KEY, Level(around, False, place, depth, num_unique)
        child = None if place is None else place.item(0)
        if place is None or not place.is_unique:
            return Mode.VALUE, Level(around, True, place, depth, num_unique, child)
        return Mode.VALUE, Level(around, True, place, depth, num_unique + 1, child, 0, Items(), start)

    def _close(
        self, level: Level | None, written: bytes, bracket: bytes
    ) -> tuple[Mode, Level | None, bytes, int, bool] | None:
        assert level is not None
        around = level.around
        return self._end_value(around, written + bracket if around is not None and around.num_unique else b"")

    def _end_value(self, level: Level | None, written: bytes) -> tuple[Mode, Level | None, bytes, int, bool] | None:
        """Note that a value in `level` is complete: the mode, level, `written`, `num_left` and `is_after` that follow. None: it is an
        item that equals another."""
        if level is None:
            if self._num_after:
                return Mode.FRAME, None, b"", self._num_after, True
            is_framed = self._num_before > 0
            return Mode.FRAME if is_framed else Mode.AFTER, None, b"", self._num_before, False
        if level.items is not None:
            assert level.place is not None
            items = level.items.with_item(written[level.start :], level.place.is_free)
            if items is None:
                return None
            level = level._replace(items=items, start=-1)
            if level.num_unique == 1:
                written = b""
        return Mode.AFTER, level, written, 0, False


class Tag(NamedTuple):
    trigger: bytes
    rest: bytes  # of its beginning, behind the trigger
    root: Place | None  # of its value; None: no array's items in it must differ
    num_after: int  # bytes of its end


class UniqueItemsInTags(UniqueItems):
    """Values between tags in a text. A tag begins where its trigger is complete for the first time; no beginning is the start of another."""

    def __init__(self, tags: Sequence[Tag]) -> None:
        super().__init__(tags[0].root)
        self._tags = tags
        self._by_trigger: dict[bytes, tuple[int, ...]] = {}
        for number, tag in enumerate(tags):
            self._by_trigger[tag.trigger] = (*self._by_trigger.get(tag.trigger, ()), number)
        self._longest = max(map(len, self._by_trigger))

    def start(self) -> State:
        return State(Mode.FRAME)

    def _root_of(self, tag: TagState) -> Place | None:
        return self._tags[tag.numbers[0]].root

    def _in_frame(self, byte: int, num_left: int, is_after: bool, tag: TagState) -> tuple[Mode, int, bool, TagState]:
        if tag.is_value:  # it is complete
            tag = tag._replace(num_read=tag.num_read + 1)
            num_after = self._tags[tag.numbers[0]].num_after
            if tag.num_read < num_after:
                return Mode.FRAME, 0, False, tag
            tag = TagState()
            if num_after:
                return Mode.FRAME, 0, False, tag
        if tag.numbers:
            at = tag.num_read
            numbers = tuple(number for number in tag.numbers if self._tags[number].rest[at : at + 1] == bytes((byte,)))
            return self._begin(numbers, at + 1)
        tail = (tag.tail + bytes((byte,)))[-self._longest :]
        for trigger, numbers in self._by_trigger.items():
            if tail.endswith(trigger):
                return self._begin(numbers, 0)
        return Mode.FRAME, 0, False, TagState(tail=tail)

    def _begin(self, numbers: tuple[int, ...], num_read: int) -> tuple[Mode, int, bool, TagState]:
        for number in numbers:
            if len(self._tags[number].rest) == num_read:
                return Mode.VALUE, 0, False, TagState((number,), is_value=True)
        return Mode.FRAME, 0, False, TagState(numbers, num_read)

    def _end_value(self, level: Level | None, written: bytes) -> tuple[Mode, Level | None, bytes, int, bool] | None:
        return (Mode.FRAME, None, b"", 0, False) if level is None else super()._end_value(level, written)


def begun(state: State, level: Level) -> bytes:
    """What is written of an item of `level`, with a number as it would be compared."""
    if state.mode != Mode.NUMBER:
        return state.written[level.start :]
    number = state.written[state.scalar_at :]
    if b"." in number:
        number = number.rstrip(b"0").removesuffix(b".")
    return state.written[level.start : state.scalar_at] + (b"0" if number == b"-0" else number)


def plain_number(text: bytes) -> bytes:
    """A number without trailing zeros of its fraction."""
    if b"." in text:
        text = text.rstrip(b"0").removesuffix(b".")
    return b"0" if text == b"-0" else text


def _plain_string(text: bytes) -> bytes:
    """A string with as few escapes as possible."""
    if b"\\" not in text:
        return text
    return json.dumps(json.loads(text), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _text_of(key: bytes) -> str:
    text: str = json.loads(key)
    return text


def _value_of(item: bytes) -> Hashable:
    """Equal for equal items."""
    if item[:1] not in (b"{", b"["):
        return item
    try:
        return _frozen(json.loads(item, parse_int=_number, parse_float=_number))
    except RecursionError:
        return item


def _number(text: str) -> Hashable:
    return "number", text  # as a tuple, of which JSON has none


def _frozen(value: object) -> Hashable:
    match value:
        case list():
            return "list", *map(_frozen, value)
        case dict():
            return "dict", frozenset((key, _frozen(part)) for key, part in value.items())
        case tuple():
            return value
        case _:
            return type(value).__name__, value  # true is not 1
