"""The work between the QKV product and attention in one launch: RMSNorm of each q and k head, RoPE, and storing k and v in
their pages."""

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait  # type: ignore[import-untyped]

from octavo.kernels.triton.runtime.chip import starts_early
from octavo.kernels.triton.runtime.launch import Launcher

MAX_HEAD_SIZE = 256


@triton.jit  # type: ignore[untyped-decorator]
def _qk_norm_rope_store(  # type: ignore[no-untyped-def]
    heads,  # [T, H + 2 Hkv, D], tokens token_stride apart; q is written back, with KEEP_KEYS k and v as stored too
    rotation,  # [T, D/2, 2] float32 (cos, sin), or None
    q_norm,  # [D] or None
    k_norm,  # [D] or None
    kv,  # [num_pages, 2, Hkv, PAGE, D], pages page_stride apart
    slots,  # [T] int64, -1: write nothing
    token_stride,
    page_stride,
    epsilon,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    D_PADDED: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    KEEP_KEYS: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    column = tl.arange(0, D_PADDED)
    mask = (head < H + 2 * HKV)[:, None] & (column < D)[None, :]
    is_query = (head < H)[:, None]
    is_value = (head >= H + HKV)[:, None]
    # No kernel of the step writes the norms' weights: load them before waiting for the product.
    q_scale = tl.full((D_PADDED,), 1.0, tl.float32)
    k_scale = tl.full((D_PADDED,), 1.0, tl.float32)
    if q_norm is not None:
        q_scale = tl.load(q_norm + column, mask=column < D, other=0.0).to(tl.float32)
    if k_norm is not None:
        k_scale = tl.load(k_norm + column, mask=column < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    place = heads + token * token_stride + head[:, None] * D + column[None, :]
    raw = tl.load(place, mask=mask, other=0.0)
    numbers = raw.to(tl.float32)  # [HEADS, D_PADDED]

    if q_norm is not None or k_norm is not None:
        factor = tl.rsqrt(tl.sum(numbers * numbers, axis=1) / D + epsilon)[:, None]
        normed = numbers * factor
        if q_norm is not None:
            numbers = tl.where(is_query, normed * q_scale[None, :], numbers)
        if k_norm is not None:
            numbers = tl.where(is_query | is_value, numbers, normed * k_scale[None, :])
    if rotation is not None:
        factors = tl.load(rotation + token * D + column, mask=column < D, other=0.0)
        cosine, sine = tl.split(tl.reshape(factors, (D_PADDED // 2, 2)))
        real, imaginary = tl.split(tl.reshape(numbers, (HEADS, D_PADDED // 2, 2)))
        rotated = tl.join(
            real * cosine[None, :] - imaginary * sine[None, :], real * sine[None, :] + imaginary * cosine[None, :]
        )
        numbers = tl.where(is_value, numbers, tl.reshape(rotated, (HEADS, D_PADDED)))

    rounded = numbers.to(heads.dtype.element_ty)
    numbers = rounded.to(tl.float32)
    is_finite = tl.abs(numbers) < float("inf")  # false for NaN too
    finite = tl.where(is_finite, numbers, 0.0)
    HAS_8_BITS: tl.constexpr = kv.dtype.element_ty == tl.float8e4nv
    if HAS_8_BITS:
        finite = tl.minimum(tl.maximum(finite, -448.0), 448.0)
    if KEEP_KEYS and HAS_8_BITS:
        kept = tl.where(is_query, numbers, finite.to(kv.dtype.element_ty).to(tl.float32))
        tl.store(place, kept.to(heads.dtype.element_ty), mask=mask)
    elif KEEP_KEYS:
        kept = tl.where(is_query, numbers, finite).to(heads.dtype.element_ty)
        # Values are unchanged unless one is not finite. Then its whole head is written, so that stores stay wide.
        is_broken = tl.max(tl.where(is_finite, 0, 1), axis=1)[:, None] > 0
        tl.store(place, kept, mask=mask & ((head < H + HKV)[:, None] | is_broken))
    elif q_norm is not None or rotation is not None:
        tl.store(place, rounded, mask=mask & is_query)
    kv_head = head - H  # [2, Hkv] as one dimension: keys, then values
    cell = kv + (slot // PAGE) * page_stride + (kv_head[:, None] * PAGE + slot % PAGE) * D + column[None, :]
    tl.store(cell, finite.to(kv.dtype.element_ty), mask=mask & (head >= H)[:, None] & (slot >= 0))


_launch_qk_norm_rope_store = Launcher(_qk_norm_rope_store)


def qk_norm_rope_store(
    heads: torch.Tensor,
    num_heads: int,
    num_kv_heads: int,
    rotation: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    epsilon: float,
    kv: torch.Tensor,
    slots: torch.Tensor,
    keep_keys: bool = False,
    *,
    is_fixed: bool = False,
    pdl: bool = False,
) -> None:
    """Normalise and rotate q of heads [T, H + 2 Hkv, D] in place; store k, normalised and rotated, and v in kv at their slots,
    with 0 for NaN and infinity. `rotation` [T, D/2, 2] float32 rotates the pairs (2i, 2i + 1). `keep_keys`: also write k and
    v back to heads as stored, rounding to 8 bits included. `is_fixed`: norms sum in one order for any number of tokens."""
    num_tokens, all_heads, size = heads.shape
    page_size = kv.shape[3]
    assert all_heads == num_heads + 2 * num_kv_heads and size <= MAX_HEAD_SIZE
    assert heads.stride(1) == size and heads.stride(2) == 1
    # kv[0] is evaluated only if pages lie apart: the view takes a microsecond.
    assert kv.shape[1:] == (2, num_kv_heads, page_size, size) and (kv.is_contiguous() or kv[0].is_contiguous())
    assert page_size & (page_size - 1) == 0 and slots.dtype == torch.int64
    if rotation is not None:
        assert rotation.dtype == torch.float32 and rotation.numel() == num_tokens * size and rotation.is_contiguous()
    if num_tokens == 0:
        return
    padded = max(2, 1 << (size - 1).bit_length())
    # One 16-byte load per thread if the step has few programs, else two.
    heads_each = max(1, (1024 if is_fixed or num_tokens <= 64 else 2048) // padded)
    pdl = pdl and starts_early(heads.device)
    _launch_qk_norm_rope_store(
        (num_tokens, -(-all_heads // heads_each), 1),
        (heads, rotation, q_norm, k_norm, kv, slots, heads.stride(0), kv.stride(0), epsilon),
        (num_heads, num_kv_heads, size, padded, page_size, heads_each, keep_keys, pdl),
        {"num_warps": 4, "launch_pdl": True} if pdl else {"num_warps": 4},
    )
