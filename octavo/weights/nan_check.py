"""Check a stream of weights for NaN and infinity. A tensor that holds one is refused by name."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from octavo.errors import ConfigError
from octavo.quants import Weight


def finite(tensors: Iterator[tuple[str, Weight]]) -> Iterator[tuple[str, Weight]]:
    """Yield the same tensors, checked. On a GPU a check per tensor would make the host wait each time, so the results are
    read once, after the last tensor."""
    asked: list[tuple[str, torch.Tensor]] = []
    for name, weight in tensors:
        if not isinstance(weight, torch.Tensor):
            if not weight.is_finite():
                raise _refusal(name, "its scales")
        elif weight.is_floating_point() and not weight.is_meta:
            # One pass and no temporary: a NaN or an infinity anywhere shows in the sum.
            total = weight.sum(dtype=torch.float32)
            if weight.is_cuda:
                asked.append((name, total))
            elif not torch.isfinite(total):
                raise _refusal(name, str(weight.dtype).removeprefix("torch."))
        yield name, weight
    if asked:
        bad = (~torch.isfinite(torch.stack([total for _, total in asked]))).nonzero().flatten().tolist()
        if bad:
            raise _refusal(asked[bad[0]][0], "it")


def _refusal(name: str, where: str) -> ConfigError:
    return ConfigError(
        f"the checkpoint's tensor {name} holds a NaN or an infinity (in {where}): its file is damaged, or its numbers are too "
        "large for the type that --dtype asks for"
    )
