"""Trace: requests with their times, lengths and shared prefixes. No text.

A request's prompt may begin with blocks that others begin with, too: `prefix` names them, block by block, and equal names mean equal
tokens up to there. Requests of one session continue each other: a prompt begins with the prompt and the output before it."""

from collections.abc import Sequence

import msgspec

MAX_REQUESTS = 5_000_000
MAX_TOKENS = 10_000_000  # of one prompt, or of one output


class TraceRequest(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    seconds: float  # after the start; with `after_previous`: after the end of the session's request before it
    prompt_len: int
    output_len: int
    prefix: list[int] = []  # names of its blocks, of Trace.block_size tokens each
    session: int = -1  # −1: none
    after_previous: bool = False


class Trace(msgspec.Struct, frozen=True):
    name: str
    requests: list[TraceRequest]  # by time; those with `after_previous` at the time at which they are known
    block_size: int = 512
    notes: list[str] = []

    @property
    def seconds(self) -> float:
        """From the first to the last arrival."""
        times = [request.seconds for request in self.requests if not request.after_previous]
        return times[-1] - times[0] if times else 0.0

    @property
    def rate(self) -> float:
        """Requests a second."""
        return len(self.requests) / self.seconds if self.seconds else float(len(self.requests))

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_len for request in self.requests)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_len for request in self.requests)

    def scaled(self, rate: float = 1.0, length: float = 1.0) -> "Trace":
        """`rate`: so many times as many requests a second, by shorter gaps. `length`: prompts and outputs so many times as long."""
        if rate == 1.0 and length == 1.0:
            return self
        requests = [
            msgspec.structs.replace(
                each,
                seconds=each.seconds if each.after_previous else each.seconds / rate,
                prompt_len=max(1, round(each.prompt_len * length)),
                output_len=max(1, round(each.output_len * length)),
            )
            for each in self.requests
        ]
        block_size = max(1, round(self.block_size * length))
        return msgspec.structs.replace(self, requests=requests, block_size=block_size)

    def thinned(self, share: float) -> "Trace":
        """A sample of the requests, whole sessions at a time: for a fleet of as small a share of the replicas, which then have the load that
        they have in the whole one. A smaller fleet evens out less of a burst, so its tails are a little longer."""
        if share >= 1.0:
            return self
        limit = int(share * 2**32)
        requests = [
            each for number, each in enumerate(self.requests)
            if (each.session if each.session >= 0 else number + 1) * 0x9E3779B1 % 2**32 < limit
        ]  # fmt: skip
        return msgspec.structs.replace(self, requests=requests)

    def limited(self, count: int = 0, seconds: float = 0.0) -> "Trace":
        """The first requests; 0: no limit."""
        requests: Sequence[TraceRequest] = self.requests
        if seconds and requests:
            end = requests[0].seconds + seconds
            requests = [each for each in requests if each.after_previous or each.seconds <= end]
        if count:
            requests = requests[:count]
        return self if len(requests) == len(self.requests) else msgspec.structs.replace(self, requests=list(requests))
