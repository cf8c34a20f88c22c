"""Norm, rotation and page write in one launch, against the same in plain torch."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from octavo.kernels.triton.attention.qk_norm_rope_store import qk_norm_rope_store
from tests.interpreter import cases

EPSILON = 1e-6


def make_rotation(num_tokens: int, size: int, device: torch.device) -> torch.Tensor:
    angles = torch.rand(num_tokens, size // 2, device=device) * 6
    return torch.view_as_real(torch.polar(torch.full_like(angles, 1.25), angles)).contiguous()


def turned(heads, num_heads, num_kv_heads, rotation, q_norm, k_norm):
    """The expected q and k in float32; v unchanged. [T, H + 2 Hkv, D]"""
    q, k, v = heads.float().split((num_heads, num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None:
        q = F.rms_norm(q, q.shape[-1:], q_norm.float(), EPSILON)
    if k_norm is not None:
        k = F.rms_norm(k, k.shape[-1:], k_norm.float(), EPSILON)
    if rotation is not None:
        factors = torch.view_as_complex(rotation)[:, None]
        q, k = (
            torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous()) * factors).flatten(2)
            for x in (q, k)
        )
    return torch.cat((q, k, v), dim=1)


def stored(expected, kv, slots, num_heads, num_kv_heads):
    """The KV store after the write. [num_pages, 2, Hkv, page, D]"""
    kv = kv.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, cell = divmod(slot, kv.shape[3])
            both = torch.nan_to_num(expected[token, num_heads:].float(), nan=0.0, posinf=0.0, neginf=0.0)
            if kv.dtype == torch.float8_e4m3fn:
                both = both.clamp(-448, 448)
            kv[page, :, :, cell] = both.view(2, num_kv_heads, -1).to(kv.dtype)
    return kv


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


PAGE_SIZES, HEADS = (1, 4, 16), ((4, 2, 16), (5, 1, 12), (3, 3, 80))


@pytest.mark.parametrize(
    ("page_size", "heads_of"), cases(product(PAGE_SIZES, HEADS), *zip(PAGE_SIZES, HEADS, strict=True))
)
@pytest.mark.parametrize("has_rotation", [True, False])
@pytest.mark.parametrize("has_norms", [True, False])
def test_turns_and_stores(page_size, heads_of, has_rotation, has_norms, device):
    num_heads, num_kv_heads, size = heads_of
    torch.manual_seed(page_size * size)
    num_tokens = 5
    heads = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, size, device=device)
    before = heads.clone()
    rotation = make_rotation(num_tokens, size, device) if has_rotation else None
    q_norm, k_norm = (torch.randn(size, device=device) for _ in range(2)) if has_norms else (None, None)
    num_pages = math.ceil(12 / page_size)
    kv = torch.randn(num_pages, 2, num_kv_heads, page_size, size, device=device)
    slots = torch.tensor([7, -1, 0, 11, 4], device=device)
    expected = turned(heads, num_heads, num_kv_heads, rotation, q_norm, k_norm)
    store = stored(expected, kv, slots, num_heads, num_kv_heads)

    qk_norm_rope_store(heads, num_heads, num_kv_heads, rotation, q_norm, k_norm, EPSILON, kv, slots)
    assert distance(heads[:, :num_heads], expected[:, :num_heads]) < 1e-6
    assert torch.equal(heads[:, num_heads:], before[:, num_heads:]), "k and v in heads are not to be touched"
    assert distance(kv, store) < 1e-6
    untouched = [slot for slot in range(num_pages * page_size) if slot not in slots.tolist()]
    for page, cell in (divmod(slot, page_size) for slot in untouched):
        assert torch.equal(kv[page, :, :, cell], store[page, :, :, cell])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("only", cases(["q", "k", "both"], "q", "k"))
def test_half_precision_norms_and_kept_keys(dtype, only, device):
    torch.manual_seed(3)
    heads = torch.randn(3, 8, 32, device=device).to(dtype)
    before = heads.clone()
    rotation = make_rotation(3, 32, device)
    weights = torch.randn(2, 32, device=device).to(dtype)
    q_norm, k_norm = (weights[0] if only != "k" else None), (weights[1] if only != "q" else None)
    kv = torch.zeros(2, 2, 2, 4, 32, device=device, dtype=dtype)
    slots = torch.tensor([5, 2, -1], device=device)
    expected = turned(heads, 4, 2, rotation, q_norm, k_norm)
    qk_norm_rope_store(heads, 4, 2, rotation, q_norm, k_norm, EPSILON, kv, slots, keep_keys=True)
    assert distance(heads[:, :6], expected[:, :6]) < 3e-3
    assert torch.equal(heads[:, 6:], before[:, 6:])
    assert torch.equal(kv[1, 0, :, 1], heads[0, 4:6]), "the store and heads hold the same keys"
    assert torch.equal(kv[0, 1, :, 2], heads[1, 6:]) and not kv[0, :, :, :2].any()


def test_nothing_that_is_not_finite_is_stored(device):
    torch.manual_seed(4)
    heads = torch.randn(3, 4, 16, device=device)
    heads[0, 2, 3] = float("nan")
    heads[1, 3, 0] = float("inf")
    heads[2, 3, 5] = -float("inf")
    rotation = make_rotation(3, 16, device)
    kv = torch.full((1, 2, 1, 4, 16), 9.0, device=device)
    slots = torch.tensor([0, 1, 2], device=device)
    expected = turned(heads, 2, 1, rotation, None, None)
    store = stored(expected, kv, slots, 2, 1)
    qk_norm_rope_store(heads, 2, 1, rotation, None, None, EPSILON, kv, slots, keep_keys=True)
    assert torch.isfinite(kv).all()
    assert distance(kv, store) < 1e-6
    assert kv[0, 0, 0, 0, 2] == 0 and kv[0, 0, 0, 0, 3] == 0 and kv[0, 0, 0, 0, 4] != 0, "the pair is lost, no more"
    assert kv[0, 1, 0, 1, 0] == 0 and kv[0, 1, 0, 2, 5] == 0
    assert torch.equal(heads[:, 2:], kv[0, :, 0, :3].transpose(0, 1)), "keys and values are kept as they are stored"


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # from the interpreter's numpy
def test_a_half_that_overflows_is_stored_as_zero(device):
    """1.25 · 60000 is finite in float32 and inf in float16."""
    heads = torch.full((1, 3, 2), 60000.0, device=device).half()
    rotation = torch.tensor([[[1.25, 0.0]]], device=device)
    kv = torch.ones(1, 2, 1, 1, 2, device=device).half()
    qk_norm_rope_store(heads, 1, 1, rotation, None, None, EPSILON, kv, torch.tensor([0], device=device))
    assert not kv[0, 0].any() and (kv[0, 1] == 60000).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf · 0 in v, which is rotated and then dropped
def test_eight_bit_store_saturates(device):
    """Values that 8 bits hold exactly, and keys rotated by a quarter turn: the stored values are exact."""
    torch.manual_seed(5)
    heads = torch.randn(4, 6, 32, device=device).to(torch.float8_e4m3fn).half()
    heads[0, 4:, :4] = torch.tensor([1000.0, -1000.0, float("inf"), float("nan")], device=device)
    heads[0, 2, 6:8] = torch.tensor([1000.0, -500.0], device=device)
    rotation = torch.tensor([0.0, 1.0], device=device).expand(4, 16, 2).contiguous()
    kv = torch.zeros(3, 2, 2, 2, 32, device=device).to(torch.float8_e4m3fn)
    slots = torch.tensor([5, -1, 1, 2], device=device)
    store = stored(turned(heads, 2, 2, rotation, None, None), kv, slots, 2, 2).float()
    qk_norm_rope_store(heads, 2, 2, rotation, None, None, EPSILON, kv, slots)
    assert torch.equal(kv.float(), store)
    assert kv[2, 1, :, 1, :4].float().tolist() == [[448.0, -448.0, 0.0, 0.0]] * 2
    assert kv[2, 0, 0, 1, 6:8].float().tolist() == [448.0, 448.0]


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # inf · 0, as above
def test_keys_and_values_are_kept_as_an_eight_bit_store_has_them(device):
    torch.manual_seed(7)
    heads = torch.randn(3, 6, 32, device=device).bfloat16()
    heads[0, 4, :2] = torch.tensor([1000.0, float("inf")], device=device)
    rotation = make_rotation(3, 32, device)
    kv = torch.zeros(2, 2, 2, 2, 32, device=device).to(torch.float8_e4m3fn)
    expected = turned(heads, 2, 2, rotation, None, None)
    qk_norm_rope_store(
        heads, 2, 2, rotation, None, None, EPSILON, kv, torch.tensor([3, 0, 2], device=device), keep_keys=True
    )
    assert distance(heads[:, :2], expected[:, :2]) < 3e-3, "queries keep their bits"
    cells = kv.float().transpose(1, 3).flatten(0, 1)[[3, 0, 2]].transpose(1, 2)  # [T, 2, Hkv, D], once in order
    assert torch.equal(heads[:, 2:].float(), cells.flatten(1, 2))
    assert heads[0, 4, :2].tolist() == [448.0, 0.0]


def test_rows_further_apart_and_pages_further_apart(device):
    torch.manual_seed(6)
    wide = torch.randn(3, 10 * 16, device=device)
    before = wide.clone()
    heads = wide[:, :96].view(3, 6, 16)
    layers = torch.zeros(2, 3, 2, 2, 4, 16, device=device)  # pages of three layers, interleaved
    kv = layers[:, 1]
    rotation = make_rotation(3, 16, device)
    slots = torch.tensor([6, 0, 3], device=device)
    expected = turned(heads, 2, 2, rotation, None, None)
    store = stored(expected, kv, slots, 2, 2)
    qk_norm_rope_store(heads, 2, 2, rotation, None, None, EPSILON, kv, slots)
    assert distance(heads[:, :2], expected[:, :2]) < 1e-6
    assert torch.equal(wide[:, 32:], before[:, 32:])
    assert distance(kv, store) < 1e-6
    assert not layers[:, 0].any() and not layers[:, 2].any()


def test_no_tokens(device):
    kv = torch.ones(1, 2, 1, 4, 8, device=device)
    slots = torch.empty(0, dtype=torch.int64, device=device)
    qk_norm_rope_store(torch.empty(0, 3, 8, device=device), 1, 1, None, None, None, EPSILON, kv, slots)
    assert (kv == 1).all()
