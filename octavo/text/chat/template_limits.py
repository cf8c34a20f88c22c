"""Limits on the time and the output size of untrusted Jinja templates. Jinja's own sandbox isolates a template; this makes sure
that it ends.

Every loop iteration and every macro call checks the clock. Everything that creates text or lists (operators, filters, methods,
slices, output) adds its size to one sum; where the result could be far larger than its inputs, before it is created. So neither
a single operation nor all of them together take long.
"""

import contextlib
import itertools
import re
import string
import threading
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEnvironment
from jinja2.utils import Namespace

MAX_SECONDS = 2.0  # CPU time of one thread; a long chat takes some hundredths
MAX_MADE = 128 * 1024 * 1024  # characters and list entries that one rendering may create in total
MAX_NUMBER = 100_000  # widths, indentations and repetitions in filters and methods
MAX_BITS = 4096  # size of integers
MAX_WRAPPED = 20_000  # characters of a text to wrap, which takes time by the square of them


_WIDE = re.compile(r"\d{5}")
_FORMATTER = string.Formatter()


class TemplateLimit(SecurityError):
    pass


class _Spent:
    __slots__ = ("deadline", "made")

    def __init__(self, seconds: float) -> None:
        self.made = 0
        self.deadline = time.thread_time() + seconds


class _Running(threading.local):
    spent: _Spent | None = None


_running = _Running()


class limited:
    """Context manager: what Jinja does inside counts against the limits. `seconds`: None for MAX_SECONDS."""

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds

    def __enter__(self) -> None:
        _running.spent = _Spent(MAX_SECONDS if self._seconds is None else self._seconds)

    def __exit__(self, *exc_info: object) -> None:
        _running.spent = None


def makes(size: int) -> None:
    """Count text that is being created, and check the clock."""
    spent = _running.spent
    assert spent is not None, "templates are compiled and rendered inside limited()"
    spent.made += size
    if spent.made > MAX_MADE:
        raise TemplateLimit(
            f"the chat template produces more than {MAX_MADE:,} characters of text, which is not allowed"
        )
    if time.thread_time() > spent.deadline:
        raise TemplateLimit(f"the chat template runs for more than {MAX_SECONDS:g} seconds, which is not allowed")


def counted(value: Any) -> Any:
    """Count the result of an operation: the length of a text, the entries of a list."""
    makes(len(value) if isinstance(value, str | list | tuple | dict) else 0)
    return value


def shown(value: Any) -> Any:
    """Jinja's `finalize`, which is called with every value that is about to be printed."""
    makes(_text_size(value))
    return value


def joined(parts: list[Any]) -> str:
    """Implement the operator ~."""
    makes(sum(map(_text_size, parts)))
    return "".join(map(str, parts))


def sliced(value: Any, start: Any, stop: Any, step: Any) -> Any:
    """Implement value[start:stop:step]."""
    return counted(value[start:stop:step])


_OWN = (makes, joined, sliced)


def _text_size(value: Any) -> int:
    """Approximate number of characters of a value when it is printed. Shared parts count each time they are reached."""
    if isinstance(value, str):
        return len(value)
    size, met, open_values = 0, 0, [value]
    while open_values:
        match open_values.pop():
            case str(text):
                size += len(text)
            case list() | tuple() | KeysView() | ValuesView() | ItemsView() as many:
                open_values.extend(many)
            case Mapping() as mapping:
                open_values.extend(mapping)
                open_values.extend(mapping.values())
            case Namespace() as namespace:
                open_values.append(object.__getattribute__(namespace, "_Namespace__attrs"))
            case _:
                size += 4
        met += 1
        if met % 1000 == 0:
            makes(1000)
        if size > MAX_MADE:
            break
    return size


# Filters that read a list without printing it.
_LOOK_INTO = frozenset(
    [
        "attr",
        "batch",
        "count",
        "d",
        "default",
        "dictsort",
        "first",
        "groupby",
        "items",
        "last",
        "length",
        "list",
        "map",
        "max",
        "min",
        "random",
        "reject",
        "rejectattr",
        "reverse",
        "select",
        "selectattr",
        "slice",
        "sort",
        "sum",
        "unique",
    ]
)


