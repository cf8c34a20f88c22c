"""Launches that bypass Triton: the same kernel, grid, stream and arguments reach the driver as through Triton itself.
No GPU is used: kernels are compiled for one, and a driver that only records its arguments replaces it."""

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.kernels.triton.attention import paged_prefill, paged_prefill_hopper, qk_norm_rope_store
from octavo.kernels.triton.elementwise import activation, norm, rotation
from octavo.kernels.triton.gemm import gated_hopper
from octavo.kernels.triton.gemm.gated import TILES, choose_tile
from octavo.kernels.triton.runtime import launch
from octavo.kernels.triton.runtime.launch import Descriptors, Launcher
from octavo.kernels.triton.runtime.warmup import warmup

# Compiled kernels keep the driver that loaded them: this one must not reach other tests of a process with a GPU.
IN_PROCESS = os.environ.get("OCTAVO_TEST_LAUNCHES") == "1"
of_process = pytest.mark.skipif(not IN_PROCESS, reason="test_in_a_process_of_its_own runs it")
LAUNCHERS = [
    norm._launch_rms_norm, activation._launch_gate_mul, qk_norm_rope_store._launch_qk_norm_rope_store, rotation._launch_rotation,
    paged_prefill._launch_prefill, paged_prefill_hopper._launch_prefill,
    gated_hopper._launch_product,
]  # fmt: skip


class Recorder(nvidia.CudaLauncher):
    """The Python part of Triton's launcher; it records the arguments that would go to C."""

    calls: ClassVar[list[tuple]] = []

    def __init__(self, src, metadata):
        constants = (metadata.global_scratch_size, metadata.profile_scratch_size)
        assert constants == (0, 0)
        self.num_ctas = metadata.num_ctas
        self.global_scratch_size = self.profile_scratch_size = 0
        self.global_scratch_align = self.profile_scratch_align = 1
        self.launch_cooperative_grid, self.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        meta = getattr(metadata, "tensordesc_meta", None)
        self.launch = nvidia.wrap_handle_tensordesc(lambda *args: self.calls.append(args), dict(src.signature), meta)


class Driver:
    """A GPU of compute capability 9.0 that loads binaries and never runs them."""

    launcher_cls = Recorder

    def __init__(self):
        self.device, self.stream, self.num_loaded = 0, 70, 0
        self.utils = SimpleNamespace(
            load_binary=self.load_binary,
            get_device_properties=lambda device: {"max_shared_mem": 232448},
            fill_tma_descriptor=lambda *args: ("map", *(tuple(x) if isinstance(x, list) else x for x in args)),
        )

    def load_binary(self, name, kernel, shared, device):
        self.num_loaded += 1
        return object(), 1000 + self.num_loaded, 32, 0, 1024

    def get_current_device(self):
        return self.device

    def get_current_stream(self, device):
        return self.stream + device

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


@pytest.fixture
def gpu():
    """A driver that has loaded nothing yet."""
    for launcher in LAUNCHERS:
        launcher._loaded.clear()
        launcher.kernel.device_caches.clear()
    _probe.device_caches.clear()
    before = driver._active
    driver.set_active(Driver())
    Recorder.calls.clear()
    yield driver.active
    driver._active = before


def same(passed, by_triton) -> bool:
    """Return whether the arguments are the same. A tensor on a GPU is passed as its address, which Triton reads from it."""
    if isinstance(by_triton, torch.Tensor):
        address = passed.data_ptr() if isinstance(passed, torch.Tensor) else passed
        return address == by_triton.data_ptr() and (by_triton.is_cuda or isinstance(passed, torch.Tensor))
    return type(passed) is type(by_triton) and passed == by_triton


def last_call() -> list:
    """Return the last launch's arguments to C, without those of the launch hooks, which these tests do not use."""
    call = list(Recorder.calls.pop())
    assert not Recorder.calls
    return call[:10] + call[13:]


def check(monkeypatch, call) -> None:
    """`call` launches one kernel: three times, the second and third bypassing Triton, then through Triton alone."""
    run, direct = JITFunction.run, []
    for _ in range(3):
        call()
        direct.append(last_call())
    for launcher in LAUNCHERS:
        monkeypatch.setattr(launcher, "_is_direct", False)
    call()
    expected = last_call()
    monkeypatch.undo()
    assert JITFunction.run is run
    for arguments in direct:
        assert len(arguments) == len(expected)
        assert all(map(same, arguments, expected)), (arguments, expected)
    num_asked = [sum(isinstance(x, torch.Tensor) and x.is_cuda for x in arguments) for arguments in direct]
    assert num_asked[1:] == [0, 0]


