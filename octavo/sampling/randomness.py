"""One uniform number per (seed, position): the same in any batch, on any rank, before and after a preemption."""

import numpy as np

from octavo.sampling.state import Floats, Ints

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def uniforms(seeds: Ints, positions: Ints) -> Floats:
    """Uniforms in [0, 1) with 53 random bits; element i depends only on seeds[i] and positions[i]."""
    # Mix the seed before adding the position: neighbouring seeds must not give shifted copies of one stream.
    mixed = _mix(seeds.view(np.uint64)) + positions.view(np.uint64) * _GOLDEN
    return (_mix(mixed) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(values: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The output of splitmix64 for one state. Relies on array arithmetic wrapping modulo 2**64."""
    z = values + _GOLDEN
    z = (z ^ (z >> np.uint64(30))) * _FIRST
    z = (z ^ (z >> np.uint64(27))) * _SECOND
    return z ^ (z >> np.uint64(31))
