"""What ranks do beside their steps: done when all ranks have answered, and a rank that ended is not waited for."""

import threading
from multiprocessing.connection import Pipe
from queue import SimpleQueue

import msgspec

from octavo.executor.side_requests import SideRequests
from octavo.messages.side import PrepareGrammar, SideMessage, SideReply


def test_it_is_done_when_every_rank_says_so_or_one_ends() -> None:
    pairs = [Pipe() for _ in range(3)]
    asking = SideRequests([ours for ours, _ in pairs])
    answers: list[SimpleQueue[list[SideReply] | None]] = [SimpleQueue() for _ in range(3)]
    both = [0, 2]
    for number, grammar in enumerate(("a", "b")):
        forgets = ["old"] if number else []
        asking.ask(both, lambda n, g=grammar, f=forgets: PrepareGrammar(n, g, f), answers[number].put)  # type: ignore[misc]
    orders = [[_received(pairs[rank][1]) for _ in range(2)] for rank in both]
    assert [(order.grammar, order.forgets) for order in orders[0]] == [("a", []), ("b", ["old"])]
    assert orders[0] == orders[1] and not pairs[1][1].poll(), "a rank that was not asked hears nothing"
    second = orders[0][1].number
    for size, rank in enumerate(reversed(both)):
        assert answers[1].empty()
        pairs[rank][1].send_bytes(msgspec.msgpack.encode(SideReply(second, num_bytes=size)))
    assert answers[1].get(timeout=10) == [SideReply(second, num_bytes=1), SideReply(second, num_bytes=0)]
    assert answers[0].empty()
    pairs[0][1].close()
    assert answers[0].get(timeout=10) is None
    ended = threading.Event()
    asking.ask(both, lambda n: PrepareGrammar(n, "c", []), lambda replies: ended.set() if replies is None else None)
    assert ended.wait(10)
    for ours, theirs in pairs:
        theirs.close()
        ours.close()


def _received(line: "object") -> PrepareGrammar:
    message = msgspec.msgpack.decode(line.recv_bytes(), type=SideMessage)  # type: ignore[attr-defined]
    assert isinstance(message, PrepareGrammar)
    return message