# Filters and methods whose output size is set by a number.
_AS_MANY = frozenset(["batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "zfill"])


def _before(name: str, value: Any, given: list[Any]) -> None:
    """Check a filter or method `name` of `value` before it runs, and count what it would multiply."""
    if name in _AS_MANY:
        for each in given:
            if isinstance(each, int) and abs(each) > MAX_NUMBER:
                raise TemplateLimit(
                    f"the chat template calls {name!r} with {each:,}, over {MAX_NUMBER:,}, which is not allowed"
                )
    match name:
        case "replace" if len(given) > 1:
            text = _written(value)
            for old, new in (given[:2], given[1::-1]):
                makes(text.count(_written(old)) * _text_size(new))
        case "join" if isinstance(value, str) and given:
            makes(_text_size(given[0]) + _text_size(value) * len(given[0]))
        case "join":
            makes(_text_size(value) + _widest(given) * len(value))
        case "indent":
            makes(_written(value).count("\n") * _widest(given))
        case "wordwrap" if len(_written(value)) > MAX_WRAPPED:
            raise TemplateLimit(
                f"the chat template wraps a text of more than {MAX_WRAPPED:,} characters, which is not allowed"
            )
        case "wordwrap":
            makes(_text_size(value) * (1 + _widest([each for each in given if isinstance(each, str)])))
        case "expandtabs":
            makes(_written(value).count("\t") * _widest(given))
        case "format":
            _before_format(_written(value), given)
        case "sum" if any(not isinstance(each, str | int | float) for each in given):
            raise TemplateLimit("the chat template sums values that are not numbers, which is not allowed")
        case "tojson" if any(isinstance(each, int) and each > 32 for each in given):
            raise TemplateLimit("the chat template indents JSON by more than 32 characters, which is not allowed")
        case "encode" | "translate" | "maketrans" | "format_map":
            raise TemplateLimit(f"the chat template calls {name!r} on a text, which is not allowed")
        case _ if name not in _LOOK_INTO:
            makes(_text_size(value))


def _written(value: Any) -> str:
    makes(0 if isinstance(value, str) else _text_size(value))
    return str(value)


def _widest(given: list[Any]) -> int:
    return max([each if isinstance(each, int) else _text_size(each) for each in given], default=8)


def _before_format(pattern: str, given: Iterable[Any]) -> None:
    if _WIDE.search(pattern) or "*" in pattern:
        raise TemplateLimit("the chat template formats a text to a very large width, which is not allowed")
    places = pattern.count("{") + pattern.count("%")
    widths = sum(map(int, re.findall(r"\d+", pattern)))
    makes(len(pattern) + widths + places * max(map(_text_size, given), default=0))


def _check_nested_widths(pattern: str, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
    """Check the widths of str.format that are values themselves: "{:{}}".format(text, width)."""
    automatic = itertools.count()

    def value_of(field: str) -> str:
        if field and not field.isidentifier() and not field.isdecimal():
            raise TemplateLimit("the chat template looks up a width inside a value, which is not allowed")
        return _written(named[field] if field.isidentifier() else arguments[int(field or next(automatic))])

    for _, field, width, _ in _FORMATTER.parse(pattern):
        if field is not None and (not field or field[0] in ".["):
            next(automatic)
        if "{" in (width or ""):
            parts = _FORMATTER.parse(width or "")
            written = "".join([text + ("" if inner is None else value_of(inner)) for text, inner, _, _ in parts])
            if _WIDE.search(written):
                raise TemplateLimit("the chat template formats a text to a very large width, which is not allowed")
            makes(sum(map(int, re.findall(r"\d+", written))))


def _limited_filter(name: str, apply: Callable[..., Any]) -> Callable[..., Any]:
    passes = getattr(apply, "jinja_pass_arg", None)  # such a filter gets a context or environment first

    def run(*arguments: Any, **named: Any) -> Any:
        own = list(arguments[1:] if passes is not None else arguments)
        if name == "join" and own and not isinstance(own[0], str):
            own[0] = list(own[0])  # a generator's items could not be counted before they are joined
        if own:
            _before(name, own[0], [*own[1:], *named.values()])
        return counted(apply(*arguments[: len(arguments) - len(own)], *own, **named))

    if passes is not None:
        run.jinja_pass_arg = passes  # type: ignore[attr-defined]
    return run


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=shown, **options)
        del self.globals["lipsum"]

    def limit_filters(self) -> None:
        """Wrap all filters. Call it after the last filter has been added."""
        self.filters.update({name: _limited_filter(name, apply) for name, apply in self.filters.items()})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "**", int(), int():
                if right > 0 and left.bit_length() * right > MAX_BITS:
                    raise TemplateLimit("the chat template computes a very large number, which is not allowed")
            case "*", int(), int():
                if left.bit_length() + right.bit_length() > MAX_BITS:
                    raise TemplateLimit("the chat template computes a very large number, which is not allowed")
            case ("*", int(times), many) | ("*", many, int(times)) if isinstance(many, str | list | tuple):
                makes(len(many) * max(times, 0))
            case "%", str(), _:
                _before_format(left, right if isinstance(right, tuple) else [right])
        return counted(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj in _OWN:
            return __obj(*args)
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "join" and args:
                args = (list(args[0]), *args[1:])
            if name == "format":
                with contextlib.suppress(LookupError, ValueError):  # it raises the same, in its own words
                    _check_nested_widths(owner, args, kwargs)
            _before(name, owner, [*args, *kwargs.values()])
        elif name == "to_bytes":
            raise TemplateLimit("the chat template turns a number into bytes, which is not allowed")
        return counted(SandboxedEnvironment.call(__self, __context, __obj, *args, **kwargs))

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _count_steps(tree)
        return tree


def _count_steps(tree: nodes.Template) -> None:
    """Instrument the template: every loop iteration and macro call counts, and so does the result of every ~ and slice."""
    blocks: list[nodes.For | nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.For),
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        text = sum(len(data.data) for data in block.find_all(nodes.TemplateData))
        block.body.insert(0, nodes.ExprStmt(_call("makes", [nodes.Const(text)], block.lineno), lineno=block.lineno))
    _replace(tree)


def _replace(node: nodes.Node) -> None:
    for field, value in node.iter_fields():
        match value:
            case nodes.Node():
                _replace(value)
                setattr(node, field, _replaced(value))
            case list():
                for item in value:
                    if isinstance(item, nodes.Node):
                        _replace(item)
                setattr(node, field, [_replaced(item) for item in value])


def _replaced(node: Any) -> Any:
    match node:
        case nodes.Concat():
            return _call("joined", [nodes.List(node.nodes)], node.lineno)
        case nodes.Getitem(arg=nodes.Slice() as cut):
            ends = [nodes.Const(None) if end is None else end for end in (cut.start, cut.stop, cut.step)]
            return _call("sliced", [node.node, *ends], node.lineno)
        case _:
            return node


def _call(function: str, arguments: list[nodes.Expr], lineno: int) -> nodes.Call:
    name = nodes.ImportedName(f"{__name__}.{function}")
    return nodes.Call(name, arguments, [], None, None, lineno=lineno)
