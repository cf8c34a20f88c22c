"""One uniform number per (seed, position): the same whatever else runs, on any rank, before or after a preemption.
Knows nothing of tokens."""

import numpy as np

from octavo.sampling.state import Floats, Ints

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Ints, positions: Ints) -> Floats:
    """In [0, 1), with 53 random bits; element i depends on seeds[i] and positions[i] alone."""
    # The seed is mixed before the position is added: neighbouring seeds must not give shifted copies of one stream.
    mixed = _mix(seeds.view(np.uint64)) + positions.view(np.uint64) * _GOLDEN
    return (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The splitmix64 generator's output for one state; array arithmetic wraps modulo 2**64, as it must."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
