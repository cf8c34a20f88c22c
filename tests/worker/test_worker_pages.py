"""Page moves carried out in batches have the effect of one after the other."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.messages import PageMove
from octavo.worker.pages import PageStore, runs

DEVICE_PAGES, HOST_PAGES = 6, 4


@st.composite
def moves(draw: st.DrawFn) -> PageMove:
    device, host = st.integers(0, DEVICE_PAGES - 1), st.integers(0, HOST_PAGES - 1)
    kind = draw(st.sampled_from(["copy", "out", "in"]))
    source, target = {"copy": (device, device), "out": (device, host), "in": (host, device)}[kind]
    return PageMove(kind, draw(source), draw(target))


@pytest.mark.parametrize("page_dim", [0, 1])
@settings(max_examples=150, deadline=None)
@given(st.lists(moves(), max_size=20))
def test_moves_keep_their_order(page_dim: int, sequence: list[PageMove]) -> None:
    pages, host = list(range(DEVICE_PAGES)), list(range(100, 100 + HOST_PAGES))
    layers = [_filled(pages, page_dim, layer) for layer in range(2)]
    host_layers = [_filled(host, page_dim, layer) for layer in range(2)]
    PageStore(layers, host_layers, page_dim).move(sequence)
    for move in sequence:
        match move.kind:
            case "copy":
                pages[move.target] = pages[move.source]
            case "out":
                host[move.target] = pages[move.source]
            case "in":
                pages[move.target] = host[move.source]
    for layer in range(2):
        assert torch.equal(layers[layer], _filled(pages, page_dim, layer))
        assert torch.equal(host_layers[layer], _filled(host, page_dim, layer))


def _filled(values: list[int], page_dim: int, layer: int) -> torch.Tensor:
    """A store whose page i holds values[i], told apart by layer."""
    store = torch.tensor(values, dtype=torch.float32)[:, None, None].repeat(1, 2, 3) + layer * 1000
    return store.movedim(0, page_dim).contiguous()


def test_independent_moves_of_a_kind_go_together() -> None:
    swap = [PageMove("out", i, i) for i in range(4)] + [PageMove("in", i, i + 1) for i in range(4)]
    assert [(kind, len(sources)) for kind, sources, _ in runs(swap)] == [("out", 4), ("in", 4)]
    assert len(list(runs([PageMove("copy", 0, 1), PageMove("copy", 1, 2)]))) == 2  # reads what was just written
    assert len(list(runs([PageMove("in", 0, 1), PageMove("in", 2, 1)]))) == 2  # a batched write has no order
