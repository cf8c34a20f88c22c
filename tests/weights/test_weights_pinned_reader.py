"""Reading ahead: the same tensors as mapped ones, with any chunks, in little memory; failures are reported."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from octavo.device import Device, Event
from octavo.errors import ConfigError
from octavo.weights.formats.safetensors_files import SafetensorsFiles
from octavo.weights.pinned_reader import Region, read_ahead
from tests.weights.test_weights_checkpoint import model_folder, sharded_folder, write_index


def all_types(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    floats = {
        f"float.{dtype}": torch.randn(7, 5, generator=generator).to(dtype)
        for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    }
    ids = {f"ids.{bits}": torch.arange(11, dtype=getattr(torch, f"int{bits}")) for bits in (8, 16, 32, 64)}
    others = {"mask": torch.tensor([True, False, True]), "bytes": torch.arange(5, dtype=torch.uint8)}
    return floats | ids | others | {"empty": torch.zeros(0, 4), "scalar": torch.tensor(3.5)}


@pytest.mark.parametrize("chunk_bytes", [1, 7, 64, 1000, 0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_as_mapped(tmp_path: Path, chunk_bytes: int, dtype: torch.dtype) -> None:
    folder = model_folder(tmp_path / "m")
    save_file(all_types(), folder / "one.safetensors")
    save_file({f"second.{name}": t for name, t in all_types(1).items()}, folder / "two.safetensors")
    files = SafetensorsFiles(folder)
    mapped = {name: tensor.clone() for name, tensor in files.tensors("cpu", dtype)}
    ahead = dict(files.read_ahead(Device("cpu"), dtype, chunk_bytes))
    assert ahead.keys() == mapped.keys()
    for name, tensor in mapped.items():
        assert ahead[name].dtype == tensor.dtype and torch.equal(ahead[name], tensor), name


def test_only_what_the_index_names_is_read(tmp_path: Path) -> None:
    folder = sharded_folder(tmp_path / "m")
    tensors = {name: torch.full((50,), float(i)) for i, name in enumerate("abcde")}
    save_file(tensors, folder / "model-00001-of-00002.safetensors")
    write_index(folder, dict.fromkeys("bd", "model-00001-of-00002.safetensors"))
    ahead = dict(SafetensorsFiles(folder).read_ahead(Device("cpu"), torch.float32, 64))
    assert {name: tensor[-1].item() for name, tensor in ahead.items()} == {"b": 1.0, "d": 3.0}


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 40), min_size=1, max_size=12),
    gaps=st.lists(st.booleans(), min_size=12, max_size=12),
    chunk_bytes=st.integers(1, 50),
    num_readers=st.integers(1, 3),
)
def test_any_regions(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], gaps: list[bool], chunk_bytes: int, num_readers: int
) -> None:
    path = tmp_path_factory.mktemp("ring") / "file"
    content = bytes(range(256)) * 4
    path.write_bytes(content)
    regions, offset = [], 3
    for i, size in enumerate(sizes):
        offset += 5 * gaps[i]
        regions.append(Region(str(i), path, offset, torch.uint8, (size,)))
        offset += size
    got = list(read_ahead(regions, Device("cpu"), chunk_bytes, num_readers))
    assert [name for name, _ in got] == [region.name for region in regions]
    for (_, tensor), region in zip(got, regions, strict=True):
        assert bytes(tensor.tolist()) == content[region.offset : region.offset + region.num_bytes]


class CountingDevice(Device):
    """Records which threads waited for a queued copy."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.waited: list[str] = []

    def event(self) -> Event:
        device = self

        class Waiting(Event):
            is_recorded = False

            def record(self) -> None:
                self.is_recorded = True

            def wait(self) -> None:
                if self.is_recorded:
                    device.waited.append(threading.current_thread().name)

        return Waiting()


def test_a_reader_waits_for_its_buffer_and_nobody_else_does(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(100))
    device = CountingDevice()
    list(read_ahead([Region("a", path, 0, torch.uint8, (100,))], device, 10, 2))
    assert len(device.waited) == 10 - 4, "four buffers are new, every other use of one is waited for"
    assert all(name.startswith("weights") for name in device.waited)


def test_a_file_that_shrinks_or_goes_away_is_named(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "m")
    path = folder / "model.safetensors"
    save_file({"a": torch.ones(1000), "b": torch.ones(1000)}, path)
    regions = [Region("a", path, 100, torch.uint8, (10_000,))]
    with pytest.raises(ConfigError, match=r"model\.safetensors has become shorter"):
        list(read_ahead(regions, Device("cpu"), 512))
    path.unlink()
    with pytest.raises(ConfigError, match=r"cannot read .*model\.safetensors"):
        list(read_ahead(regions, Device("cpu"), 512))


def test_a_caller_that_stops_early_leaves_no_thread_behind(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(10_000))
    tensors = read_ahead([Region(str(i), path, i * 100, torch.uint8, (100,)) for i in range(100)], Device("cpu"), 64)
    next(tensors)
    assert any(thread.name.startswith("weights") for thread in threading.enumerate())
    tensors.close()  # type: ignore[attr-defined]
    assert not any(thread.name.startswith("weights") for thread in threading.enumerate())


def test_the_host_holds_the_ring_and_no_more(tmp_path: Path) -> None:
    """256 MiB of weights through a ring of 8 × 2 MiB, one tensor of 8 MiB at a time."""
    folder = model_folder(tmp_path / "m")
    tensors = {f"t{i}": torch.full((1 << 22,), float(i % 8), dtype=torch.bfloat16) for i in range(32)}
    save_file(tensors, folder / "model.safetensors")
    program = (
        "import resource, sys, torch; from pathlib import Path\n"
        "from octavo.device import Device\n"
        "from octavo.weights.formats.safetensors_files import SafetensorsFiles\n"
        "peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10\n"
        "before = peak()\n"
        "for name, tensor in SafetensorsFiles(Path(sys.argv[1])).read_ahead(Device('cpu'), torch.bfloat16, 2 << 20):\n"
        "    assert tensor[-1] == int(name[1:]) % 8\n"
        "print(peak() - before)\n"
    )
    ran = subprocess.run([sys.executable, "-c", program, str(folder)], check=True, capture_output=True, text=True)
    grown = int(ran.stdout)  # MiB
    assert grown < 16 + 2 * 8 + 16, grown
