"""ReplicaSettings: what a replica's plans depend on; FleetSettings: how many there are, and how requests get to them."""

import msgspec

from octavo.plan.step_model import StepModel


class ReplicaSettings(msgspec.Struct, frozen=True):
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    max_model_len: int
    page_size: int = 16
    num_host_pages: int = 0
    enable_prefix_caching: bool = True
    prefix_eviction: str = "adaptive"
    scheduling_policy: str = "fcfs"
    max_inter_token_ms: float | str = "auto"
    windows: tuple[int, ...] = (0,)
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 2**23
    num_stages: int = 1
    depth: int = 0  # plans in flight while the next is made: 1 on a GPU …
    overlap_rows: int = 0  # … where the last one has at least so many rows: a CPU's smaller steps are waited for


JITTER_PARTS = 128
_MOST_PARTS, _MOST_SECONDS = 1024, 1e6


class Jitter(msgspec.Struct, frozen=True):
    """By how much the time between two tokens differs at the client from that in the engine. A process that finds no free core sends a token
    later, and the next one right after it. The more streams there are, the more of that."""

    rows: int  # of the step that gave the second token: at least so many
    with_prompt: bool  # whether that step computed a part of a prompt
    seconds: list[float]  # numbers one of which comes as often as another; 0 on average

    def __post_init__(self) -> None:
        if not 0 < len(self.seconds) <= _MOST_PARTS or not all(abs(each) < _MOST_SECONDS for each in self.seconds):
            raise ValueError(f"jitter must be from 1 to {_MOST_PARTS} numbers of seconds")


class Front(msgspec.Struct, frozen=True):
    """What a request takes outside the engine."""

    seconds: float = 0.0  # the way in: HTTP, template, tokenizer
    token_seconds: float = 0.0  # … for each prompt token
    first_seconds: float = 0.0  # the way back, from the engine to the client, of the first token
    last_seconds: float = 0.0  # … and of the last: shorter, because the response has begun
    jitter: list[Jitter] = []

    def __post_init__(self) -> None:
        if len({len(each.seconds) for each in self.jitter}) > 1:
            raise ValueError("jitter must have as many numbers for each kind of step")

    def jitter_of(self, rows: int, with_prompt: bool) -> list[float]:
        """Of steps with so many rows: of the kind that was measured with the most rows that are no more, or else with the fewest."""
        kinds = [each for each in self.jitter if each.with_prompt == with_prompt] or self.jitter
        fewer = [each for each in kinds if each.rows <= rows]
        if fewer:
            return max(fewer, key=lambda each: each.rows).seconds
        return min(kinds, key=lambda each: each.rows).seconds if kinds else []


class FleetSettings(msgspec.Struct, frozen=True):
    num_replicas: int
    replica: ReplicaSettings
    model: StepModel
    front: Front = Front()
    routing_policy: str = "prefix"
    saturation_seconds: float = 2.0
    start_seconds: float = 30.0  # until a replica that is started takes requests
    detect_seconds: float = 1.0  # until the requests of a replica that has ended go on at others
    min_replicas: int = 0  # 0: their number stays
    max_replicas: int = 0


class Failure(msgspec.Struct, frozen=True):
    """Replicas end."""

    seconds: float
    num_replicas: int = 1
    comes_back: bool = True  # they are started again
