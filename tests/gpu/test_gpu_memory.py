"""On a GPU: measured memory can be allocated, other processes are recognised, swapping and streaming give the right bytes."""

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.device import Device, pick
from octavo.messages import DeviceMemory, PageMove
from octavo.weights.formats.dummy import dummy_tensors
from octavo.weights.formats.safetensors_files import SafetensorsFiles
from octavo.worker.memory.measure import measure
from octavo.worker.memory.page_count import GiB, MiB
from octavo.worker.pages import Pages

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> Iterator[Device]:
    torch.cuda.empty_cache()
    yield pick("cuda")
    torch.cuda.empty_cache()


# ── measuring ──


@contextlib.contextmanager
def another_process(num_bytes: int) -> Iterator[None]:
    """A process that holds num_bytes of the GPU's memory while the context is open."""
    program = (
        "import sys, torch\n"
        "held = torch.empty(int(sys.argv[1]), dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.synchronize(); print('held', flush=True); sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(num_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdin is not None
        assert process.stdout.readline() == "held\n"
        yield
        process.stdin.close()


class Steps:
    """Steps that take 256 KiB for each token and 2 MiB for each row, and leave a workspace behind."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._workspace: torch.Tensor | None = None

    def run(self, num_tokens: int, num_rows: int, is_greedy: bool) -> None:
        if self._workspace is None:
            self._workspace = self._take(32 * MiB)
        kept = self._take(num_tokens * 64 * 1024)
        for _ in range(3):  # one after the other, not at once
            self._take(num_tokens * 192 * 1024).fill_(1)
        self._take(num_rows * (MiB if is_greedy else 2 * MiB)).fill_(1)
        del kept

    def _take(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device.torch_device)


def measured(device: Device) -> DeviceMemory:
    steps = Steps(device)
    return measure(device, steps.run, 8192, 256, num_graphs=10)


def test_what_is_measured_is_what_is_taken_and_what_is_left_can_be(device: Device) -> None:
    weights = torch.empty(2 * GiB, dtype=torch.uint8, device=device.torch_device)
    memory = measured(device)
    assert memory.total == torch.cuda.mem_get_info()[1]
    # Whole segments count, which no step returns while it runs. 8192 tokens: 512 MiB kept and 1536 MiB beside it, three
    # times the same; a part of those serves the rows' 512 MiB. 256 tokens: 16 MiB kept and 48 MiB, which are too small for
    # the rows'. One token: small tensors share a segment of 2 MiB, larger ones up to 10 MiB one of 20 MiB.
    assert abs(memory.working - 2 * GiB) <= 20 * MiB, "the parts that do not overlap are not added up"
    assert abs(memory.working_rows - (16 + 48 + 512) * MiB) <= 20 * MiB
    assert memory.working_least <= (2 + 20) * MiB
    assert 2 * GiB <= memory.own < 3 * GiB + 512 * MiB
    pages = torch.empty(memory.for_pages, dtype=torch.uint8, device=device.torch_device)
    Steps(device).run(8192, 256, False)  # raises if there is not enough memory
    torch.cuda.synchronize()
    del pages, weights


def test_another_process_is_recognised(device: Device) -> None:
    alone = measured(device)
    with another_process(4 * GiB):
        beside = measured(device)
    # Its CUDA context counts too.
    assert 3 * GiB < beside.other - alone.other < 6 * GiB
    assert abs(beside.own - alone.own) < 512 * MiB
    assert alone.for_pages - beside.for_pages >= 4 * GiB


# ── swapping ──

NUM_PAGES, HOST_PAGES, LAYERS = 24, 16, 3
PAGE = (2, 2, 16, 64)  # keys and values, heads, tokens, values per token


def a_plan(rng: random.Random) -> list[PageMove]:
    plan = [PageMove("copy", rng.randrange(NUM_PAGES), rng.randrange(NUM_PAGES)) for _ in range(rng.randint(0, 3))]
    host = rng.sample(range(HOST_PAGES), rng.randint(0, HOST_PAGES))
    plan += [PageMove("out", rng.randrange(NUM_PAGES), page) for page in host]
    back = rng.sample(range(HOST_PAGES), rng.randint(0, HOST_PAGES))
    targets = rng.sample(range(NUM_PAGES), len(back))
    return plan + [PageMove("in", page, target) for page, target in zip(back, targets, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
@pytest.mark.parametrize("staged_pages", [1, 5, 1000])
def test_swapping_beside_steps_gives_the_same_bytes_as_one_after_the_other(
    device: Device, dtype: torch.dtype, staged_pages: int
) -> None:
    rng = random.Random(staged_pages)
    wanted = torch.randint(0, 256, (LAYERS, NUM_PAGES, *PAGE[:-1], PAGE[-1] * dtype.itemsize), dtype=torch.uint8)
    wanted_host = torch.zeros_like(wanted[:, :HOST_PAGES])
    layers = [layer.to(device.torch_device).view(dtype) for layer in wanted]
    store = Pages(layers, 0, device, HOST_PAGES, staged_pages * wanted[:, 0].numel())
    filled = [PageMove("out", page, page) for page in range(HOST_PAGES)]
    for plan in [filled, *(a_plan(rng) for _ in range(30))]:
        torch.cuda._sleep(rng.choice((1, 100_000, 1_000_000)))  # queued work runs ahead of the moves by varying times
        store.move(plan)
        for move in plan:
            source = wanted_host if move.kind == "in" else wanted
            target = wanted_host if move.kind == "out" else wanted
            target[:, move.target] = source[:, move.source]
        for page in rng.sample(range(NUM_PAGES), 8):  # the step writes where pages were moved from and to
            value = rng.randrange(256)
            wanted[:, page] = value
            for layer in layers:
                layer[page].view(torch.uint8).fill_(value)
    torch.cuda.synchronize()
    for layer, bits in zip(layers, wanted, strict=True):
        assert torch.equal(layer.view(torch.uint8).cpu(), bits)


def test_the_host_does_not_wait_for_a_swap(device: Device) -> None:
    layers = [torch.zeros(256, 2, 8, 16, 128, dtype=torch.bfloat16, device=device.torch_device) for _ in range(8)]
    store = Pages(layers, 0, device, 128)
    swap = [PageMove("out", page, page) for page in range(128)] + [PageMove("in", page, page) for page in range(128)]
    store.move(swap)  # first-time allocations are done
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)  # about a second of GPU time
    started = time.perf_counter()
    store.move(swap)
    returned = time.perf_counter() - started
    torch.cuda.synchronize()
    assert time.perf_counter() - started > 3 * returned, f"the moves took the host {returned:.3f} s"


# ── weights ──


def test_weights_arrive_whole_with_one_tensor_to_spare(device: Device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {f"t{i}": torch.randn(4096, 4096).to(torch.bfloat16) for i in range(8)}
    tensors |= {"norm": torch.randn(4096), "ids": torch.arange(1000), "empty": torch.zeros(0)}
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, tmp_path / "model.safetensors")
    files = SafetensorsFiles(tmp_path)
    kept = {name: torch.empty_like(t, dtype=torch.bfloat16, device=device.torch_device) for name, t in tensors.items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for name, tensor in files.tensors(device.torch_device, torch.bfloat16):
        kept[name].copy_(tensor)  # as a model's parameters are filled, without waiting
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= 2 * 4096 * 4096 * 2 + 4 * MiB
    for name, tensor in tensors.items():
        assert torch.equal(kept[name].cpu(), tensor.to(torch.bfloat16)), name


def test_dummy_weights_of_an_8b_model_take_well_under_two_seconds(device: Device) -> None:
    shapes: dict[str, tuple[int, ...]] = {"embed": (128256, 4096), "head": (128256, 4096)}
    for layer in range(32):
        sizes = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (4096,), (4096,))
        shapes |= {f"{layer}.{i}": size for i, size in enumerate(sizes)}
    next(dummy_tensors(shapes, device.torch_device, torch.bfloat16))
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _, tensor in dummy_tensors(shapes, device.torch_device, torch.bfloat16):
        assert tensor.is_cuda
    torch.cuda.synchronize()
    assert time.perf_counter() - started < 1.5


def test_dummy_weights_are_the_same_every_time(device: Device) -> None:
    shapes = {"a": (300, 70), "b": (300, 70)}
    one = dict(dummy_tensors(shapes, device.torch_device, torch.bfloat16))
    again = dict(dummy_tensors({"b": (300, 70)}, device.torch_device, torch.bfloat16))
    assert torch.equal(one["b"], again["b"]) and not torch.equal(one["a"], one["b"])
    assert 0.018 < one["a"].float().std().item() < 0.022
