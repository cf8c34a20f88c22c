"""The smaller parts: shares and slots, rotary factors, norms, devices and groups."""

import os

import pytest
import torch

from octavo import device as devices
from octavo.attention.qk_norm_rope import rotate
from octavo.errors import ConfigError
from octavo.kernels.torch_ops import TorchOps
from octavo.layers.context import BuildContext
from octavo.layers.embedding import Embedding, Head
from octavo.layers.linear import ColumnLinear, RowLinear
from octavo.layers.norm import LayerNorm, RMSNorm, SplitRMSNorm
from octavo.layers.rope import Rope, interleave, rope_settings, split_halves
from octavo.layers.sharding import check_shares, share
from octavo.parallel import Group, init_group
from octavo.quants import Quants
from tests.contexts import context

CPU = torch.device("cpu")


def context_of(rank: int = 0, size: int = 1, dtype: torch.dtype = torch.float32) -> BuildContext:
    group = Group.single()
    group.rank, group.size = rank, size
    return context(group, dtype)


def test_shares_are_equal_and_cover_everything() -> None:
    tensor = torch.arange(24).view(4, 6)
    parts = [share(tensor, 1, context_of(rank, 3).group) for rank in range(3)]
    assert torch.equal(torch.cat(parts, dim=1), tensor)
    check_shares(2, heads=4, vocabulary=6)
    with pytest.raises(ConfigError, match=r"size 4 does not divide this model's vocabulary 6; sizes that work: 1, 2$"):
        check_shares(4, heads=4, vocabulary=6)


def test_column_and_row_shares_add_up_to_the_whole_product() -> None:
    """Columns by hand, without a process group: each rank's outputs, joined, are the whole product's."""
    torch.manual_seed(1)
    x, weights = torch.randn(5, 12), [torch.randn(8, 12), torch.randn(4, 12)]
    outputs = []
    for rank in range(2):
        layer = ColumnLinear(12, (8, 4), context_of(rank, 2))
        for name, slot in layer.weight_slots("a", "b").items():
            slot.store(weights["ab".index(name[0])])
        outputs.append(layer(x))
    first = torch.cat([output[:, :4] for output in outputs], dim=1)
    second = torch.cat([output[:, 4:] for output in outputs], dim=1)
    torch.testing.assert_close(first, x @ weights[0].t())
    torch.testing.assert_close(second, x @ weights[1].t())