@triton.jit(do_not_specialize=["free"])
def _probe(x, y, number, free, factor, SIZE: tl.constexpr, FLAG: tl.constexpr):
    at = tl.arange(0, SIZE)
    if y is not None:
        tl.store(y + at * number, tl.load(x + at).to(tl.float32) * factor + free)


def is_chosen_by_triton(launcher: Launcher, args: tuple, constants: tuple = (16, False), **options) -> bool:
    """Launch, and check that Triton would have chosen the same binary."""
    launcher((1, 1, 1), args, constants, options)
    function = Recorder.calls.pop()[4]
    return function == launcher.kernel[(1,)](*args, *constants, **options).function


@of_process
def test_takes_the_binary_that_triton_takes(gpu):
    launcher = Launcher(_probe)
    half, single = torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64)
    # Most differ from their neighbours in one property that Triton specialises on; each occurs once.
    numbers = (1, 2, 16, 17, 32, 0, -16, -5, 2**31 - 1, 2**31, 2**31 + 16, -(2**31), -(2**31) - 1, 2**62, True)
    kinds = [(half, single, number, 3, 0.5) for number in numbers]
    kinds += [(half, single, 2, free, 0.5) for free in (1, 16, 2**31, 2**40)]
    kinds += [(half[1:], single, 2, 3, 0.5), (half, single[1:], 2, 3, 0.5), (half[8:], single, 2, 3, 0.5)]
    kinds += [(half, None, 2, 3, 0.5), (single, single, 2, 3, 0.5), (single, half, 2, 3, 0.5)]
    kinds += [(half, single, 2, 3, 1), (half, single, 2, 3, 2), (torch.nn.Parameter(half), single, 2, 3, 1e30)]
    functions = set()
    for _ in range(2):
        for args in kinds:
            assert is_chosen_by_triton(launcher, args), args[2:]
            functions.add(Recorder.calls.pop()[4])
    assert len(functions) == gpu.num_loaded > 12


@of_process
def test_tells_constants_and_options_apart(gpu):
    launcher = Launcher(_probe)
    x, y = torch.zeros(64), torch.zeros(64)
    early = {"num_warps": 2, "launch_pdl": True}
    kinds = [
        ((16, False), {}),
        ((32, False), {}),
        ((16, "x"), {}),
        ((16, False), {"num_warps": 2}),
        ((16, False), early),
    ]
    for _ in range(2):
        for constants, options in kinds:
            assert is_chosen_by_triton(launcher, (x, y, 4, 4, 1.0), constants, **options)
            assert Recorder.calls.pop()[6] == options.get("launch_pdl", False)
    assert gpu.num_loaded == len(kinds)


@of_process
def test_goes_to_the_current_stream_of_the_current_device(gpu):
    launcher = Launcher(_probe)
    x, y = torch.zeros(64), torch.zeros(64)
    seen = []
    for device, stream in ((0, 70), (0, 80), (1, 80), (0, 90), (1, 70)):
        gpu.device, gpu.stream = device, stream
        launcher((3, 2, 1), (x, y, 4, 4, 1.0), (16, False), {})
        call = last_call()
        assert call[:4] == [3, 2, 1, stream + device]
        seen.append((device, call[4]))
    # Each device has loaded the kernel once, and runs its own.
    assert len(set(seen)) == len({function for _, function in seen}) == 2


@of_process
def test_repeated_launches_do_not_go_through_triton(gpu, monkeypatch):
    launcher = Launcher(_probe)
    x, y = torch.zeros(64), torch.zeros(64)
    launcher((1, 1, 1), (x, y, 4, 4, 1.0), (16, False), {})
    monkeypatch.setattr(JITFunction, "__getitem__", None)
    launcher((2, 3, 4), (x, y, 8, 7, 2.0), (16, False), {})
    assert [call[:3] for call in Recorder.calls] == [(1, 1, 1), (2, 3, 4)]
    monkeypatch.setattr(launcher, "_is_direct", False)  # what OCTAVO_PLAIN_LAUNCH sets
    with pytest.raises(TypeError):
        launcher((2, 1, 1), (x, y, 8, 7, 2.0), (16, False), {})


