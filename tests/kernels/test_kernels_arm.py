"""The native kernels for aarch64: calls recorded on this machine are made again by an emulated one, with every instruction set.
Products, samples and stored weights give the same bits; other numbers are as near to those of the portable set as AVX2's.

`make test-arm` compiles the kernels for aarch64 (once, two minutes) and runs these tests. They need a compiler for aarch64 and
qemu (Debian: g++-aarch64-linux-gnu, qemu-user)."""

import functools
import os
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.kernels.cpu import build, library
from octavo.kernels.cpu.attention import attend, new_pages, qk_norm_rope_store
from octavo.kernels.cpu.elementwise import cap, rms_norm, rms_norm_add, rms_norm_prepare, silu_mul
from octavo.kernels.cpu.experts import ExpertChoice, ExpertWeights
from octavo.kernels.cpu.library import GGUF_KINDS, Kind, PackedWeight, Threads, pack, pack_quantised, prepare, product
from octavo.kernels.cpu.native import Native
from octavo.kernels.cpu.ops import Step
from octavo.kernels.cpu.sampling import choose, fill_uniforms, new_records
from octavo.kernels.cpu.tape import Tape
from tests.kernels.cpu_product_model import random_quants
from tests.kernels.native_calls import WITH_RESULT, WITHOUT_RESULT, Recorder, replayed
from tests.kernels.test_kernels_cpu_step import HIDDEN, Little, inputs_of

pytestmark = pytest.mark.arm

COMPILER, QEMU, SYSROOT = "aarch64-linux-gnu-g++", "qemu-aarch64", Path("/usr/aarch64-linux-gnu")
CPUS = {"cortex-a72": "neon", "neoverse-n1": "dotprod", "max": "i8mm"}  # and the instruction set that each gets
CASES = [("cortex-a72", "portable"), *CPUS.items()]


@functools.cache
def arm_library() -> Path | str:
    """The kernels compiled for aarch64, or why there are none."""
    for tool in (COMPILER, QEMU):
        if not shutil.which(tool):
            return f"{tool} is not on PATH"
    folder = build.cache_folder() / "kernels"
    if found := build.find_library(folder, is_ours=True, machine="aarch64"):
        return found
    if not os.environ.get("OCTAVO_TEST_ARM"):
        return "these kernels are not compiled for aarch64: make test-arm does it"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CXX", COMPILER)
        return build.make_library(folder, lambda num_done, num_all: None, "aarch64")


@pytest.fixture(scope="module")
def replayer(tmp_path_factory) -> Path:
    """The program that makes recorded calls, for aarch64."""
    made = arm_library()
    if isinstance(made, str):
        pytest.skip(made)
    program = tmp_path_factory.mktemp("arm") / "replay"
    source = Path(__file__).with_name("replay_native_calls.cpp")
    command = [COMPILER, "-std=c++17", "-O1", "-Wall", f"-I{build.FOLDER}", str(source), str(made), "-o", str(program)]
    subprocess.run([*command, f"-Wl,-rpath,{made.parent}"], check=True)
    return program


def emulated(cpu: str, program: Path) -> list[str]:
    return [QEMU, "-cpu", cpu, "-L", str(SYSROOT), str(program)]


@pytest.fixture(scope="module")
def threads():
    made = Threads(2)
    yield made
    made.close()


