"""Native operations against torch, tapes against immediate operations, and buffers that share memory without overlap."""

import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from octavo.kernels.cpu import ops
from octavo.kernels.cpu.library import BadCall, Kind, PackedWeight, pack, pack_quantised
from octavo.kernels.cpu.native import Heads, Native
from octavo.kernels.cpu.ops import Count, Finish, Step
from octavo.kernels.cpu.tape import NotRecordable, Tape, _Buffer, _place
from octavo.kernels.device_ops import NormWeights
from tests.native import native

HIDDEN, INNER, VOCAB = 64, 96, 200


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def weight_of(kernels: Native, rows: torch.Tensor, kind: Kind) -> tuple[PackedWeight, torch.Tensor]:
    """Return the packed weight, and the values it represents."""
    if kind == Kind.FLOAT32:
        packed = pack(kernels.threads, rows, kind)
    else:
        packed = pack_quantised(kernels.threads, rows, kind)
    return packed, packed.columns(torch.arange(len(rows)))


def close(found: torch.Tensor, expected: torch.Tensor, kind: Kind = Kind.FLOAT32) -> None:
    # Packed products round their activations to 8 bits.
    tolerance = 1e-4 if kind == Kind.FLOAT32 else 2e-2 * float(expected.abs().max())
    torch.testing.assert_close(found, expected, atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("kind", [Kind.FLOAT32, Kind.CODES8, Kind.CODES4_MINIMUM])
@pytest.mark.parametrize("num_rows", [1, 3, 40])
def test_products(kind: Kind, num_rows: int) -> None:
    kernels = native()
    packed, plain = weight_of(kernels, randn(INNER, HIDDEN), kind)
    x, bias, residual = randn(num_rows, HIDDEN, seed=1), randn(INNER, seed=2), randn(num_rows, INNER, seed=3)
    gain, shift = randn(HIDDEN, seed=4), randn(HIDDEN, seed=5)
    close(kernels.linear(x, [packed]), x @ plain.T, kind)
    expected = F.rms_norm(x, (HIDDEN,), gain, 1e-5) @ plain.T + bias
    close(kernels.linear(x, [packed], norm=NormWeights(gain, None, 1e-5), bias=bias), expected, kind)
    expected = F.layer_norm(x, (HIDDEN,), gain, shift, 1e-5) @ plain.T
    close(kernels.linear(x, [packed], norm=NormWeights(gain, shift, 1e-5)), expected, kind)
    changed = residual.clone()
    found = kernels.linear(x, [packed], residual=changed)
    assert found is changed
    close(found, residual + x @ plain.T, kind)
    gate, up = (x @ plain.T).chunk(2, dim=-1)
    close(kernels.linear(x, [packed], finish=Finish.GATED), F.silu(gate) * up, kind)
    close(kernels.gate(kernels.linear(x, [packed])), F.silu(gate) * up, kind)


def test_products_of_several_kinds_lie_side_by_side() -> None:
    kernels, x = native(), randn(7, HIDDEN)
    kinds = [Kind.CODES8, Kind.CODES4, Kind.FLOAT32, Kind.CODES4_MINIMUM]
    parts = [weight_of(kernels, randn(32, HIDDEN, seed=i), kind) for i, kind in enumerate(kinds)]
    bias = randn(128)
    found = kernels.linear(x, [packed for packed, _ in parts], bias=bias)
    each = [kernels.linear(x, [packed], bias=bias[32 * i : 32 * i + 32].clone()) for i, (packed, _) in enumerate(parts)]
    assert torch.equal(found, torch.cat(each, dim=1))
    close(found, torch.cat([x @ plain.T for _, plain in parts], dim=1) + bias, Kind.CODES4)


def test_rotation_embedding_and_samples() -> None:
    kernels = native()
    positions, frequencies = torch.tensor([0, 1, 7, 4000]), torch.tensor([1.0, 0.1, 0.003])
    angles = torch.outer(positions.float(), frequencies)
    found = kernels.rotation(positions, frequencies, 1.5).view(4, 3, 2)
    torch.testing.assert_close(found, 1.5 * torch.stack((angles.cos(), angles.sin()), dim=-1))
    assert kernels.rotation(positions, torch.zeros(1), 1.5).tolist() == [[1.0, 0.0]] * 4  # neither rotated nor scaled
    packed, plain = weight_of(kernels, randn(VOCAB, HIDDEN), Kind.CODES8)
    ids = torch.tensor([3, 199, 0, 3])
    assert torch.equal(kernels.embed(ids, packed), plain[ids])
    assert torch.equal(kernels.embed(ids, packed, factor=8.0), 8.0 * plain[ids])
    table, x = randn(20, HIDDEN), randn(4, HIDDEN, seed=9)
    assert torch.equal(kernels.add_positions(x.clone(), ids.clamp(max=19), table), x + table[ids.clamp(max=19)])
    assert torch.equal(kernels.gather(x, torch.tensor([2, 0])), x[[2, 0]])


def test_norms_and_caps() -> None:
    kernels, x, gain, shift = native(), randn(4, HIDDEN), randn(HIDDEN), randn(HIDDEN, seed=2)
    for norm in (NormWeights(gain, None, 1e-6), NormWeights(gain, shift, 1e-6)):
        expected = F.rms_norm(x, (HIDDEN,), gain, 1e-6)
        if norm.bias is not None:
            expected = F.layer_norm(x, (HIDDEN,), gain, shift, 1e-6)
        torch.testing.assert_close(kernels.norm(x, norm), expected)
        residual = randn(4, HIDDEN, seed=3)
        changed = residual.clone()
        assert kernels.add_norm(x, norm, changed) is changed
        torch.testing.assert_close(changed, residual + expected)
    wide = torch.cat((randn(4, 8), x, randn(4, 8)), dim=1)
    kernels.norm_in_place(wide[:, 8:-8], NormWeights(gain, None, 1e-6))
    torch.testing.assert_close(wide[:, 8:-8], F.rms_norm(x, (HIDDEN,), gain, 1e-6))
    assert torch.equal(wide[:, :8], randn(4, 8)) and torch.equal(wide[:, -8:], randn(4, 8))
    # Longer than one thread's share, and not whole vectors.
    logits = randn(3, 20_011) * 40
    expected = 30 * torch.tanh(logits / 30)
    assert kernels.cap(logits, 30.0) is logits
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


# ── tapes ───────────────────────────────────────────────────────────────────────────────────────────


class Little:
    """A model of one layer with every operation that a tape can hold."""

    def __init__(self, kernels: Native, kind: Kind) -> None:
        self.kernels = kernels
        shapes = {"table": (VOCAB, HIDDEN), "qkv": (HIDDEN * 2, HIDDEN), "out": (HIDDEN, HIDDEN)}
        shapes |= {"up": (INNER * 2, HIDDEN), "down": (HIDDEN, INNER)}
        self.weights = {name: weight_of(kernels, randn(*shape) / 8, kind)[0] for name, shape in shapes.items()}
        self.norm = NormWeights(randn(HIDDEN), None, 1e-5)
        self.frequencies = randn(8).abs()
        store = torch.zeros(192, 2, 2, 4 * 16)
        self.heads = Heads(4, 2, 16, 0.25, 0, 0.0, None, store, 4, store.stride(0) * 4)

    def forward(self, inputs: dict[str, torch.Tensor], step: Step) -> torch.Tensor:
        kernels, weights = self.kernels, self.weights
        rotation = kernels.rotation(inputs["positions"], self.frequencies, 1.0)
        x = kernels.embed(inputs["input_ids"], weights["table"])
        heads = kernels.linear(x, [weights["qkv"]], norm=self.norm)
        kernels.norm_in_place(heads[:, :HIDDEN], self.norm)
        heads = heads.view(len(x), 8, 16)
        x = kernels.linear(kernels.attend(self.heads, heads, rotation, step), [weights["out"]], residual=x)
        inner = kernels.linear(x, [weights["up"]], norm=self.norm, finish=Finish.GATED)
        x = kernels.add_norm(kernels.linear(inner, [weights["down"]]), self.norm, x)
        logits = kernels.linear(kernels.gather(x, inputs["sample_at"]), [weights["table"]], norm=self.norm)
        return kernels.cap(logits, 3.0)


def inputs_of(counts: list[int], rng: random.Random) -> tuple[dict[str, torch.Tensor], Step, list[torch.Tensor]]:
    """Rows that begin with this step, each on its own pages."""
    total, pages = sum(counts), iter(rng.sample(range(192), 192))
    table = torch.tensor([[next(pages) for _ in range(4)] for _ in counts], dtype=torch.int32)
    positions = torch.cat([torch.arange(count) for count in counts])
    slots = torch.cat(
        [table[row].long()[torch.arange(n) // 4] * 4 + torch.arange(n) % 4 for row, n in enumerate(counts)]
    )
    start = torch.tensor([0, *counts]).cumsum(0).int()
    inputs = {
        "input_ids": torch.tensor([rng.randrange(VOCAB) for _ in range(total)]),
        "positions": positions,
        "slots": slots,
        "sample_at": (start[1:] - 1).long(),
    }
    lens = torch.tensor(counts, dtype=torch.int32)
    step = Step(total, len(counts), len(counts), *(inputs[name].data_ptr() for name in inputs), start.data_ptr(),
                lens.data_ptr(), table.data_ptr(), 4)  # fmt: skip
    return inputs, step, [start, lens, table]


@pytest.mark.parametrize("kind", [Kind.FLOAT32, Kind.CODES8, Kind.CODES4_MINIMUM])
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_a_tape_gives_the_bits_that_its_operations_give(kind: Kind, num_threads: int) -> None:
    kernels, rng = native(num_threads), random.Random(3)
    model = Little(kernels, kind)
    tape = Tape(max_tokens=48, max_samples=40)
    blank = {name: torch.zeros(48, dtype=torch.int64) for name in ("input_ids", "positions", "slots")}
    blank["sample_at"] = torch.zeros(tape.max_samples, dtype=torch.int64)
    stand_in = Step(48, 40, 1, *(blank[name].data_ptr() for name in blank))
    with kernels.recording(tape, blank):
        logits = model.forward(blank, stand_in)
    (logits,) = tape.finish([logits])
    # Buffers share memory: the tape takes far less than all of them together.
    assert tape.num_bytes < 48 * (HIDDEN * 6 + 2 * INNER) * 4 + 40 * (VOCAB + HIDDEN) * 4
    # Attention's output and the residual are gathered: after them, only sampled rows are computed.
    assert tape.names()[5:] == ["attend", "gather", "gather", "linear", "linear", "linear", "norm", "linear", "cap"]
    for counts in ([1], [14, 3], [1, 1, 1], [9, 1, 1, 1, 1, 1], [16, 8], [2], [1] * 40):
        inputs, step, kept = inputs_of(counts, rng)
        model.heads.store.zero_()
        expected, pages = model.forward(inputs, step), model.heads.store.clone()
        for num_samples in (len(counts), 0):  # the last rows of a step, or all, may not be sampled
            model.heads.store.zero_()
            step.num_samples = num_samples
            tape.run(kernels.threads, step)
            assert torch.equal(logits[:num_samples], expected[:num_samples]), counts
            assert torch.equal(model.heads.store, pages), counts
        assert len(kept) == 3


def test_samples_stay_at_the_end_where_rows_are_needed_after_them() -> None:
    kernels = native()
    model, tape = Little(kernels, Kind.FLOAT32), Tape(8, 2)
    blank = {name: torch.zeros(8, dtype=torch.int64) for name in ("input_ids", "positions", "slots", "sample_at")}
    with kernels.recording(tape, blank):
        heads = kernels.linear(kernels.embed(blank["input_ids"], model.weights["table"]), [model.weights["qkv"]])
        attended = kernels.attend(
            model.heads, heads.view(8, 8, 16), None, Step(8, 2, 1, slots=blank["slots"].data_ptr())
        )
        sampled = kernels.gather(kernels.norm(attended, model.norm), blank["sample_at"])
        kernels.norm(attended, model.norm)
    tape.finish([sampled])
    assert tape.names()[3:] == ["attend", "norm", "gather", "norm"]


def test_what_cannot_be_recorded_is_named() -> None:
    kernels = native()
    model = Little(kernels, Kind.FLOAT32)
    tape = Tape(8, 2)
    blank = {name: torch.zeros(8, dtype=torch.int64) for name in ("input_ids", "positions", "slots")}
    with kernels.recording(tape, blank):
        x = kernels.embed(blank["input_ids"], model.weights["table"])
        assert x.view(8, 4, 16).transpose(0, 1).shape == (4, 8, 16)
        with pytest.raises(NotRecordable, match="torch computes add_"):
            x.add_(1.0)
        with pytest.raises(NotRecordable, match="torch computes relu"):
            F.relu(x)
        with pytest.raises(NotRecordable, match=r"torch computes (__mul__|mul)"):
            x * 2.0
        with pytest.raises(NotRecordable, match="no operation of the step wrote"):
            kernels.norm(torch.zeros(8, HIDDEN), model.norm)
        with pytest.raises(NotRecordable, match="the step's input_ids are expected"):
            kernels.embed(blank["positions"] + 1, model.weights["table"])
    assert len(kernels.embed(torch.tensor([1, 2, 3]), model.weights["table"])) == 3, "operations are done at once again"


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=40))
def test_buffers_that_are_needed_at_once_do_not_overlap(spans: list[tuple[int, int, int]]) -> None:
    buffers = [_Buffer(0, 64 * size, Count.PER_TOKEN, first, first + more) for first, more, size in spans]
    total = _place(buffers)
    for i, one in enumerate(buffers):
        assert one.offset >= 0 and one.offset + one.num_bytes <= total and one.offset % 64 == 0
        for other in buffers[:i]:
            if one.first <= other.last and other.first <= one.last:
                assert one.offset + one.num_bytes <= other.offset or other.offset + other.num_bytes <= one.offset
    assert total <= sum(buffer.num_bytes for buffer in buffers)


def test_an_operation_that_cannot_run_is_named() -> None:
    kernels = native()
    with pytest.raises(BadCall, match="operation 0, QK_NORM_ROPE_STORE"):
        op = ops.Op(ops.Code.QK_NORM_ROPE_STORE, 0)
        op.qk_norm_rope.head_size = 100_000
        ops.run(kernels.threads, ops.array([op]), Step(num_tokens=1))