@of_process
def test_a_rehearsal_launches_nothing(gpu):
    launcher = Launcher(_probe)
    x, y = torch.zeros(64), torch.zeros(64)
    launcher((1, 1, 1), (x, y, 4, 4, 1.0), (16, False), {})
    Recorder.calls.clear()
    with warmup(2):
        launcher((1, 1, 1), (x, y, 4, 4, 1.0), (16, False), {})  # launched before
        launcher((1, 1, 1), (x, y, 4, 4, 1.0), (128, False), {})  # not launched before
    assert not Recorder.calls
    for _ in range(2):
        assert is_chosen_by_triton(launcher, (x, y, 4, 4, 1.0), (128, False))
        Recorder.calls.clear()


@of_process
def test_listeners_are_notified(gpu):
    launcher = Launcher(_probe)
    x, y = torch.zeros(64), torch.zeros(64)
    names = []

    def tell(metadata):
        names.append(metadata.get()["name"])

    launcher((1, 1, 1), (x, y, 4, 4, 1.0), (16, False), {})
    assert Recorder.calls[-1][11:13] != (None, None)  # Triton's own launch
    launcher((1, 1, 1), (x, y, 4, 4, 1.0), (16, False), {})
    assert Recorder.calls[-1][10:13] == (None, None, None)
    triton.knobs.runtime.launch_enter_hook.add(tell)
    try:
        launcher((1, 1, 1), (x, y, 4, 4, 1.0), (16, False), {})
        metadata, enter = Recorder.calls[-1][10:12]
        enter(metadata)  # as C does
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(tell)
    assert names == ["_probe"]


@of_process
@pytest.mark.parametrize("num_rows", [1, 7, 300])
@pytest.mark.parametrize("pdl", [False, True])
def test_the_kernels_of_a_layer_get_the_same_as_through_triton(gpu, monkeypatch, num_rows, pdl):
    monkeypatch.setattr(torch.Tensor, "is_cuda", pdl)
    for room in (norm, activation, qk_norm_rope_store):
        monkeypatch.setattr(room, "starts_early", lambda device: True)  # without a GPU no launch starts early
    x, weight = torch.zeros(num_rows, 1000, dtype=torch.bfloat16), torch.ones(1000, dtype=torch.bfloat16)
    out, narrow = torch.empty_like(x), torch.empty(num_rows, 496, dtype=torch.bfloat16)
    gate_up, heads = torch.zeros(num_rows, 192), torch.zeros(num_rows, 8, 64, dtype=torch.bfloat16)
    pages, slots = torch.zeros(3, 2, 2, 16, 64, dtype=torch.bfloat16), torch.zeros(num_rows, dtype=torch.int64)
    factors, scale = torch.zeros(num_rows, 32, 2), torch.ones(64, dtype=torch.bfloat16)
    frequencies = torch.ones(32)
    made = torch.empty(num_rows, 1000)
    monkeypatch.setattr(torch, "empty", lambda shape, **_: made)  # outputs have the same address each time
    monkeypatch.setattr(torch, "empty_like", lambda x, **_: made)
    with pytest.MonkeyPatch.context() as inner:
        check(inner, lambda: norm.rms_norm(x, weight, 1e-6, out, pdl=pdl))
        check(inner, lambda: norm.rms_norm(x[:, 8:504], weight[:496], 1e-6, narrow, pdl=pdl))
        check(inner, lambda: activation.gate_mul(gate_up, "silu", pdl=pdl))
        check(
            inner,
            lambda: qk_norm_rope_store.qk_norm_rope_store(
                heads, 4, 2, factors, scale, None, 1e-6, pages, slots, pdl=pdl
            ),
        )
        check(inner, lambda: rotation.rotation(slots, frequencies, 1.0))


@of_process
@pytest.mark.parametrize("has_no_prefix", [False, True])
@pytest.mark.parametrize("is_specialised", [False, True])
def test_prefill_gets_the_same_as_through_triton(gpu, monkeypatch, has_no_prefix, is_specialised):
    monkeypatch.setattr(paged_prefill_hopper, "_num_processors", lambda device: 132)
    pages, table = torch.zeros(3, 2, 2, 16, 64, dtype=torch.bfloat16), torch.zeros(4, 5, dtype=torch.int32)
    tile = paged_prefill.Tile(128, 128, 12, 2, True) if is_specialised else paged_prefill.Tile(64, 64, 4, 2)
    maps = []
    for num_tokens in (1, 40, 133):
        heads, out = torch.zeros(num_tokens, 8, 64, dtype=torch.bfloat16), torch.zeros(num_tokens, 4 * 64).bfloat16()
        tiles = torch.zeros(num_tokens, 4, dtype=torch.int32)

        def call(heads=heads, tiles=tiles, out=out):
            paged_prefill.paged_prefill(heads, pages, table, tiles, out, tile, scale=0.125, has_no_prefix=has_no_prefix)
            maps.append([x[1] for x in Recorder.calls[-1] if isinstance(x, tuple) and x[:1] == ("map",)])

        with pytest.MonkeyPatch.context() as inner:
            check(inner, call)
        base = heads.data_ptr()
        expected = (
            [base, base if has_no_prefix else pages.data_ptr()] if is_specialised else [base] if has_no_prefix else []
        )
        assert maps[-2:] == [expected, expected]


