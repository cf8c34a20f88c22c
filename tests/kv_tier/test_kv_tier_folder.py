"""Runs of pages in files: what is read is what was written, or it is a miss; whatever happened to the files in between."""

import os
import random
import stat
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.kv_tier import folder as folder_module
from octavo.kv_tier.folder import PART_SECONDS, TierFolder, folder_secret

PAGE = 96


def page_of(key: bytes) -> bytes:
    return random.Random(key).randbytes(PAGE)


def pieces(data: bytearray | bytes) -> list[memoryview]:
    view = memoryview(data)
    return [view[: PAGE // 3], view[PAGE // 3 :]]


def store(tier: TierFolder, *keys: bytes) -> None:
    tier.write(keys, [pieces(page_of(key)) for key in keys])


def load(tier: TierFolder, *keys: bytes) -> int:
    """How many pages were found, all of which must be right."""
    found = [bytearray(PAGE) for _ in keys]
    count, _ = tier.read(keys, [pieces(page) for page in found])
    for key, page in zip(keys[:count], found, strict=False):
        assert page == page_of(key), "a wrong page was served"
    return count


def opened(path: Path, max_bytes: int = 10**6, layout: str = "a", **options) -> TierFolder:
    folder_secret(path)
    tier = TierFolder(path, max_bytes, layout, PAGE, **options)
    tier.look()
    return tier


def run_files(path: Path) -> list[Path]:
    return sorted(path.glob("*/*.kv"))


def test_pages_outlive_the_engine_that_wrote_them(tmp_path):
    store(opened(tmp_path / "t"), b"k1", b"k2", b"k3")
    later = opened(tmp_path / "t")
    assert load(later, b"k1", b"k2", b"k3") == 3
    assert load(later, b"k2", b"k3", b"k4") == 2
    assert load(later, b"k4", b"k1") == 0
    assert stat.S_IMODE((tmp_path / "t").stat().st_mode) == 0o700
    assert stat.S_IMODE(run_files(tmp_path / "t")[0].stat().st_mode) == 0o600


def test_a_prefix_is_read_over_several_runs(tmp_path):
    tier = opened(tmp_path)
    store(tier, b"a", b"b")
    store(tier, b"x", b"c", b"d")
    assert load(tier, b"a", b"b", b"c", b"d", b"e") == 4


def test_any_changed_byte_is_a_miss(tmp_path):
    store(opened(tmp_path), b"k1", b"k2")
    (file,) = run_files(tmp_path)
    content = file.read_bytes()
    r = random.Random(4)
    places = {*range(120), *r.sample(range(len(content)), 200), *range(len(content) - 2 * PAGE, len(content))}
    for at in sorted(places):
        changed = bytearray(content)
        changed[at] ^= 1 << r.randrange(8)
        file.write_bytes(changed)
        tier = opened(tmp_path)
        is_padding = load(tier, b"k1", b"k2") == 2
        assert not is_padding or not any(content[at : at + 1]), "only zeros after the header may change"
        if not is_padding:
            assert tier.num_bad == 1 and not file.exists(), "counted and deleted"
            assert load(tier, b"k2") == 0, "nothing of a bad file is used again"


@pytest.mark.parametrize("is_open", [False, True])
def test_a_file_cut_at_any_place_is_a_miss(tmp_path, is_open):
    store(opened(tmp_path), b"k1", b"k2")
    (file,) = run_files(tmp_path)
    content = file.read_bytes()
    for size in [0, 1, 15, 16, 40, 4095, 4096, 4096 + PAGE, len(content) - 1]:
        file.write_bytes(content)
        tier = opened(tmp_path)
        file.write_bytes(content[:size])
        if not is_open:
            tier = opened(tmp_path)
        assert load(tier, b"k1", b"k2") == (1 if is_open and size >= 4096 + PAGE else 0)


def test_foreign_files_are_not_read(tmp_path):
    store(opened(tmp_path, layout="a"), b"k1")
    assert load(opened(tmp_path, layout="b"), b"k1") == 0
    (file,) = run_files(tmp_path)
    file.rename(tmp_path / "b" / file.name)
    tier = opened(tmp_path, layout="b")
    assert load(tier, b"k1") == 0 and tier.num_bad == 1
    (tmp_path / "b" / "x.kv").write_text("hello")
    (tmp_path / "b" / "folder.kv").mkdir()
    tier = opened(tmp_path, layout="b")
    assert load(tier, b"k1") == 0 and tier.num_bad == 2


def test_bytes_are_limited_and_old_layouts_go_first_then_what_was_used_longest_ago(tmp_path):
    now = [1000.0]
    store(opened(tmp_path, layout="old"), b"o1")
    (old,) = run_files(tmp_path)
    size = old.stat().st_size
    tier = opened(tmp_path, 3 * size, clock=lambda: now[0])
    for number, key in enumerate((b"k1", b"k2")):
        store(tier, key)
        newest = max(run_files(tmp_path / ""), key=lambda file: file.name)
        os.utime(newest, (number, number))  # older than the old layout's
    assert old.exists()
    store(tier, b"k3")
    assert not old.exists(), "the old layout goes first, although it is younger"
    now[0] = 2000.0
    assert load(tier, b"k1") == 1, "k1 is used"
    store(tier, b"k4")
    assert load(tier, b"k2") == 0 and load(tier, b"k1") == 1
    assert sum(file.stat().st_size for file in run_files(tmp_path)) <= 3 * size
    big = [bytes([number]) for number in range(200)]
    store(tier, *big)
    assert load(tier, big[0]) == 0, "a run beyond the limit is not written"


def test_two_engines_share_a_folder(tmp_path):
    one, two = opened(tmp_path), opened(tmp_path)
    store(one, b"k1")
    assert load(two, b"k1") == 0
    assert two.look().stored == [b"k1"]
    assert load(two, b"k1") == 1
    one.delete_all()
    assert load(two, b"k1") == 0, "gone, which is a miss"
    assert two.num_bad == 0 and not two.has(b"k1")


def test_what_a_killed_engine_left_is_removed_later(tmp_path):
    now = [10.0**9]
    tier = opened(tmp_path, clock=lambda: now[0])
    part = tmp_path / "a" / "1.part"
    part.write_bytes(b"half")
    os.utime(part, (now[0], now[0]))
    tier.look()
    assert part.exists(), "another engine may be writing it"
    now[0] += PART_SECONDS + 1
    tier.look()
    assert not part.exists()


def test_a_full_disk_stores_nothing_and_leaves_nothing(tmp_path, monkeypatch):
    tier = opened(tmp_path)

    def full(file, header, pages):
        os.write(file, b"begun")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder_module, "write_run", full)
    with pytest.raises(OSError, match="No space"):
        store(tier, b"k1")
    assert list((tmp_path / "a").iterdir()) == [] and not tier.has(b"k1")
    monkeypatch.undo()
    store(tier, b"k1")
    assert load(tier, b"k1") == 1


def test_an_unreadable_disk_is_a_miss(tmp_path, monkeypatch):
    tier = opened(tmp_path)
    store(tier, b"k1")

    def broken(*arguments):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(folder_module, "read_pages", broken)
    assert load(tier, b"k1") == 0 and tier.num_bad == 1


def test_the_secret_is_made_once_and_a_torn_one_is_replaced(tmp_path):
    first = folder_secret(tmp_path / "x")
    assert len(first) == 32 and folder_secret(tmp_path / "x") == first
    (tmp_path / "x" / "secret").write_bytes(b"torn")
    assert folder_secret(tmp_path / "x") not in (first, b"torn")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--kv-tier"):
        folder_secret(tmp_path / "file")


def test_a_run_that_names_a_page_twice_is_bad(tmp_path):
    """It is none that an engine wrote, and forgetting it would fail."""
    store(opened(tmp_path / "t"), b"k1", b"k1")
    later = opened(tmp_path / "t")
    assert later.num_bad == 1 and not later.has(b"k1") and run_files(tmp_path / "t") == []
    assert later.look() == ([], [])