@pytest.mark.parametrize(("vocab_size", "size"), [(8, 2), (7, 2), (7, 3), (5, 4)])  # of 5 the last of 4 ranks has none
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_vocabulary_need_not_divide_by_the_ranks(
    vocab_size: int, size: int, is_tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(3)
    table, x = torch.randn(vocab_size, 16), torch.randn(3, 16)
    weight = table if is_tied else torch.randn(vocab_size, 16)
    ids = torch.arange(vocab_size).flip(0)
    embedded, shares, heads = torch.zeros(vocab_size, 16), [], []
    for rank in range(size):
        context = context_of(rank, size)
        monkeypatch.setattr(context.group, "all_reduce", lambda tensor: tensor)
        embedding, head = Embedding(vocab_size, 16, context), Head(16, vocab_size, context, is_tied)
        for slot in embedding.weight_slots("e").values():
            slot.store(table)
        for slot in head.weight_slots("h").values():
            slot.store(weight)
        head.tie(embedding)
        embedded += embedding(ids)
        heads.append(head)
        shares.append(head.product(x))
    assert torch.equal(embedded, table[ids])
    assert len({share.shape for share in shares}) == 1
    for head in heads:
        monkeypatch.setattr(head.group, "all_gather_last", lambda _: torch.cat(shares, dim=-1))
        logits = head(x)
        torch.testing.assert_close(logits, x @ weight.t())
        assert logits.is_contiguous()  # sampling edits it by flat index


def test_bias_and_residual_are_counted_once_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    x, weight, bias, residual = torch.randn(3, 8), torch.randn(6, 8), torch.randn(6), torch.randn(3, 6)
    total = torch.zeros(3, 6)
    for rank in range(2):
        context = context_of(rank, 2)
        monkeypatch.setattr(context.group, "all_reduce", lambda tensor: tensor)
        layer = RowLinear(8, 6, context, bias=True)
        slots = layer.weight_slots("o")
        slots["o.weight"].store(weight)
        slots["o.bias"].store(bias)
        total += layer(share(x, 1, context.group), residual)
    torch.testing.assert_close(total, residual + x @ weight.t() + bias)
    whole = RowLinear(8, 6, context_of())
    whole.weight_slots("o")["o.weight"].store(weight)
    torch.testing.assert_close(whole(x, None), x @ weight.t())  # for families that do more before they add it


def test_interleaving_is_undone_by_splitting_halves() -> None:
    weight = torch.arange(48.0).view(16, 3)
    assert torch.equal(split_halves(interleave(weight, 8), 8), weight)
    assert interleave(torch.arange(8), 8).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    # Of heads whose first 4 are rotated, the rest stays where it is.
    assert torch.equal(split_halves(interleave(weight, 8, 4), 8, 4), weight)
    assert interleave(torch.arange(16), 8, 4).tolist() == [0, 2, 1, 3, 4, 5, 6, 7, 8, 10, 9, 11, 12, 13, 14, 15]


def test_rows_that_are_packed_are_reordered_as_plain_ones_are() -> None:
    rows = torch.arange(24 * 2 * 34).remainder(113).to(torch.uint8)  # so small that every float16 in it is a number
    packed = Quants("Q8_0", rows.view(24, 2 * 34))
    for reorder in (interleave, split_halves):
        assert torch.equal(reorder(packed, 8).dequantise(), reorder(packed.dequantise(), 8))


def test_rotating_interleaved_heads_equals_rotating_halves() -> None:
    torch.manual_seed(4)
    rope = Rope(rope_settings({"rope_theta": 100.0}), 8, CPU, TorchOps())
    positions, heads = torch.tensor([0, 3, 90]), torch.randn(3, 2, 8)
    angles = torch.outer(positions.float(), rope.frequencies)
    cos, sin = (torch.cat((f(angles), f(angles)), dim=-1)[:, None] for f in (torch.cos, torch.sin))
    expected = heads * cos + torch.cat((-heads[..., 4:], heads[..., :4]), dim=-1) * sin
    order = interleave(torch.arange(8), 8)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        turned = heads[..., order].to(dtype)
        rotate(turned, rope.rotation(positions))
        torch.testing.assert_close(turned.float(), expected[..., order], atol=tolerance, rtol=tolerance)


def test_what_is_not_rotated_stays_as_it_is() -> None:
    """Not stretched either, by a scaling that stretches."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "partial_rotary_factor": 0.5, "rope_theta": 100.0}
    config = {"rope_parameters": yarn, "max_position_embeddings": 64}
    rope = Rope(rope_settings(config, can_be_partial=True), 8, CPU, TorchOps())
    rotation = rope.rotation(torch.tensor([0, 5]))[:, 0]
    assert torch.equal(rotation[:, 2:], torch.ones(2, 2, dtype=torch.complex64))
    torch.testing.assert_close(rotation[:, :2].abs(), torch.full((2, 2), rope.amplitude))
    assert rope.amplitude > 1.1 and rope.frequencies[:2].all()
    for share_rotated in (0, 0.3, -1, 1.5, "half", None):
        settings = rope_settings(config, can_be_partial=True) | {"partial_rotary_factor": share_rotated}
        with pytest.raises(
            ConfigError, match=r"partial_rotary_factor is '.*': it must select an even number of the 10"
        ):
            Rope(settings, 10, CPU, TorchOps())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x, weight, bias = torch.randn(4, 16) * 3, torch.randn(16), torch.randn(16)
    rms, layer = RMSNorm(16, 1e-5, context_of(dtype=dtype)), LayerNorm(16, 1e-5, context_of(dtype=dtype))
    for norm in (rms, layer):
        for name, slot in norm.weight_slots("n").items():
            slot.store(weight if name.endswith("weight") else bias)
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms(x.to(dtype)).float(), expected, atol=tolerance, rtol=tolerance)
    expected = torch.nn.functional.layer_norm(x, (16,), weight, bias, 1e-5)
    torch.testing.assert_close(layer(x.to(dtype)).float(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_with_an_offset_and_a_factor(dtype: torch.dtype) -> None:
    torch.manual_seed(6)
    x, weight, residual = torch.randn(4, 16).to(dtype), torch.randn(16) / 64, torch.randn(4, 16).to(dtype)
    norm = RMSNorm(16, 1e-5, context_of(dtype=dtype), offset=8.0, factor=0.3)
    norm.weight_slots("n")["n.weight"].store(weight)
    numbers = x.float()
    expected = numbers / (numbers.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * (8.0 + weight) * 0.3
    found = norm(x)
    assert found.dtype == dtype
    # One rounding to the type at the end: 16 bits of weight + 8 alone would be off by up to a 256th.
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.0, "rtol": 2**-8}
    torch.testing.assert_close(found.float(), expected, **near)
    into = residual.clone()
    assert norm.added(x, into) is into
    torch.testing.assert_close(into, residual + found)


def test_a_norm_of_what_is_split_over_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(7)
    x, weight = torch.randn(3, 16), torch.randn(16)
    expected = torch.nn.functional.rms_norm(x, (16,), interleave(weight, 8), 1e-5)
    whole = x.square().sum(dim=-1, keepdim=True)
    for size in (1, 2):
        found = []
        for rank in range(size):
            context = context_of(rank, size)
            monkeypatch.setattr(context.group, "all_reduce", lambda tensor: whole)
            norm = SplitRMSNorm(16, 1e-5, context, lambda tensor: interleave(tensor, 8))
            norm.weight_slots("n")["n.weight"].store(weight)
            found.append(share(x, 1, context.group).clone())
            norm(found[-1])
        torch.testing.assert_close(torch.cat(found, dim=1), expected)


@pytest.mark.parametrize("size", [1, 2])
def test_a_checkpoint_may_hold_the_parts_of_a_product_as_one_tensor(size: int) -> None:
    torch.manual_seed(8)
    x, weight, bias = torch.randn(5, 32), torch.randn(12, 32), torch.randn(12)
    packed = Quants("Q8_0", torch.arange(12 * 34).remainder(113).to(torch.uint8).view(12, 34))
    for tensor in (weight, packed):
        for rank in range(size):
            layers = [ColumnLinear(32, (8, 4), context_of(rank, size), bias=True) for _ in range(2)]
            fused, slots = layers[0].fused_slots("f", lambda part, rows: rows if part else interleave(rows, 8)), {}
            fused["f.weight"].store(tensor)
            fused["f.bias"].store(bias)
            slots = layers[1].weight_slots("a", "b")
            rows = tensor.dequantise() if isinstance(tensor, Quants) else tensor
            for kind, values in (("weight", rows), ("bias", bias)):
                slots[f"a.{kind}"].store(interleave(values[:8], 8))
                slots[f"b.{kind}"].store(values[8:])
            assert fused["f.weight"].shape == (12, 32) and fused["f.bias"].shape == (12,)
            assert torch.equal(layers[0](x), layers[1](x))


def test_an_embedding_with_a_factor_and_a_head_with_a_soft_cap() -> None:
    torch.manual_seed(9)
    table, x = torch.randn(20, 16), torch.randn(3, 16) * 4
    context = context_of()
    embedding, head = Embedding(20, 16, context, 4.0), Head(16, 20, context, True, 5.0)
    embedding.weight_slots("e")["e.weight"].store(table)
    head.tie(embedding)
    assert torch.equal(embedding(torch.tensor([3, 19, 3])), 4 * table[[3, 19, 3]])
    torch.testing.assert_close(head(x), 5 * torch.tanh(x @ table.t() / 5))


def test_the_cpu_as_a_device() -> None:
    device = devices.pick("cpu")
    assert device.describe(1) == "cpu (1 thread)" and device.describe(8) == "cpu (8 threads)"
    assert 0 < device.memory_available() <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    event = device.event()
    event.record()
    event.wait()
    assert event.is_done()
    with device.side_stream():
        assert device.pinned((2, 3), torch.int64).shape == (2, 3)
    device.synchronize()
    with pytest.raises(ConfigError, match="must be auto, cpu or cuda, got tpu"):
        devices.pick("tpu")


def test_a_group_of_one_leaves_tensors_alone() -> None:
    group = init_group(0, 1, "tcp://127.0.0.1:1", CPU)
    tensor = torch.arange(4.0)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather_last(tensor) is tensor
    group.barrier()
    group.close()
