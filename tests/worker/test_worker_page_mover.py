"""The mover: bytes of real page memory to files and back, on threads, for layers side by side and apart."""

from pathlib import Path

import pytest
import torch

from octavo.config import read_tiers
from octavo.device import Device
from octavo.kv_tier.folder import TierFolder, folder_secret
from octavo.messages.tiers import Copied, Loaded, TierFailed, TierKnown
from octavo.worker.page_mover import PageMover, PageViews, open_mover
from octavo.worker.pages import Pages

NUM_PAGES, LAYERS = 10, 3
KEYS = [b"k1", b"k2", b"k3"]


def pages_of(are_together: bool, dtype: torch.dtype) -> Pages:
    device = Device("cpu")
    if are_together:
        return Pages(list(device.zeros((NUM_PAGES, LAYERS, 2, 8), dtype).unbind(1)), 0, device)
    return Pages([device.zeros((NUM_PAGES, 2, 8), dtype) for _ in range(LAYERS)], 0, device)


def fill(pages: Pages, page: int) -> list[torch.Tensor]:
    for layer in pages.layers:
        layer[page] = torch.rand(2, 8).to(layer.dtype)
    return [layer[page].clone() for layer in pages.layers]


def holds(pages: Pages, page: int, content: list[torch.Tensor]) -> bool:
    return all(torch.equal(layer[page], part) for layer, part in zip(pages.layers, content, strict=True))


def opened(pages: Pages, path: Path) -> PageMover:
    folder_secret(path)
    mover = open_mover(pages, Device("cpu"), read_tiers(f"disk:1000000:{path}"), "layout")
    assert isinstance(mover.events.get(timeout=30), TierKnown)
    return mover


@pytest.mark.parametrize("are_together", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8])
def test_pages_come_back_to_other_places_as_they_were(tmp_path, are_together, dtype):
    pages = pages_of(are_together, dtype)
    contents = [fill(pages, page) for page in (4, 2, 7)]
    mover = opened(pages, tmp_path)
    mover.store(KEYS, [4, 2, 7])
    assert isinstance(mover.events.get(timeout=30), Copied)
    fill(pages, 2)  # after the copy: the file has what was there before
    mover.approve([True, True, False])
    known = mover.events.get(timeout=30)
    assert known.ends_store and known.stored == KEYS[:2], "only what was approved"
    others = fill(pages, 9)
    mover.load(5, KEYS, [0, 1, 3])
    loaded = mover.events.get(timeout=30)
    assert isinstance(loaded, Loaded) and (loaded.ticket, loaded.count) == (5, 2)
    assert holds(pages, 0, contents[0]) and holds(pages, 1, contents[1]) and holds(pages, 9, others)
    mover.close()
    again = pages_of(are_together, dtype)
    mover = open_mover(again, Device("cpu"), read_tiers(f"disk:1000000:{tmp_path}"), "layout")
    assert mover.events.get(timeout=30).stored == KEYS[:2], "a later engine finds them"
    mover.load(0, KEYS[:2], [6, 5])
    assert mover.events.get(timeout=30).count == 2
    assert holds(again, 6, contents[0]) and holds(again, 5, contents[1])
    mover.close()


def test_a_disk_that_refuses_is_told_and_the_next_store_waits(tmp_path, monkeypatch):
    pages = pages_of(True, torch.float32)
    mover = opened(pages, tmp_path)

    def full(self, keys, copies):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TierFolder, "write", full)
    mover.store(KEYS, [0, 1, 2])
    assert isinstance(mover.events.get(timeout=30), Copied)
    mover.approve([True] * 3)
    failed = mover.events.get(timeout=30)
    assert isinstance(failed, TierFailed) and failed.pause > 0
    monkeypatch.undo()
    mover.store(KEYS, [0, 1, 2])
    assert isinstance(mover.events.get(timeout=30), Copied)
    mover.approve([True] * 3)
    assert mover.events.get(timeout=30).stored == [], "not before the pause is over"
    mover.load(1, KEYS, [3, 4, 5])
    assert mover.events.get(timeout=30).count == 0, "and loads go on: here is nothing"
    mover.close()


def test_a_read_that_raises_is_a_miss(tmp_path, monkeypatch):
    mover = opened(pages_of(True, torch.float32), tmp_path)

    def broken(self, keys, pages):
        raise RuntimeError("planted")

    monkeypatch.setattr(TierFolder, "read", broken)
    mover.load(3, KEYS, [0, 1, 2])
    assert mover.events.get(timeout=30) == Loaded(3, 0, [], pytest.approx(0, abs=30))
    mover.close()


def test_pages_that_are_no_bytes_in_a_row_are_refused():
    layers = [torch.zeros(2, NUM_PAGES, 8) for _ in range(2)]
    with pytest.raises(ValueError, match="no pages"):
        PageViews(Pages(layers, 1, Device("cpu")))
