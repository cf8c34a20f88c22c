"""MachineCosts: what `octavo plan --measure` found out about one model on one machine, as a small file; and what follows for another
model on the same machine."""

from pathlib import Path

import msgspec

from octavo.errors import ConfigError
from octavo.plan.model_shape import ModelShape
from octavo.plan.settings import FleetSettings, Front, ReplicaSettings
from octavo.plan.speed import Speed
from octavo.plan.step_model import StepModel

FORMAT = 1
MAX_BYTES = 2**20
_MOST = 10**15  # of a count: parameters, bytes, pages
_POSITIVE = (
    "weights_bytes", "page_bytes", "page_size", "num_pages", "max_model_len", "max_num_seqs", "max_num_batched_tokens",
)  # fmt: skip
_POSITIVE_OF_SHAPE = (
    "num_parameters", "active_parameters", "num_layers", "hidden_size", "num_heads", "head_size", "kv_numbers", "vocab_size",
    "context_len",
)  # fmt: skip


class MachineCosts(msgspec.Struct, frozen=True):
    format: int
    made: str  # day and time
    version: str  # of octavo
    machine: str  # processor or GPU, in words
    is_cpu: bool
    shape: ModelShape
    weights_bytes: int
    page_bytes: int
    page_size: int
    num_pages: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    depth: int  # plans in flight while the next is made
    step: StepModel
    front: Front
    start_seconds: float  # from the command to a server that is ready
    num_steps: int  # that were measured
    median_error: float  # of the fit, as a share of the mean of steps of about one size
    p90_error: float
    noise: float = 0.0  # median share by which single steps are off
    flags: list[str] = []  # that the server was started with
    disturbed: float = 0.0  # share of the measured time that was left out, because others used the machine
    num_servers: int = 1  # that shared it, and were measured at once
    overlap_rows: int = 0  # the fewest rows of a step that was computed while the next plan was made

    # Of a probe while it was measured: what a probe of another time is compared with. None: there was none.
    speed: Speed | None = None

    @property
    def settings(self) -> FleetSettings:
        """A server as it was measured."""
        replica = ReplicaSettings(
            self.max_num_seqs,
            self.max_num_batched_tokens,
            self.num_pages,
            self.max_model_len,
            self.page_size,
            depth=self.depth,
            overlap_rows=self.overlap_rows,
        )
        return FleetSettings(1, replica, self.step, self.front)

    def step_of(self, shape: ModelShape, weights_bytes: int, kv_ratio: float) -> StepModel:
        """Steps of another model on this machine: each part in proportion to what it reads or computes. `kv_ratio`: bytes of a token's keys
        and values, as a share of the measured model's."""
        if shape == self.shape and weights_bytes == self.weights_bytes:
            return self.step
        own, step = self.shape, self.step
        seconds, floor = [], 0.0
        for tokens, measured in zip(step.tokens, step.seconds, strict=True):
            by_bytes = shape.bytes_read(tokens, weights_bytes) / own.bytes_read(tokens, self.weights_bytes)
            by_flops = shape.token_flops / own.token_flops
            # A step with one token reads weights; one of many computes products. Between them, by how far the measured one has come.
            part = 1 - step.seconds[0] / measured
            floor = max(floor, measured * ((1 - part) * by_bytes + part * by_flops))
            seconds.append(floor)
        row = step.row * shape.vocab_size * shape.hidden_size / (own.vocab_size * own.hidden_size)
        pair = step.pair * shape.pair_flops / own.pair_flops
        # What the host and other processes take stays.
        return msgspec.structs.replace(step, seconds=seconds, row=row, context=step.context * kv_ratio, pair=pair)


def read_costs(path: Path) -> MachineCosts:
    """Raises ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--costs {path}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"--costs {path}: it has more than {MAX_BYTES} bytes; give a file of octavo plan --measure")
    try:
        costs = msgspec.json.decode(data, type=MachineCosts)
    except (ValueError, RecursionError) as error:  # of msgspec, and where a text is not UTF-8
        raise ConfigError(f"--costs {path} is not a file of octavo plan --measure: {error}") from None
    if costs.format != FORMAT:
        raise ConfigError(
            f"--costs {path} has format {costs.format}; this version reads format {FORMAT}: measure again"
        )
    if wrong := _out_of_range(costs):
        raise ConfigError(f"--costs {path} is not a file of octavo plan --measure: {wrong} is out of range")
    return costs


def _out_of_range(costs: MachineCosts) -> str:
    """The name of a number that no measurement gives, and that others would be divided by; empty: there is none."""
    shape = costs.shape
    for holder, names in ((costs, _POSITIVE), (shape, _POSITIVE_OF_SHAPE)):
        for name in names:
            if not 0 < getattr(holder, name) <= _MOST:
                return name
    if costs.speed is not None and not (0 < costs.speed.prompts <= _MOST and 0 < costs.speed.rows <= _MOST):
        return "speed"
    if min(costs.step.seconds) <= 0:
        return "step.seconds"
    if shape.num_experts and not 0 < shape.experts_per_token <= shape.num_experts <= _MOST:
        return "experts_per_token"
    return "" if 0 <= shape.expert_parameters <= shape.num_parameters else "expert_parameters"


def write_costs(path: Path, costs: MachineCosts) -> None:
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(costs), indent=2) + b"\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
