"""Limits of grammars, shared by everything that compiles them: the check of a request (octavo/sandbox) and the engine. What
compiles in one must compile in the other."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from llguidance import LLParserLimits

T = TypeVar("T")

MAX_REFERENCES = 500  # $refs in a chain; the compiler recurses on each, and takes about 8 KB of stack for it
MAX_RULES = 1000  # rules or terminals of a Lark grammar in a chain; about 3 KB of stack each
MAX_OPTIONAL = 1000  # optional properties of one object: about four items of a parser's row each
MAX_ROW_ITEMS = 5000

# The check compiles on a smaller stack than any that the engine may use: what fits here overflows nowhere. The engine's thread
# should have STACK_BYTES; a usual thread has 8 MiB.
CHECK_STACK_BYTES = 6 * 2**20
STACK_BYTES = 64 * 2**20

_stack_size = threading.Lock()  # threading.stack_size() is one setting for the whole process


def parser_limits() -> "LLParserLimits":
    """The compiler's limits for checking and for enforcing a grammar.

    Its defaults of 2000 items and a fuel of 1,000,000 are too small for an object with 500 or 1000 optional properties. The time
    of a mask grows with the items, to about 20 ms, and that of compiling with the fuel, to about a second."""
    from llguidance import LLParserLimits

    return LLParserLimits(
        max_items_in_row=MAX_ROW_ITEMS,
        step_max_items=25 * MAX_ROW_ITEMS,
        initial_lexer_fuel=5_000_000,
        verbose_errors=False,
    )


def on_stack(num_bytes: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread with a stack of this size, and return its result or raise its error."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    with _stack_size:
        before = threading.stack_size(num_bytes)
        try:
            thread = threading.Thread(target=run, name="octavo-grammar")
            thread.start()
        finally:
            threading.stack_size(before)
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


def longest_chain(edges: Mapping[str, Sequence[str]]) -> int:
    """The most nodes that a recursion over this graph can have open at once, whatever order it takes: nodes that lead back to each
    other all count. `edges`: node → the nodes it refers to, all of which are keys."""
    longest: dict[str, int] = {}  # of the chains that begin at a node, once its component is complete
    number: dict[str, int] = {}  # order of the visit
    lowest: dict[str, int] = {}  # Tarjan's low link
    waiting: list[str] = []  # nodes of components that are not complete
    place: dict[str, int] = {}  # of a node in `waiting`
    stack: list[tuple[str, Iterator[str]]] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        place[node] = len(waiting)
        waiting.append(node)
        stack.append((node, iter(edges[node])))

    for start in edges:
        if start not in number:
            visit(start)
        while stack:
            node, rest = stack[-1]
            following = next(rest, None)
            if following is not None:
                if following not in number:
                    visit(following)
                elif following not in longest:
                    lowest[node] = min(lowest[node], number[following])
                continue
            stack.pop()
            if stack:
                parent = stack[-1][0]
                lowest[parent] = min(lowest[parent], lowest[node])
            if lowest[node] == number[node]:
                component = waiting[place[node] :]
                del waiting[place[node] :]
                after = max((longest.get(other, 0) for member in component for other in edges[member]), default=0)
                longest.update(dict.fromkeys(component, len(component) + after))
    return max(longest.values(), default=0)
