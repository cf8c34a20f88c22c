"""Adapters on a GPU that are loaded again, and files that are alike: the bytes on the device are those of the first way."""

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo.attention.triton import TritonAttention
from octavo.device import Device
from octavo.errors import ConfigError
from octavo.messages import AdapterRef
from octavo.models import load_family
from octavo.weights.adapters.adapter_file import Stored, stamp_of
from octavo.weights.formats.checkpoint import open_checkpoint
from octavo.weights.methods.triton_adapters import AdapterSites
from octavo.weights.sources.source import local
from octavo.worker.adapters import NoRoom, RankAdapters
from octavo.worker.file_layouts import layout_from
from octavo.worker.gpu_adapters import GpuAdapter, GpuHolder
from octavo.worker.host_copies import Form, HostCopies
from octavo.worker.outline import outline_of
from tests.adapters import ALL, weights_of, write_peft
from tests.contexts import context
from tests.small_llama import small_llama

CPU, HALF = Device("cpu"), torch.bfloat16
WEIGHTS = "adapter_model.safetensors"


class Rank:
    """Adapters of a model, with this much host memory for copies of them."""

    def __init__(self, model: Path, host_bytes: int, num_bytes: int = 2**20) -> None:
        checkpoint, family = open_checkpoint(local(model)), load_family("llama")
        spec, self.sites = family.spec(checkpoint.config), AdapterSites(HALF, CPU.torch_device)
        settings: Any = {"attention": TritonAttention(), "kernels": "triton", "max_len": 64, "dtype": HALF}
        surroundings = context(around=self.sites.around, **settings)
        model_here = family.Model(checkpoint.config, spec, surroundings)
        self.holder = GpuHolder(self.sites, num_bytes, CPU, host_bytes)
        self.holder._memory.fill_(77)
        self.holder._copies._memory.fill_(77)
        outline = outline_of(checkpoint, spec, surroundings)
        self.adapters = RankAdapters(model_here, outline, family, checkpoint.config, self.holder)
        self.sites.open(self.adapters.num_parts(len(self.sites.weights)), 300, 256)

    def load(self, folder: Path) -> str:
        return self.adapters.load(ref(folder)).id

    def numbers(self, name: str) -> list[Any]:
        """What a step reads of this adapter: of each part its rank, columns and scale, and its matrices."""
        held: Any = self.adapters._loaded[name]
        assert isinstance(held, GpuAdapter)
        memory, base = self.holder._memory, self.holder._memory.data_ptr()
        shape = (len(self.sites.weights), self.sites.max_parts, 6)
        start = held.address - base
        table = memory[start : start + 8 * int(np.prod(shape))].view(torch.int64).view(shape)
        found: list[Any] = []
        for site, parts in enumerate(table.tolist()):
            for down, up, rank, first, columns, scale in parts:
                if rank:
                    depth = self.depth(site)
                    sizes = ((down, rank * depth), (up, columns * rank))
                    found.append((site, rank, first, columns, scale))
                    found += [memory[at - base : at - base + 2 * size].view(HALF).tolist() for at, size in sizes]
        return found

    def depth(self, site: int) -> int:
        targets = self.adapters.targets.values()
        return next(at.depth for target in targets for at in target.placements if at.site == site)


def ref(folder: Path) -> AdapterRef:
    return AdapterRef(folder.name, str(folder), stamp_of(folder))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("model")
    small_llama(48, head_dim=16).save_pretrained(folder)
    return folder