@pytest.mark.parametrize("cpu", CPUS)
def test_a_cpu_gets_the_best_instruction_set_it_has(replayer, cpu):
    ran = subprocess.run(emulated(cpu, replayer), capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == CPUS[cpu]


@pytest.mark.parametrize(("cpu", "isa"), [("cortex-a72", "dotprod"), ("neoverse-n1", "i8mm"), ("max", "avx2")])
def test_a_set_that_a_cpu_lacks_is_refused(replayer, tmp_path, threads, cpu, isa):
    with pytest.raises(AssertionError, match=f"this CPU has no {isa}"):
        replayed(emulated(cpu, replayer), Recorder(threads), isa, tmp_path)


# ── what is recorded ────────────────────────────────────────────────────────────────────────────────


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def activations(num_rows: int, depth: int) -> torch.Tensor:
    """Rows with outliers, an empty group and a tiny one; of many rows, one has a NaN and one an infinity."""
    x = randn(num_rows, depth)
    x[:, ::50] *= 60
    x[0, :16] = 0
    x[-1, -16:] *= 1e-20
    if num_rows > 5:
        x[2, 7 % depth], x[4, depth - 1] = torch.nan, torch.inf
    return x


def record_products(recorder: Recorder) -> None:
    """All kinds, all heights of a tile, all finishes, columns that do not fill a panel."""
    types = {kind: type for type, kind in GGUF_KINDS.items()}
    weights: dict[Kind, PackedWeight] = {}
    for kind in Kind:
        if kind.is_decoded:
            stored = weights[kind.stored_as]
            weights[kind] = PackedWeight(stored.memory, kind, stored.num_columns, stored.depth)
            continue
        rows = random_quants(types[kind], 64, 512, seed=kind) if kind.is_packed else randn(64, 512, seed=kind)
        weights[kind] = pack(recorder.threads, rows.bfloat16() if kind == Kind.BFLOAT16 else rows, kind)
        recorder.result(f"packed {kind.name}", weights[kind].memory)
        recorder.result(f"columns {kind.name}", weights[kind].columns(torch.tensor([63, 0, 17])))
    bias = randn(64)
    for kind, weight in weights.items():
        for num_rows in (1, 2, 3, 4, 7):
            x = prepare(recorder.threads, activations(num_rows, 512), kind)
            y = product(recorder.threads, x, weight, torch.empty(num_rows, 64))
            recorder.result(f"{num_rows} rows, {kind.name}", y)
        x = prepare(recorder.threads, activations(3, 512), kind)
        for activation in ("silu", "gelu_tanh"):
            y = product(recorder.threads, x, weight, torch.empty(3, 32), gated=True, activation=activation)
            recorder.result(f"gated by {activation}, {kind.name}", y)
    x = prepare(recorder.threads, activations(3, 512), Kind.FLOAT32)
    for activation in ("gelu", "gelu_tanh", "relu"):
        y = product(recorder.threads, x, weights[Kind.FLOAT32], torch.empty(3, 64), bias=bias, activation=activation)
        recorder.result(f"bias and {activation}", y)
    y = randn(3, 64)
    recorder.result("residual", product(recorder.threads, x, weights[Kind.FLOAT32], y, bias=bias, residual=y))
    ragged = pack(recorder.threads, randn(37, 50), Kind.FLOAT32)
    x = prepare(recorder.threads, randn(5, 50), Kind.FLOAT32)
    recorder.result("37 columns of 50", product(recorder.threads, x, ragged, torch.empty(5, 37)))
    for kind in (Kind.CODES8, Kind.CODES4, Kind.CODES4_MINIMUM):
        packed = pack_quantised(recorder.threads, randn(40, 256), kind)
        recorder.result(f"rounded to {kind.name}", packed.memory)
        x = prepare(recorder.threads, randn(6, 256), kind)
        first, second = torch.empty(6, 40), torch.empty(6, 40)
        calls = [library.product_call(x, packed, y) for y in (first, second)]
        library.products(recorder.threads, calls)
        recorder.result(f"two products, {kind.name}", first)
        recorder.result(f"the second of two products, {kind.name}", second)
    library.read_all(recorder.threads, torch.arange(3 * 4096, dtype=torch.int32))


def record_elementwise(recorder: Recorder) -> None:
    for size in (1, 7, 64, 101):
        x, weight = activations(6, size), randn(size)
        recorder.result(f"norm of {size}", rms_norm(recorder.threads, x, weight, 1e-5), is_exact=False)
        y = randn(6, size, seed=1)
        rms_norm_add(recorder.threads, x, weight, 1e-5, y)
        recorder.result(f"norm of {size}, added", y, is_exact=False)
        gated = torch.cat((x, randn(6, size, seed=2)), dim=1)
        recorder.result(f"gate of {size}", silu_mul(recorder.threads, gated), is_exact=False)
        capped = 40 * randn(6, size, seed=3)
        capped[0, 0], capped[-1, -1] = torch.nan, torch.inf
        cap(recorder.threads, capped, 30.0)
        recorder.result(f"cap of {size}", capped, is_exact=False)
    x = activations(5, 96)
    recorder.result("codes", rms_norm_prepare(recorder.threads, x, None, 0.0, Kind.CODES8))
    recorder.result("slices", rms_norm_prepare(recorder.threads, x[:, :90], None, 0.0, Kind.FLOAT32))
    normed = rms_norm_prepare(recorder.threads, x, randn(96), 1e-5, Kind.FLOAT32)
    recorder.result("normed slices", normed.view(torch.float32), is_exact=False)


SHAPES = [  # heads, KV heads, head size; page size, window, soft cap
    ((1, 1, 8), 16, 0, 0.0), ((9, 3, 64), 16, 0, 0.0), ((6, 2, 40), 16, 30, 20.0), ((14, 2, 30), 5, 0, 5.0),
    ((30, 1, 32), 20, 50, 0.0),
]  # fmt: skip
ROWS = [(70, 1), (130, 1), (0, 1), (5, 9), (40, 30)]  # tokens before the step, and in it


def record_attention(recorder: Recorder) -> None:
    for (num_heads, num_kv_heads, size), page_size, window, softcap in SHAPES:
        for dtype in (torch.float32, torch.float16, torch.int8):
            rng = random.Random(size)
            num_pages = sum(-(-(before + count) // page_size) for before, count in ROWS)
            free = rng.sample(range(num_pages), num_pages)
            tables = [[free.pop() for _ in range(-(-(before + count) // page_size))] for before, count in ROWS]
            width = max(map(len, tables))
            table = torch.tensor([row + [0] * (width - len(row)) for row in tables], dtype=torch.int32)
            pages = new_pages(num_pages, num_kv_heads, size, page_size, dtype)
            norms = (randn(size).abs(), randn(size, seed=1).abs())
            for is_last in (False, True):
                spans = [range(before, before + count) if is_last else range(before) for before, count in ROWS]
                positions = torch.tensor([p for span in spans for p in span])
                slots = torch.tensor(
                    [
                        tables[row][p // page_size] * page_size + p % page_size
                        for row, span in enumerate(spans)
                        for p in span
                    ]
                )
                heads = randn(len(positions), num_heads + 2 * num_kv_heads, size)
                heads[3, num_heads:, 1] = torch.nan
                heads[4, num_heads:, 2] = -torch.inf
                angles = positions[:, None].float() * torch.linspace(0.1, 1.0, size // 2)
                rotation = torch.stack((angles.cos(), angles.sin()), dim=-1)
                # Without a norm, stored codes of 8 bits are the same everywhere: a norm's last bit may move one of them.
                own_norms = norms if dtype == torch.float32 else None
                qk_norm_rope_store(recorder.threads, heads, num_heads, pages, slots, rotation, own_norms, 1e-5)
            name = f"{num_heads} heads of {size}, pages of {page_size} {dtype}"
            start = torch.tensor([0, *(count for _, count in ROWS)]).cumsum(0).int()
            lens = torch.tensor([before + count for before, count in ROWS], dtype=torch.int32)
            sinks = randn(num_heads) if window else None
            output = attend(
                recorder.threads, heads, num_heads, pages, start, lens, table, size**-0.5, window, softcap, sinks=sinks
            )
            recorder.result(f"attention, {name}", output, is_exact=False)


def record_samples(recorder: Recorder) -> None:
    rng = np.random.default_rng(5)
    for size in (1, 40, 257, 3000):
        logits = torch.from_numpy(rng.normal(0, 3, (24, size)).astype(np.float32))
        logits[1] = logits[1].round()
        logits[2, :: max(1, size // 7)] = torch.nan
        logits[3, -1] = torch.inf
        logits[4] = -torch.inf
        records = new_records(len(logits))
        fill_seeds = np.arange(len(logits)), np.arange(len(logits)) + 100
        recorder.know(records)
        for column in fill_seeds:
            recorder.know(column)
        fill_uniforms(records, *fill_seeds)
        records["temperature"], records["repetition"] = rng.choice([0.01, 0.7, 1.0, 5.0], len(logits)), 1.0
        records["top_k"] = rng.choice([0, 1, 5, size // 2], len(logits))
        records["top_p"] = rng.choice([1.0, 0.99, 0.5, 0.01], len(logits))
        records["min_p"] = rng.choice([0.0, 0.05], len(logits))
        records["is_greedy"] = rng.random(len(logits)) < 0.2
        tokens = rng.integers(0, size, 30).astype(np.int32)
        mask = rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint64).astype(np.uint32)
        recorder.know(tokens)
        recorder.know(mask)
        records["tokens"][::3], records["len"], records["prompt_len"] = tokens.ctypes.data, 30, 12
        records["repetition"][::3], records["frequency"][::3], records["presence"][::3] = 1.3, 0.2, 0.1
        records["mask"][::4] = mask.ctypes.data
        if size == 3000:  # a token of mass 2⁴⁰ and many of 0.6, which count 1 each: the last digits of the sums decide
            logits[5] = -28.2367
            logits[5, 0] = 0.0
            records[5] = 0
            for name in ("temperature", "repetition", "top_p"):
                records[name][5] = 1.0
            records["uniform"][5] = 1 - 1000 / 2**40
        chosen = torch.full((len(logits),), -1)
        choose(recorder.threads, logits, records, chosen)
        recorder.result(f"tokens of {size}", chosen)
        recorder.result(f"penalised logits of {size}", logits)


def record_steps(recorder: Recorder) -> None:
    """A model of one layer as a tape, and a layer of experts."""
    kernels = Native(1)
    kernels.threads.close()
    kernels.threads = recorder.threads
    for kind in (Kind.FLOAT32, Kind.CODES4_MINIMUM):
        model, tape = Little(kernels, kind), Tape(max_tokens=24, max_samples=8)
        blank = {name: torch.zeros(24, dtype=torch.int64) for name in ("input_ids", "positions", "slots")}
        blank["sample_at"] = torch.zeros(tape.max_samples, dtype=torch.int64)
        with kernels.recording(tape, blank):
            logits = model.forward(blank, Step(24, 8, 1, *(blank[name].data_ptr() for name in blank)))
        (logits,) = tape.finish([logits])
        for counts in ([14, 3], [1] * 8, [2]):
            _inputs, step, _kept = inputs_of(counts, random.Random(3))
            tape.run(kernels.threads, step)
            recorder.result(f"logits of {counts}, {kind.name}", logits[: len(counts)], is_exact=False)
    for kind in (Kind.FLOAT32, Kind.CODES8):
        make = pack if kind == Kind.FLOAT32 else pack_quantised
        gate_up = [make(recorder.threads, randn(2 * 32, HIDDEN, seed=i) / 8, kind) for i in range(4)]
        down = [make(recorder.threads, randn(HIDDEN, 32, seed=9 + i) / 6, kind) for i in range(4)]
        for choice in (ExpertChoice(2, True, 1.0, 0.0, 0.0), ExpertChoice(3, False, 1.7, 2.0, 1.0)):
            weights = ExpertWeights(gate_up, down, randn(4, 64), randn(4, HIDDEN, seed=1), choice)
            y = kernels.experts(randn(9, HIDDEN), randn(9, 4), weights, randn(9, HIDDEN, seed=5))
            recorder.result(f"{choice.num_chosen} experts, {kind.name}", y, is_exact=False)


SCENES = [record_products, record_elementwise, record_attention, record_samples, record_steps]


@pytest.fixture(scope="module")
def recordings(threads) -> dict[str, Recorder]:
    """The calls by instruction set of this machine. Those of the portable one are made again."""
    before, made = library.isa(), {}
    try:
        for isa in ("portable", "avx2"):
            if not library.use_isa(isa):
                pytest.skip(f"this CPU has no {isa}, with which numbers are compared")
            made[isa] = Recorder(threads)
            with pytest.MonkeyPatch.context() as patched, made[isa].recording(patched):
                for scene in SCENES:
                    scene(made[isa])
    finally:
        library.use_isa(before)
    return made


def test_every_call_is_recorded(recordings):
    assert recordings["portable"].called == WITH_RESULT | WITHOUT_RESULT


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of numbers; NaN is NaN, whatever its sign and payload."""
    if not tensor.is_floating_point():
        return tensor
    return tensor.nan_to_num(nan=1.5e38, posinf=torch.inf, neginf=-torch.inf).view(torch.int32)


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of finite numbers, the largest difference; the others must be equal."""
    is_finite = expected.isfinite()
    torch.testing.assert_close(found[~is_finite], expected[~is_finite], rtol=0, atol=0, equal_nan=True)
    return float((found[is_finite] - expected[is_finite]).abs().max()) if is_finite.any() else 0.0


@pytest.mark.parametrize(("cpu", "isa"), CASES)
def test_calls_give_the_same_on_arm(replayer, recordings, tmp_path, cpu, isa):
    given = replayed(emulated(cpu, replayer), recordings["portable"], isa, tmp_path)
    results = zip(recordings["portable"].results, recordings["avx2"].results, given, strict=True)
    for result, by_avx2, found in results:
        expected, near = result.expected, by_avx2.expected
        assert result.name == by_avx2.name
        if isinstance(expected, int):
            assert found == expected, result.name
        elif result.is_exact:
            assert torch.equal(bits_of(found), bits_of(expected)), result.name
        else:
            largest = expected[expected.isfinite()].abs().max() if expected.isfinite().any() else torch.tensor(0.0)
            allowed = 2 * distance(near, expected) + 4 * torch.finfo(torch.float32).eps * float(largest)
            assert distance(found, expected) <= allowed, result.name
