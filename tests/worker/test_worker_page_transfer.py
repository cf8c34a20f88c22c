"""Pages between a device and host memory, and a tier there: the code of a GPU over a CPU's memory (tests/gpu has it on a GPU)."""

from pathlib import Path

import pytest
import torch

from octavo.device import Device
from octavo.kv_tier.folder import TierFolder, folder_secret
from octavo.kv_tier.ram_slots import RamSlots
from octavo.messages.tiers import IN_RAM, Copied, Loaded, TierKnown
from octavo.worker import page_transfer
from octavo.worker.page_mover import PageMover
from octavo.worker.page_transfer import PageTransfer
from octavo.worker.pages import Pages

NUM_PAGES, LAYERS = 80, 3
KEYS = [bytes([number]) for number in range(NUM_PAGES)]


def random_pages(page_dim: int, dtype: torch.dtype, place: Device) -> Pages:
    shape = (NUM_PAGES, 2, 4, 8) if page_dim == 0 else (2, NUM_PAGES, 4, 8)
    layers = [torch.randint(0, 100, shape).to(dtype).to(place.torch_device) for _ in range(LAYERS)]
    return Pages(layers, page_dim, place)


def content(pages: Pages, page: int) -> torch.Tensor:
    dim = 0 if len(pages.layers[0]) == NUM_PAGES else 1
    return torch.stack([layer.select(dim, page).contiguous().view(torch.uint8) for layer in pages.layers]).cpu()


def check_transfer(place: Device, page_dim: int, dtype: torch.dtype) -> None:
    pages = random_pages(page_dim, dtype, place)
    before = [content(pages, page) for page in range(NUM_PAGES)]
    transfer = PageTransfer(pages, place, 40)
    sources = [70, 3, 4, 5, 41, 40, 0, 79, *range(10, 30)]
    slots = [39, 1, 2, 3, 17, 5, 6, 7, *range(18, 38)]
    transfer.copy_out(sources, slots)
    targets = [page for page in range(NUM_PAGES) if page not in sources][: len(slots)]
    transfer.copy_in(slots, targets)
    for page, source in zip(targets, sources, strict=True):
        assert torch.equal(content(pages, page), before[source])
    for page in set(range(NUM_PAGES)) - set(targets):
        assert torch.equal(content(pages, page), before[page]), "no other page changes"
    views = transfer.host.views([39])
    assert len(views[0]) == transfer.page_bytes == pages.page_bytes


@pytest.mark.parametrize("page_dim", [0, 1])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
def test_pages_come_back_to_other_places_as_they_were(page_dim, dtype, monkeypatch):
    monkeypatch.setattr(page_transfer, "IN_BYTES", 7 * 2**10)  # several pieces, and the last is short
    monkeypatch.setattr(page_transfer, "OUT_BYTES", 5 * 2**10)
    check_transfer(Device("cpu"), page_dim, dtype)


def check_mover(place: Device, tmp_path: Path) -> None:
    pages = random_pages(0, torch.bfloat16, place)
    before = [content(pages, page) for page in range(NUM_PAGES)]
    transfer, slots = PageTransfer(pages, place, 6), RamSlots(6)
    folder_secret(tmp_path)
    mover = PageMover(transfer, TierFolder(tmp_path, 10**7, "layout", transfer.page_bytes), slots)
    try:
        following_events(mover, pages, before)
    finally:
        mover.close()


def following_events(mover: PageMover, pages: Pages, before: list[torch.Tensor]) -> None:
    def next_event():
        return mover.events.get(timeout=60)

    def store(numbers: list[int], level: str, on_device: list[int] | None = None, are_right=None) -> TierKnown:
        mover.store([KEYS[number] for number in numbers], numbers if on_device is None else on_device, level)
        assert isinstance(next_event(), Copied)
        mover.approve([True] * len(numbers) if are_right is None else are_right)
        return next_event()

    assert isinstance(next_event(), TierKnown)
    known = store([0, 1, 2, 3], "ram", are_right=[True, True, False, True])
    assert (known.level, known.stored, known.ends_store) == ("ram", [KEYS[0], KEYS[1], KEYS[3]], True)
    known = store([4, 5, 6, 7], "disk")
    assert (known.level, known.stored) == ("disk", [KEYS[4], KEYS[5], KEYS[6], KEYS[7]])
    for page in range(8):
        for layer in pages.layers:
            layer[page] = 0  # they were evicted, and others write to them
    mover.load(1, [KEYS[number] for number in (0, 1, 4, 5, 3, 6)], [20, 21, 22, 23, 24, 25])
    loaded = next_event()
    assert isinstance(loaded, Loaded) and (loaded.count, loaded.num_from_ram) == (6, 3)
    for page, number in zip(range(20, 26), (0, 1, 4, 5, 3, 6), strict=True):
        assert torch.equal(content(pages, page), before[number]), "from memory and from files, in one load"
    known = store([0, 2], "disk", on_device=[IN_RAM, IN_RAM])
    assert known.stored == [KEYS[0]], "from memory to the disk; what is not there is left out"
    known = store([30, 31, 32, 33, 34], "ram")
    assert known.stored == [KEYS[number] for number in range(30, 35)]
    assert set(known.dropped) < {KEYS[0], KEYS[1], KEYS[3]} and len(known.dropped) == 2, "there are six slots"
    assert mover.counts().ram_bytes == 6 * pages.page_bytes
    mover.load(2, [KEYS[0], KEYS[2]], [40, 41])
    loaded = next_event()
    assert loaded.count == 1 and torch.equal(content(pages, 40), before[0]), "it is on the disk now"
    mover.delete_all()
    mover.load(3, [KEYS[30]], [42])
    assert next_event().count == 0


def test_a_load_takes_pages_from_memory_and_from_files(tmp_path):
    check_mover(Device("cpu"), tmp_path)
