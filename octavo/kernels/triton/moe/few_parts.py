"""How programs find the experts of a token in the keys of `few_route`: an expert's place is the number of larger keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _square(E, W):  # type: ignore[no-untyped-def]
    """[E, E]: every thread of W warps compares one key with as many others as there are threads for."""
    columns = max(1, min(E, E * E // (32 * W)))
    across = min(32, E // columns)
    return gl.BlockedLayout([1, columns], [32 // across, across], [W, 1], [1, 0])


@gluon.constexpr_function
def _table(P, W):  # type: ignore[no-untyped-def]
    """[E, P]"""
    return gl.BlockedLayout([1, P], [32, 1], [W, 1], [1, 0])


@gluon.jit
def _places(keys, E: gl.constexpr, W: gl.constexpr):  # type: ignore[no-untyped-def]
    layout: gl.constexpr = _square(E, W)
    own = gl.load(keys + gl.arange(0, E, gl.SliceLayout(1, layout)))
    other = gl.load(keys + gl.arange(0, E, gl.SliceLayout(0, layout)))
    is_larger = gl.expand_dims(other, 0) > gl.expand_dims(own, 1)
    return own, gl.sum(is_larger.to(gl.int32), 1)


@gluon.jit
def expert_of(keys, slot, E: gl.constexpr, W: gl.constexpr):  # type: ignore[no-untyped-def]
    """The expert at one place. keys [E]"""
    own, place = _places(keys, E, W)
    return gl.sum(gl.where(place == slot, 65535 - (own & 65535), 0), 0)


@gluon.jit
def experts_of(  # type: ignore[no-untyped-def]
    keys, num_experts, layout: gl.constexpr,
    K: gl.constexpr, NORMALISED: gl.constexpr, SHARE: gl.constexpr, E: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Each warp's expert and its weight, both [W] in the layout; SHARE warps have one expert. Warps beyond the K-th's have some expert, and
    the weight 0."""
    table: gl.constexpr = _table(W, W)
    own, place = _places(keys, E, W)
    own = gl.convert_layout(own, gl.SliceLayout(1, table))
    place = gl.convert_layout(place, gl.SliceLayout(1, table))
    order = own >> 16
    bits = gl.where(order >= 0, order, order ^ 0x7FFF) << 16
    logit = bits.to(gl.float32, bitcast=True)
    first = gl.sum(gl.where(place == 0, logit, 0.0), 0)
    power = gl.where(order > -32767, gl.exp(logit - first), 0.0)
    counted = place < (K if NORMALISED else E)
    total = gl.sum(gl.where(counted, power, 0.0), 0)
    # NaN among the logits makes all weights NaN.
    total += gl.sum(gl.where(order == -32767, float("nan"), 0.0), 0)
    slot = gl.arange(0, W, gl.SliceLayout(0, table)) // SHARE
    is_its = gl.expand_dims(place, 1) == gl.expand_dims(slot, 0)
    found = gl.sum(gl.where(is_its, gl.expand_dims(65535 - (own & 65535), 1), 0), 0)
    weight = gl.sum(gl.where(is_its, gl.expand_dims(power, 1), 0.0), 0) / total
    weight = gl.where(slot < K, weight, 0.0)
    return gl.convert_layout(gl.minimum(found, num_experts - 1), layout), gl.convert_layout(weight, layout)
