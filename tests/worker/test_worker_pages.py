"""Page moves carried out in batches, in chunks and beside the steps have the effect of one after the other."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.device import Device
from octavo.messages import PageMove
from octavo.worker import pages as pages_module
from octavo.worker.pages import Pages, runs
from tests.worker.streams import LateDevice

DEVICE_PAGES, HOST_PAGES, LAYERS = 6, 4, 2
PAGE_BYTES = 2 * 3 * 4 * LAYERS


@st.composite
def moves(draw: st.DrawFn) -> PageMove:
    device, host = st.integers(0, DEVICE_PAGES - 1), st.integers(0, HOST_PAGES - 1)
    kind = draw(st.sampled_from(["copy", "out", "in"]))
    source, target = {"copy": (device, device), "out": (device, host), "in": (host, device)}[kind]
    return PageMove(kind, draw(source), draw(target))


@pytest.mark.parametrize(("page_dim", "is_side_by_side"), [(0, False), (1, False), (0, True)])
@pytest.mark.parametrize("staged_pages", [1, 2, 100])
@settings(max_examples=60, deadline=None)
@given(sequence=st.lists(moves(), max_size=20), slab_pages=st.integers(1, 3))
def test_chunks_and_slabs_change_nothing(
    page_dim: int, is_side_by_side: bool, staged_pages: int, sequence: list[PageMove], slab_pages: int
) -> None:
    pages, host = list(range(DEVICE_PAGES)), [0] * HOST_PAGES
    layers = [filled(pages, page_dim, layer) for layer in range(LAYERS)]
    if is_side_by_side:
        layers = list(torch.stack(layers, 1).unbind(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages_module, "_SLAB_BYTES", slab_pages * PAGE_BYTES)
        store = Pages(layers, page_dim, Device("cpu"), HOST_PAGES, staged_pages * PAGE_BYTES)
    # What the swap space holds at first is nobody's: it is written before it is read.
    sequence = [PageMove("out", 0, page) for page in range(HOST_PAGES)] + sequence
    sequence += [PageMove("in", page, page) for page in range(HOST_PAGES)]
    store.move(sequence)
    follow(sequence, pages, host)
    for layer in range(LAYERS):
        assert torch.equal(layers[layer], filled(pages, page_dim, layer))


def plan_of(rng: random.Random) -> list[PageMove]:
    """As a scheduler's: copies, or pages out, then pages in."""
    plan = [
        PageMove("copy", rng.randrange(DEVICE_PAGES), rng.randrange(DEVICE_PAGES)) for _ in range(rng.randint(0, 2))
    ]
    host = rng.sample(range(HOST_PAGES), rng.randint(0, HOST_PAGES))
    plan += [PageMove("out", rng.randrange(DEVICE_PAGES), page) for page in host]
    back = rng.sample(range(HOST_PAGES), rng.randint(0, HOST_PAGES))
    targets = rng.sample(range(DEVICE_PAGES), len(back))
    return plan + [PageMove("in", page, target) for page, target in zip(back, targets, strict=True)]


def steps_beside_swaps(seed: int, unheard: str = "") -> bool:
    """Plans whose steps write to pages right after their moves, on streams that run late: whether it came out right."""
    rng, device = random.Random(seed), LateDevice(seed)
    pages, host = list(range(DEVICE_PAGES)), [0] * HOST_PAGES
    layers = [filled(pages, 0, layer) for layer in range(LAYERS)]
    store = Pages(layers, 0, device, HOST_PAGES, rng.choice([1, 2, 3]) * PAGE_BYTES)
    for staging in store._staging if unheard else []:
        getattr(staging, unheard).is_heard = False
    first = [PageMove("out", page, page) for page in range(HOST_PAGES)]
    last = [PageMove("in", page, page) for page in range(HOST_PAGES)]
    with device:
        for plan in [first, *(plan_of(rng) for _ in range(6)), last]:
            store.move(plan)
            follow(plan, pages, host)
            for page in rng.sample(range(DEVICE_PAGES), 3):  # the step
                pages[page] += 10
                for layer in layers:
                    layer[page].add_(10)
    device.run()
    return all(torch.equal(layers[layer], filled(pages, 0, layer)) for layer in range(LAYERS))