@of_process
def test_gated_products_get_the_same_as_through_triton(gpu, monkeypatch):
    monkeypatch.setattr(gated_hopper, "starts_early", lambda device: True)
    weight = torch.zeros(2 * 3072, 1024, dtype=torch.bfloat16)
    for num_rows in (33, 64, 130, 256, 500, 1024, 2000):
        x, made = torch.zeros(num_rows, 1024).bfloat16(), torch.zeros(num_rows, 3072).bfloat16()
        tile = choose_tile(num_rows, 3072, 132)

        def call(x=x, tile=tile):
            gated_hopper.product(x, weight, "silu", tile, 132, True)

        with pytest.MonkeyPatch.context() as inner, monkeypatch.context() as patched:
            patched.setattr(
                torch, "empty", lambda shape, made=made, **_: made
            )  # outputs have the same address each time
            check(inner, call)
    assert gpu.num_loaded <= len(TILES)  # one kernel serves all numbers of rows


def test_copied_descriptors_are_those_that_triton_makes():
    make = Descriptors(TensorDescriptor)
    tensors = [torch.zeros(rows, 4, 64, dtype=torch.bfloat16) for rows in (5, 9, 5)]
    described = [make(x, (x.shape[0], 256), (256, 1), (16, 64)) for x in tensors]
    for x, descriptor in zip(tensors, described, strict=True):
        expected = TensorDescriptor(x, [x.shape[0], 256], [256, 1], [16, 64])
        assert type(descriptor) is TensorDescriptor and descriptor.base is x
        assert {name: descriptor.__dict__[name] for name in expected.__dict__ if name != "base"} == {
            name: value for name, value in expected.__dict__.items() if name != "base"
        }
    assert described[0].kind is described[1].kind
    assert described[0].kind is not make(tensors[0], (5, 256), (256, 1), (8, 64)).kind
    assert described[0].kind is not make(tensors[0].half(), (5, 256), (256, 1), (16, 64)).kind
    with pytest.raises(AssertionError):
        make(tensors[1].view(-1)[1:], (8, 256), (256, 1), (16, 64))  # 2 bytes after a multiple of 16
    with pytest.raises(AssertionError):
        make(tensors[1], (0, 256), (256, 1), (16, 64))


def test_uses_the_inner_parts_of_the_triton_it_was_written_for():
    if triton.__version__.startswith("3.6."):
        assert launch._knows_triton()


@pytest.mark.parametrize("missing", ["native_specialize_impl", "getsource"])
def test_leaves_launches_to_a_triton_it_does_not_know(monkeypatch, missing):
    if missing == "getsource":
        monkeypatch.setattr(launch, "_LAST_STEPS", ("kernel.run(grid, stream)",))
    else:
        monkeypatch.delattr(launch.jit, missing)
    assert not launch._knows_triton()


def run_apart(code: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *code], env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.mark.skipif(IN_PROCESS, reason="is the process")
@pytest.mark.skipif(not launch._knows_triton(), reason="this Triton launches otherwise: nothing goes past it")
def test_in_a_process_of_its_own():
    code = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--noconftest", __file__]
    done = run_apart(code, TRITON_INTERPRET="0", OCTAVO_TEST_LAUNCHES="1")
    assert done.returncode == 0 and "passed" in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.skipif(IN_PROCESS, reason="is done in processes of its own")
def test_can_be_turned_off():
    code = ["-c", "from octavo.kernels.triton.runtime import launch; print(launch.IS_DIRECT)"]
    assert run_apart(code, OCTAVO_PLAIN_LAUNCH="1").stdout.strip() == "False"
    assert run_apart(code, OCTAVO_PLAIN_LAUNCH="0").stdout.strip() == str(launch._knows_triton())
