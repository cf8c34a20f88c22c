"""Products on the CPU: exact against a numpy model of the same arithmetic; the same bits in any batch, on any threads."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.kernels.cpu import build, elementwise, library
from octavo.kernels.cpu.library import (
    GGUF_KINDS,
    Kind,
    PackedWeight,
    Threads,
    aligned,
    pack,
    pack_quantised,
    packed_bytes,
    prepare,
    product,
)
from octavo.weights.formats.gguf_tensors import dequantise
from tests.kernels import cpu_product_model as model
from tests.kernels.cpu_product_model import QUANTS, random_quants
from tests.native import ISAS

try:
    library.library()
except build.NoCompiler as error:  # nothing to test without a compiler
    pytest.skip(str(error), allow_module_level=True)

PACKED = list(GGUF_KINDS.values())
TYPES = {kind: type for type, kind in GGUF_KINDS.items()}


@pytest.fixture(scope="module")
def threads():
    pool = Threads(2)
    yield pool
    pool.close()


@pytest.fixture(params=ISAS)
def isa(request):
    before = library.isa()
    if not library.use_isa(request.param):
        pytest.skip(f"this CPU has no {request.param}")
    yield request.param
    library.use_isa(before)


def quants(kind: Kind, num_columns: int, depth: int, seed: int) -> torch.Tensor:
    return random_quants(TYPES[kind], num_columns, depth, seed)


def activations(num_rows: int, depth: int, seed: int) -> torch.Tensor:
    """Activations with outliers, an empty group and a tiny one."""
    x = torch.randn(num_rows, depth, generator=torch.Generator().manual_seed(seed))
    x[:, :: max(1, depth // 5)] *= 60
    x[0, :32] = 0
    x[-1, -32:] *= 1e-20
    return x


def run(threads: Threads, x: torch.Tensor, weight: PackedWeight, **options) -> torch.Tensor:
    width = weight.num_columns // 2 if options.get("gated") else weight.num_columns
    y = torch.full((len(x), width), float("nan"))
    if options.get("residual") is not None:
        y = options["residual"] = options["residual"].clone()  # in place, as in a layer
    return product(threads, prepare(threads, x, weight.kind), weight, y, **options)


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize(
    "shape", [(1, 16, 32), (1, 576, 576), (2, 33, 64), (7, 100, 160), (13, 960, 576), (64, 48, 1536)]
)
def test_packed_is_the_model_to_the_bit(threads, isa, kind, shape):
    num_rows, num_columns, depth = shape
    depth = depth if QUANTS[TYPES[kind]][0] == 32 else -(-depth // 256) * 256
    rows, x = quants(kind, num_columns, depth, seed=1), activations(num_rows, depth, seed=2)
    expected = model.product(x.numpy(), model.decode(rows.numpy(), TYPES[kind]))
    assert torch.equal(run(threads, x, pack(threads, rows, kind)), torch.from_numpy(expected))


@pytest.mark.parametrize("kind", PACKED)
def test_the_model_decodes_as_the_loader_does(kind):
    rows = quants(kind, 20, 512, seed=10)
    expected = dequantise(rows.flatten(), TYPES[kind]).view(20, 512)
    assert torch.equal(torch.from_numpy(model.decode(rows.numpy(), TYPES[kind]).weights()), expected)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [
        (Kind.CODES8, 8.5),
        (Kind.CODES4, 4.5),
        (Kind.CODES4_MINIMUM, 5),
        (Kind.CODES5, 5.5),
        (Kind.CODES5_MINIMUM, 6),
        (Kind.CODES4_NESTED, 4.625),
        (Kind.CODES5_NESTED, 5.625),
        (Kind.CODES6_NESTED, 6.5625),
        (Kind.CODES4_IQ4, 4.5),
        (Kind.CODES4_IQ4_NESTED, 4.3125),
        (Kind.CODES4_IQ2_NESTED, 4.3125),
        (Kind.CODES2_NESTED, 3.125),
        (Kind.BFLOAT16, 16),
    ],
)
def test_packed_takes_no_more_than_its_bits(kind, bits):
    assert library.library().octavo_packed_bytes(kind, 64, 2048) == 64 * 2048 * bits / 8


@pytest.mark.parametrize("kind", PACKED)
def test_packed_is_near_the_product_in_float(threads, kind):
    rows, x = quants(kind, 320, 768, seed=3), torch.randn(9, 768)
    weights = dequantise(rows.flatten(), TYPES[kind]).view(320, 768)
    expected = x.double() @ weights.double().T
    error = (run(threads, x, pack(threads, rows, kind)) - expected).norm() / expected.norm()
    assert error < 0.008


@pytest.mark.parametrize("shape", [(1, 16, 1), (1, 576, 576), (5, 33, 50), (13, 100, 160), (30, 96, 1536)])
def test_float_is_the_chain_over_depth(threads, isa, shape):
    num_rows, num_columns, depth = shape
    w, x = torch.randn(num_columns, depth), torch.randn(num_rows, depth)
    expected = np.zeros((num_rows, num_columns), np.float32)
    for k in range(depth):
        expected = model.fma(np.broadcast_to(x.numpy()[:, k, None], expected.shape), w.numpy()[:, k][None], expected)
    assert torch.equal(run(threads, x, pack(threads, w, Kind.FLOAT32)), torch.from_numpy(expected))


@pytest.mark.parametrize("shape", [(1, 16, 1), (1, 576, 576), (5, 33, 50), (13, 100, 161)])
def test_bfloat16_is_float_with_the_widened_weights(threads, isa, shape):
    num_rows, num_columns, depth = shape
    w, x = torch.randn(num_columns, depth).bfloat16(), torch.randn(num_rows, depth)
    narrow, wide = pack(threads, w, Kind.BFLOAT16), pack(threads, w.float(), Kind.FLOAT32)
    assert torch.equal(run(threads, x, narrow), run(threads, x, wide))
    assert torch.equal(narrow.columns(torch.arange(num_columns)), w.float())
    assert narrow.memory.nbytes == wide.memory.nbytes // 2


@pytest.mark.parametrize("kind", PACKED)
@pytest.mark.parametrize("shape", [(1, 64, 256), (3, 33, 512), (20, 100, 768), (150, 64, 256)])
def test_decoded_is_float_with_the_decoded_weights(threads, isa, kind, shape):
    num_rows, num_columns, depth = shape
    rows, x = quants(kind, num_columns, depth, seed=7), torch.randn(num_rows, depth)
    w = dequantise(rows.flatten(), TYPES[kind]).view(num_columns, depth)
    packed, wide = pack(threads, rows, kind.decoded), pack(threads, w, Kind.FLOAT32)
    assert torch.equal(run(threads, x, packed), run(threads, x, wide))
    assert torch.equal(packed.columns(torch.arange(num_columns)), w)
    assert packed.memory.nbytes == pack(threads, rows, kind).memory.nbytes


@pytest.fixture(scope="module")
def weights(threads):
    made = {kind: pack(threads, quants(kind, 7 * 32, 256, seed=4), kind) for kind in PACKED}
    made |= {kind.decoded: pack(threads, quants(kind, 7 * 32, 256, seed=4), kind.decoded) for kind in PACKED}
    made[Kind.FLOAT32] = pack(threads, torch.randn(7 * 32, 256), Kind.FLOAT32)
    made[Kind.BFLOAT16] = pack(threads, torch.randn(7 * 32, 256).bfloat16(), Kind.BFLOAT16)
    return made


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(list(Kind)),
    num_rows=st.integers(1, 150),
    num_threads=st.integers(1, 5),
    finish=st.sampled_from(
        [{}, {"gated": True}, {"gated": True, "activation": "gelu_tanh"}]
        + [{"activation": name} for name in ("gelu_tanh", "gelu", "relu")]
    ),
    seed=st.integers(0, 2**31),
)
def test_a_row_is_the_same_bits_in_any_batch(weights, kind, num_rows, num_threads, finish, seed):
    x, alone, together = activations(num_rows, 256, seed), Threads(1), Threads(num_threads)
    try:
        whole = run(together, x, weights[kind], **finish)
        for row in {0, num_rows // 2, num_rows - 1}:
            assert torch.equal(run(alone, x[row : row + 1], weights[kind], **finish), whole[row : row + 1])
        order = torch.randperm(num_rows, generator=torch.Generator().manual_seed(seed))[: seed % num_rows + 1]
        assert torch.equal(run(alone, x[order], weights[kind], **finish), whole[order])
    finally:
        alone.close()
        together.close()


@pytest.mark.parametrize("num_columns", [2064, 2080])  # 129 panels, 130
def test_a_long_product_is_the_same_bits_whoever_claims_its_parts(num_columns):
    alone = Threads(1)
    w, x = (
        torch.randn(num_columns, 2048),
        torch.randn(66, 2048),
    )  # of more multiplications than product_kernel.h's kLong
    weight, gated = pack_quantised(alone, w, Kind.CODES4), num_columns % 32 == 0
    expected = run(alone, x, weight, gated=gated)
    assert torch.equal(run(alone, x[40:41], weight, gated=gated), expected[40:41])
    for num_threads in (2, 3, 5):
        together = Threads(num_threads)
        for _ in range(3):
            assert torch.equal(run(together, x, weight, gated=gated), expected)
        together.close()
    alone.close()


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu", "relu"])
def test_instruction_sets_agree_to_the_bit(threads, weights, kind, activation):
    x, before, seen = activations(11, 256, seed=5), library.isa(), {}
    gated = activation in ("silu", "gelu_tanh")
    try:
        for name in ISAS:
            if library.use_isa(name):
                seen[name] = run(threads, x, weights[kind], gated=gated, activation=activation)
    finally:
        library.use_isa(before)
    assert all(torch.equal(y, seen["portable"]) for y in seen.values())


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("num_rows", [1, 8])
def test_finishes(threads, isa, weights, kind, num_rows):
    x, width = activations(num_rows, 256, seed=6), 7 * 32
    plain = run(threads, x, weights[kind])
    bias, residual = torch.randn(width), torch.randn(num_rows, width)
    assert torch.equal(run(threads, x, weights[kind], bias=bias), plain + bias)
    assert torch.equal(run(threads, x, weights[kind], residual=residual), plain + residual)
    assert torch.equal(run(threads, x, weights[kind], bias=bias, residual=residual), plain + bias + residual)
    gate, up = plain[:, : width // 2], plain[:, width // 2 :]
    expected = F.silu(gate.double()) * up.double()
    torch.testing.assert_close(run(threads, x, weights[kind], gated=True), expected.float(), rtol=1e-6, atol=1e-6)
    expected = F.gelu(gate.double(), approximate="tanh") * up.double()
    found = run(threads, x, weights[kind], gated=True, activation="gelu_tanh")
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)
    expected = F.gelu((plain + bias).double(), approximate="tanh")
    found = run(threads, x, weights[kind], bias=bias, activation="gelu_tanh")
    torch.testing.assert_close(found, expected.float(), rtol=2e-6, atol=1e-6)
    found = run(threads, x, weights[kind], bias=bias, activation="gelu")
    torch.testing.assert_close(found, F.gelu((plain + bias).double()).float(), rtol=1e-6, atol=1e-6)
    assert torch.equal(run(threads, x, weights[kind], bias=bias, activation="relu"), F.relu(plain + bias))


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "relu"])
def test_activations_of_what_a_float_can_be(threads, isa, activation):
    # Through a product with the identity matrix, whose 37 columns end in a partial panel.
    x = torch.cat([torch.linspace(-12, 12, 31), torch.tensor([0.0, -0.0, 1e-30, -1e30, 1e30, torch.nan])])
    unit = pack(threads, torch.ones(37, 1), Kind.FLOAT32)
    y = run(threads, torch.zeros(1, 1), unit, bias=x, activation=activation)[0]
    if activation == "relu":
        expected = F.relu(x)
    else:
        expected = F.gelu(x.double(), approximate="tanh" if activation == "gelu_tanh" else "none").float()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6 if activation == "gelu" else 1e-7, equal_nan=True)


def test_rows_of_a_wider_tensor_and_a_ragged_end(threads):
    rows, x = quants(Kind.CODES8, 21, 64, seed=7), torch.randn(3, 100)
    weight, y = pack(threads, rows, Kind.CODES8), torch.zeros(3, 30)
    product(threads, prepare(threads, x[:, 10:74], weight.kind), weight, y[:, 5:26], bias=torch.ones(21))
    assert torch.equal(y[:, 5:26], run(threads, x[:, 10:74].contiguous(), weight) + 1)
    assert not y[:, :5].any() and not y[:, 26:].any()


@pytest.mark.parametrize("kind", PACKED)
def test_columns_come_back(threads, kind):
    rows, ids = quants(kind, 37, 512, seed=8), torch.tensor([36, 0, 17, 16, 0])
    expected = dequantise(rows.flatten(), TYPES[kind]).view(37, 512)[ids]
    assert torch.equal(pack(threads, rows, kind).columns(ids), expected)


def test_float_columns_come_back(threads):
    w = torch.randn(37, 50)
    assert torch.equal(pack(threads, w, Kind.FLOAT32).columns(torch.arange(37)), w)


@pytest.mark.parametrize("num_columns", [1, 16, 37])
@pytest.mark.parametrize("depth", [1, 15, 16, 31, 33, 576])
def test_plain_panels(threads, num_columns, depth):
    """Every word of a panel is where product.h says, and its padding is zero, in memory that was not."""
    w = torch.randn(num_columns, depth, generator=torch.Generator().manual_seed(depth))
    for kind, dtype, per_word in ((Kind.FLOAT32, torch.float32, 1), (Kind.BFLOAT16, torch.bfloat16, 2)):
        memory = aligned(packed_bytes(kind, num_columns, depth)).fill_(0xFF)
        pack(threads, w.to(dtype), kind, memory)
        panels, slices = -(-num_columns // 16), -(-depth // 16)
        padded = torch.zeros(panels * 16, slices * 16, dtype=dtype)
        padded[:num_columns, :depth] = w.to(dtype)
        expected = padded.view(panels, 16, -1, per_word).transpose(1, 2).contiguous()
        assert torch.equal(memory.view(dtype), expected.flatten())


@pytest.mark.parametrize(("kind", "allowed"), [(Kind.CODES8, 0.006), (Kind.CODES4, 0.11), (Kind.CODES4_MINIMUM, 0.09)])
def test_quantising_weights_loses_what_the_bits_allow(threads, kind, allowed):
    w = torch.randn(50, 256)
    w[3, :32] = 0
    back = pack_quantised(threads, w, kind).columns(torch.arange(50))
    assert (back - w).norm() / w.norm() < allowed
    assert not back[3, :32].any()


@pytest.mark.parametrize(("kind", "depth"), [(Kind.CODES8, 1152), (Kind.FLOAT32, 1152), (Kind.FLOAT32, 1141)])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 6, 17, 64])
def test_fused_records_are_what_prepare_makes_of_the_unfused(threads, isa, num_rows, kind, depth):
    x, weight = activations(num_rows, depth, seed=9), torch.rand(depth) + 0.5
    tile_rows = library.tile_rows(kind)
    pairs = {
        "as it is": (elementwise.rms_norm_prepare(threads, x, None, 0.0, kind, tile_rows), x),
        "normed": (
            elementwise.rms_norm_prepare(threads, x, weight, 1e-5, kind, tile_rows),
            elementwise.rms_norm(threads, x, weight, 1e-5),
        ),
    }
    for name, (records, unfused) in pairs.items():
        assert torch.equal(records.flatten(), prepare(threads, unfused, kind).memory), name


# ── infinities and NaN ──────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_broken_stays_broken_in_its_own_row(threads, isa, weights, kind, value):
    x = activations(13, 256, seed=11)
    broken = x.clone()
    broken[0, 5], broken[6, 255], broken[7, 100] = value, value, value
    others = [row for row in range(13) if row not in (0, 6, 7)]
    for finish in ({}, {"gated": True}, {"activation": "gelu_tanh"}):
        whole, found = run(threads, x, weights[kind], **finish), run(threads, broken, weights[kind], **finish)
        assert torch.equal(found[others], whole[others])
        if kind.is_quantised:
            assert found[[0, 6, 7]].isnan().all()
        elif not finish:  # a gate may turn −∞ to 0
            assert not found[[0, 6, 7]].isfinite().any()
        assert torch.equal(run(threads, broken[6:7], weights[kind], **finish).isnan(), found[6:7].isnan())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_broken_records_are_the_same_fused_or_not(threads, isa, value):
    x = torch.randn(7, 576)
    x[3, 40] = value
    records = elementwise.rms_norm_prepare(threads, x, None, 0.0, Kind.CODES8, library.tile_rows(Kind.CODES8))
    assert torch.equal(records.flatten(), prepare(threads, x, Kind.CODES8).memory)


@pytest.mark.parametrize("kind", [Kind.CODES8, Kind.CODES4, Kind.CODES4_MINIMUM])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 1e38])
def test_weights_that_cannot_be_rounded_say_so(threads, kind, value):
    w = torch.randn(20, 64)
    w[7, 40] = value
    packed = pack_quantised(threads, w, kind)
    assert packed.columns(torch.arange(20)).isfinite().all(1).tolist() == [row != 7 for row in range(20)]
    y = run(threads, torch.randn(2, 64), packed)
    assert not y[:, 7].isfinite().any() and y[:, :7].isfinite().all() and y[:, 8:].isfinite().all()


@pytest.mark.parametrize("kind", PACKED)
def test_a_file_with_a_broken_scale_breaks_its_own_column(threads, isa, kind):
    rows, (weights_of, num_bytes, halves) = quants(kind, 20, 512, seed=12), QUANTS[TYPES[kind]]
    rows.view(20, 512 // weights_of, num_bytes)[7, 1, halves[0] + 1] |= 0x7C  # all bits of the float16's exponent
    packed = pack(threads, rows, kind)
    y = run(threads, torch.randn(3, 512), packed)
    assert not y[:, 7].isfinite().any() and y[:, :7].isfinite().all() and y[:, 8:].isfinite().all()
    expected = dequantise(rows.flatten(), TYPES[kind]).view(20, 512)
    torch.testing.assert_close(packed.columns(torch.arange(20)), expected, rtol=0, atol=0, equal_nan=True)
