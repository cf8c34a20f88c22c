"""Grammars that the ranks prepare beside their steps: ready when all ranks have one, and a rank that ended is not waited for."""

import threading
from multiprocessing.connection import Pipe

import msgspec

from octavo.executor.preparations import Preparations
from octavo.messages import PrepareGrammar


def test_a_grammar_is_ready_when_every_rank_says_so_or_one_ends() -> None:
    pairs = [Pipe() for _ in range(2)]
    preparations = Preparations([ours for ours, _ in pairs])
    ready = [threading.Event() for _ in range(3)]
    for number, grammar in enumerate(("a", "b")):
        preparations.prepare(grammar, ["old"] if number else [], ready[number].set)
    orders = [
        [msgspec.msgpack.decode(theirs.recv_bytes(), type=PrepareGrammar) for _ in range(2)] for _, theirs in pairs
    ]
    assert [(order.grammar, order.forgets) for order in orders[0]] == [("a", []), ("b", ["old"])]
    assert orders[0] == orders[1]
    for _, theirs in pairs:
        assert not ready[1].is_set()
        theirs.send_bytes(str(orders[0][1].number).encode())
    assert ready[1].wait(10) and not ready[0].is_set()
    pairs[0][1].close()
    assert ready[0].wait(10), "whoever enters learns from the next step what happened"
    preparations.prepare("c", [], ready[2].set)
    assert ready[2].wait(10)
    for ours, theirs in pairs:
        theirs.close()
        ours.close()
