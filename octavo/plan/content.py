"""The tokens of a simulated request. Their values stand for the content up to them, so that equal prefixes have equal pages: the last
token of a page is the page's key. SimulatedCache and the router read keys from there, instead of hashing every page."""

import numpy as np
import numpy.typing as npt

from octavo.cache import KVCache
from octavo.cache.page_keys import KEY_BYTES
from octavo.plan.trace import Trace, TraceRequest

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """A hash of each (SplitMix64): a router's table wants ids whose bits are spread."""
    values = (values ^ (values >> _S30)) * _MIX_1
    values = (values ^ (values >> _S27)) * _MIX_2
    return values ^ (values >> _S31)


class Contents:
    """Tokens for the requests of one trace."""

    def __init__(self, trace: Trace, page_size: int) -> None:
        self._block_size, self._page_size = trace.block_size, page_size
        self._pages = np.arange(1, dtype=np.uint64)

    def tokens(self, request: TraceRequest, number: int) -> list[int]:
        """All tokens, prompt and output. `number`: of the request in its trace; those of a session share theirs."""
        size, length = self._page_size, request.prompt_len + request.output_len
        num_pages = length // size
        tokens = [0] * length
        if not num_pages:
            return tokens
        if len(self._pages) < num_pages:
            self._pages = np.arange(2 * num_pages, dtype=np.uint64)
        # Even numbers: a request's or a session's own stream; odd ones: blocks that a trace names.
        own = 2 * (number if request.session < 0 else (1 << 40) + request.session)
        streams = np.full(num_pages, own, np.uint64)
        if request.prefix:
            named = min(len(request.prefix) * self._block_size, request.prompt_len) // size
            ends = (np.arange(1, named + 1) * size - 1) // self._block_size
            streams[:named] = np.array(request.prefix, np.uint64)[ends] * np.uint64(2) + np.uint64(1)
        tokens[size - 1 :: size] = mixed(mixed(streams) + self._pages[:num_pages] * _ODD).tolist()
        return tokens


def keys_of(root: bytes, tokens: list[int], page_size: int) -> list[bytes]:
    """As cache.page_keys.keys_of(), for tokens of Contents."""
    last = (len(tokens) - 1) // page_size * page_size
    return [token.to_bytes(KEY_BYTES, "little") for token in tokens[page_size - 1 : last : page_size]]


class SimulatedCache(KVCache):
    """A KVCache whose page keys are read from the tokens."""

    _reuses_keys = False  # there is nothing to compute, and such tokens do not fit into 64 bits with a sign

    def _new_keys(self, parent: bytes, tokens: list[int], first: int, end: int) -> list[bytes]:
        size = self.page_size
        return [token.to_bytes(KEY_BYTES, "little") for token in tokens[(first + 1) * size - 1 : end * size : size]]