def stored_as(folder: Path, dtype: torch.dtype) -> Path:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(folder / WEIGHTS).items()}
    save_file(tensors, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("rank", [16, 8, 5, 1])
def test_files_that_are_alike_are_held_the_same(model: Path, tmp_path: Path, dtype: torch.dtype, rank: int) -> None:
    """The first of them teaches how the others are placed. Beside a rank that takes them matrix by matrix."""
    weights = weights_of(model)
    folders = [write_peft(tmp_path / f"{seed}", weights, rank=rank, targets=ALL, seed=seed) for seed in range(3)]
    config = json.loads((folders[1] / "adapter_config.json").read_text())
    config["alpha_pattern"] = {"q_proj": 3.0, "down_proj": 7.0}
    (folders[1] / "adapter_config.json").write_text(json.dumps(config))
    plain, quick = Rank(model, 0), Rank(model, 2**20)
    for folder in folders:
        stored_as(folder, dtype)
        name = quick.load(folder)
        assert name == plain.load(folder)
        assert quick.numbers(name) == plain.numbers(name)
    assert len({repr(quick.numbers(name)) for name in quick.adapters._loaded}) == len(folders)
    assert len(quick.holder._layouts) == 1 and None not in quick.holder._layouts.values()
    assert not plain.holder._layouts


def test_layouts_have_a_limit(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond it, files are held matrix by matrix, and no layout is learnt again and again."""
    monkeypatch.setattr("octavo.worker.gpu_adapters._MOST_LAYOUT_BYTES", 1)
    weights = weights_of(model)
    folders = [write_peft(tmp_path / f"{at}", weights, rank=8 + 8 * (at // 2), targets=ALL, seed=at) for at in range(6)]
    plain, rank = Rank(model, 0), Rank(model, 2**20)
    for folder in folders:
        assert rank.numbers(rank.load(folder)) == plain.numbers(plain.load(folder))
    first, *others = rank.holder._layouts.values()
    assert first is not None and others == [None, None]


def test_an_adapter_comes_back_without_its_file(model: Path, tmp_path: Path) -> None:
    """From its copy; and from its file where the copy had to go. Neither hashes it again, and both are equal to the first."""
    weights = weights_of(model)
    folders = [write_peft(tmp_path / f"{seed}", weights, rank=16, targets=ALL, seed=seed) for seed in range(4)]
    rank = Rank(model, 2**20)
    names = [rank.load(folder) for folder in folders]
    before = [rank.numbers(name) for name in names]
    assert set(rank.holder._copies._copies) == set(names)
    for turn in range(2):
        rank.adapters.forget(names)
        assert rank.holder._arena.num_free == rank.holder._arena.size
        rank.holder._memory.fill_(55)
        if turn:
            while rank.holder._copies._copies:
                rank.holder._copies._drop(next(iter(rank.holder._copies._copies)))
        assert [rank.load(folder) for folder in folders] == names
        assert [rank.numbers(name) for name in names] == before


def test_changed_files_are_not_loaded_again(model: Path, tmp_path: Path) -> None:
    weights = weights_of(model)
    folder = write_peft(tmp_path / "a", weights, rank=16, targets=ALL, seed=1)
    rank, before = Rank(model, 2**20), ref(folder)
    rank.adapters.forget([rank.adapters.load(before).id])
    os.utime(folder / WEIGHTS, ns=(1, 1))
    with pytest.raises(ConfigError, match="have changed since it was registered"):
        rank.adapters.load(before)
    assert rank.load(folder) in rank.adapters._loaded, "as another registration it is read anew"


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(bytes(100))
    memory = torch.zeros(96, dtype=torch.uint8)
    Stored(tmp_path / "weights", 4, 96, "uint8").read_into(memory)
    with pytest.raises(ConfigError, match="is truncated"):
        Stored(tmp_path / "weights", 5, 96, "uint8").read_into(memory)
    with pytest.raises(ConfigError, match="cannot read"):
        Stored(tmp_path / "other", 5, 96, "uint8").read_into(memory)


@pytest.mark.parametrize("host_bytes", [0, 2**20])
def test_numbers_that_are_not_finite_are_refused_by_name(model: Path, tmp_path: Path, host_bytes: int) -> None:
    rank = Rank(model, host_bytes)
    rank.load(write_peft(tmp_path / "good", weights_of(model), rank=16, targets=ALL, seed=1))
    for number in (float("nan"), float("inf"), float("-inf")):
        folder = write_peft(tmp_path / str(number), weights_of(model), rank=16, targets=ALL, seed=2)
        tensors = load_file(folder / WEIGHTS)
        last = max(tensors)
        tensors[last][-1, -1] = number
        save_file(tensors, folder / WEIGHTS)
        with pytest.raises(ConfigError, match="numbers that are not finite"):
            rank.load(folder)
    room = rank.holder.room(2**18)
    assert (room is not None) == bool(host_bytes), "rooms of loads that failed are free"


def test_an_adapter_is_divided_where_no_place_is_large_enough(model: Path, tmp_path: Path) -> None:
    weights = weights_of(model)
    folder = write_peft(tmp_path / "a", weights, rank=16, targets=ALL, seed=1)
    rank = Rank(model, 2**20)
    name = rank.load(folder)
    before, (first,) = rank.numbers(name), rank.adapters._loaded[name].places  # type: ignore[attr-defined]
    assert first == 0
    rank.adapters.forget([name])
    arena, taken = rank.holder._arena, []
    while (start := arena.take(8192)) is not None:
        taken.append(start)
    for start in taken[::2]:
        arena.give_back(start)  # half of the memory, in pieces of 8 kB
    assert rank.load(folder) == name and rank.numbers(name) == before
    assert len(rank.adapters._loaded[name].places) > 1  # type: ignore[attr-defined]
    rank.adapters.forget([name])
    assert all(arena.take(8192) is not None for _ in taken[::2])
    free = arena.num_free
    with pytest.raises(NoRoom):
        rank.load(folder)
    assert arena.num_free == free


def test_copies_make_room_for_others() -> None:
    """The one that was read longest ago goes first; rooms never overlap, and all memory is free in the end."""
    rng, form = random.Random(5), Form(np.zeros((1, 1, 6), dtype=np.int64), np.zeros((0, 2), dtype=np.int64), 0, 0)
    copies = HostCopies(torch.zeros(2**16, dtype=torch.uint8))
    expected: list[str] = []
    for number in range(500):
        if expected and rng.random() < 0.4:
            name = rng.choice(expected)
            copy = copies.get(name)
            assert copy is not None and set(copy.memory.tolist()) == {int(name) % 251}
            expected = [*(each for each in expected if each != name), name]
            continue
        room = copies.take(rng.choice([300, 5000, 20_000]))
        assert room is not None
        room.memory.fill_(number % 251)
        if rng.random() < 0.2:
            copies.free(room)
        else:
            copies.keep(str(number), room, form)
            expected.append(str(number))
        left = list(copies._copies)
        assert (
            left == [name for name in expected if name in left][-len(left) :] == expected[len(expected) - len(left) :]
        )
        expected = left
    assert copies.take(2**16 + 1) is None
    assert copies.take(2**16) is not None and not copies._copies


def test_numbers_that_go_their_own_ways_have_no_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.worker.file_layouts._MOST_UNITS", 100)
    form = Form(np.zeros((1, 1, 6), dtype=np.int64), np.zeros((1, 2), dtype=np.int64), 0, 512)
    origins = np.arange(1, 257, dtype=np.int32)
    found = layout_from(form, origins, 256)
    assert found is not None and found.unit == 32
    found = layout_from(form, origins.reshape(-1, 4)[::-1].ravel().copy(), 256)
    assert found is not None and found.unit == 4
    assert layout_from(form, origins[::-1].copy(), 256) is None
