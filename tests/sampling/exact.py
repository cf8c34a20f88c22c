"""Sampling in plain Python and float64, one rule after the other: which tokens are possible, and how likely each is."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass
class Exact:
    kept: list[int]  # by rising id
    shares: np.ndarray  # [kept], probability of each
    is_clear: bool  # no value is within rounding of min-p's or top-p's border

    def allows(self, token: int, uniform: float, slack: float = 1e-5) -> bool:
        """Return whether the uniform selects that token by inverse cumulative shares, with borders off by at most the slack."""
        if token not in self.kept:
            return False
        index = self.kept.index(token)
        top = float(self.shares[: index + 1].sum())
        return top - self.shares[index] - slack <= uniform < top + slack


def exact(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> Exact:
    """Apply min-p, then top-k, then top-p to the rest; top_k 0: no limit. NaN is -inf, +inf the largest number."""
    values = np.nan_to_num(logits.astype(np.float64), nan=-np.inf, posinf=3.4028234663852886e38, neginf=-np.inf)
    peak = values.max()
    if peak == -np.inf:
        return Exact([0], np.ones(1), True)
    if temperature == 0.0:
        return Exact([int(np.argmax(np.nan_to_num(logits, nan=-np.inf, posinf=np.inf)))], np.ones(1), True)
    weights = np.exp(np.maximum((values - peak) / temperature, -1000.0)) * (values > -np.inf)
    kept = [int(i) for i in np.argsort(-values, kind="stable") if weights[i] >= min_p and values[i] > -np.inf]
    kept = kept[: top_k or len(kept)]
    is_clear = min_p in (0.0, 1.0) or bool((np.abs(weights / min_p - 1.0) > 1e-5).all())
    if top_p < 1.0:
        before = np.concatenate(([0.0], np.cumsum(weights[kept])))
        nucleus = top_p * before[-1]
        is_clear = is_clear and bool((np.abs(before / nucleus - 1.0) > 1e-5).all())
        kept = kept[: max(1, int((before[:-1] < nucleus).sum()))]
    kept.sort()
    return Exact(kept, weights[kept] / math.fsum(weights[kept]), is_clear)