def test_steps_beside_swaps_are_right_whatever_runs_first() -> None:
    wrong = [seed for seed in range(100) if not steps_beside_swaps(seed)]
    assert not wrong, wrong


@pytest.mark.parametrize("event", ["is_full", "is_free"])
def test_a_missing_wait_is_noticed(event: str) -> None:
    assert not all(steps_beside_swaps(seed, event) for seed in range(200))


def test_host_neighbours_are_one_copy_in_whatever_order_they_were_given() -> None:
    layers = [filled(list(range(8)), 0, layer) for layer in range(LAYERS)]
    store = Pages(layers, 0, Device("cpu"), 8)
    assert store._host is not None
    assert [(first, len(host)) for first, host in store._host.stretches([2, 3, 4, 7, 0, 1])] == [(0, 3), (3, 1), (4, 2)]
    seen: list[list[int]] = []
    original = store._host.stretches
    store._host.stretches = lambda pages: seen.append(list(pages)) or original(pages)  # type: ignore[method-assign, func-returns-value]
    store.move([PageMove("out", page, 7 - page) for page in range(8)])
    assert seen == [list(range(8))]


def test_pages_of_any_type_are_moved_bit_by_bit() -> None:
    for dtype, width in ((torch.bfloat16, 64), (torch.float8_e4m3fn, 64), (torch.float8_e4m3fn, 3), (torch.float32, 1)):
        bits = torch.randint(0, 256, (4, 2, width * dtype.itemsize), dtype=torch.uint8)  # NaNs among them
        layers = [bits.clone().view(dtype)]
        store = Pages(layers, 0, Device("cpu"), 2)
        store.move([PageMove("out", 0, 1), PageMove("in", 1, 3), PageMove("copy", 1, 2)])
        assert torch.equal(layers[0].view(torch.uint8), bits[[0, 1, 1, 0]])


def follow(sequence: list[PageMove], pages: list[int], host: list[int]) -> None:
    """The moves, one after the other, on plain numbers."""
    for move in sequence:
        match move.kind:
            case "copy":
                pages[move.target] = pages[move.source]
            case "out":
                host[move.target] = pages[move.source]
            case "in":
                pages[move.target] = host[move.source]


def filled(values: list[int], page_dim: int, layer: int) -> torch.Tensor:
    """A store whose page i holds values[i], different in each layer."""
    store = torch.tensor(values, dtype=torch.float32)[:, None, None].repeat(1, 2, 3) + layer * 1000
    return store.movedim(0, page_dim).contiguous()


def test_independent_moves_of_a_kind_go_together() -> None:
    swap = [PageMove("out", i, i) for i in range(4)] + [PageMove("in", i, i + 1) for i in range(4)]
    assert [(kind, len(sources)) for kind, sources, _ in runs(swap)] == [("out", 4), ("in", 4)]
    assert len(list(runs([PageMove("copy", 0, 1), PageMove("copy", 1, 2)]))) == 2  # reads what was just written
    assert len(list(runs([PageMove("in", 0, 1), PageMove("in", 2, 1)]))) == 2  # a batched write has no order


def test_memory_that_is_given_back_reads_as_zero_and_other_pages_stay():
    device = Device("cpu")
    together = device.zeros((8, 3, 2, 4096), torch.float32)  # 96 KiB a page
    together.fill_(1.0)
    pages = Pages(list(together.unbind(1)), 0, device)
    pages.give_back([5, 2, 3])
    pages.give_back([])
    left = [0, 1, 4, 6, 7]
    assert bool((together[left] == 1).all())
    assert bool(((together == 0) | (together == 1)).all())
    assert int((together[[2, 3, 5]] == 0).sum()) >= 3 * 3 * 2 * 4096 - 4 * 1024, "all but the system pages at the ends"


def test_layers_that_lie_apart_keep_their_memory():
    device = Device("cpu")
    layers = [torch.ones(8, 2, 4096) for _ in range(3)]
    Pages(layers, 0, device).give_back([1, 2])
    assert all(bool((layer == 1).all()) for layer in layers)
