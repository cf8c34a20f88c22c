"""Traces from a description: how many requests a second, how they come, how long they are, what they share. They depend on the seed
alone."""

import math
import random
from typing import Literal, NamedTuple, get_args

from octavo.errors import ConfigError
from octavo.plan.trace import MAX_REQUESTS, Trace, TraceRequest

Arrivals = Literal["poisson", "bursty", "diurnal", "constant"]
ARRIVALS: tuple[str, ...] = get_args(Arrivals)
_BURST, _CALM = 4.0, 0.25  # times the rate, in bursts and between them
_BURST_SECONDS, _CALM_SECONDS = 10.0, 40.0  # how long they last, on average: the mean rate is the given one
_DAY_SWING = 0.7  # share of the mean by which a day's rate rises and falls


class Lengths(NamedTuple):
    """Lengths of prompts or outputs: log-normal around a mean. `spread`: standard deviation of the logarithm; 0: all alike."""

    mean: int
    spread: float = 0.0

    def draw(self, dice: random.Random) -> int:
        if not self.spread:
            return self.mean
        # The mean of exp(N(μ, σ)) is exp(μ + σ² / 2).
        drawn = dice.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return max(1, min(round(drawn), 100 * self.mean))


class Shape(NamedTuple):
    rate: float  # requests a second; with sessions: of all their turns
    seconds: float
    prompts: Lengths
    outputs: Lengths
    arrivals: Arrivals = "poisson"
    shared_prefix: int = 0  # tokens that prompts begin with, in addition
    num_prefixes: int = 1  # how many different ones there are
    turns: int = 1  # of a session
    pause: float = 10.0  # seconds between an answer and the next turn
    day_seconds: float = 86_400.0  # of a diurnal load


def trace_of(shape: Shape, seed: int) -> Trace:
    if shape.rate * shape.seconds > MAX_REQUESTS:
        most = MAX_REQUESTS / shape.rate
        raise ConfigError(
            f"--rate {shape.rate:g} for {shape.seconds:g} s is more than {MAX_REQUESTS:,} requests: use --seconds {most:.0f}"
        )
    dice = random.Random(seed)
    requests: list[TraceRequest] = []
    following: list[TraceRequest] = []
    session = 0
    for seconds in _times(shape, shape.rate / shape.turns, dice):
        prefix = [dice.randrange(shape.num_prefixes)] if shape.shared_prefix else []
        length = shape.shared_prefix + shape.prompts.draw(dice)
        output = shape.outputs.draw(dice)
        if shape.turns == 1:
            requests.append(TraceRequest(seconds, length, output, prefix))
            continue
        requests.append(TraceRequest(seconds, length, output, prefix, session))
        for _ in range(shape.turns - 1):
            length += output + shape.prompts.draw(dice)
            output = shape.outputs.draw(dice)
            pause = dice.expovariate(1 / shape.pause) if shape.pause else 0.0
            following.append(TraceRequest(pause, length, output, prefix, session, True))
        session += 1
    return Trace(shape.arrivals, [*requests, *following], max(1, shape.shared_prefix))


def _times(shape: Shape, rate: float, dice: random.Random) -> list[float]:
    times, now = [0.0], 0.0
    factor, changes = 1.0, 0.0
    if shape.arrivals == "bursty":
        factor, changes = _CALM, dice.expovariate(1 / _CALM_SECONDS)
    while True:
        match shape.arrivals:
            case "constant":
                now += 1 / rate
            case "diurnal":  # thinned out from the rate of the busiest hour
                now += dice.expovariate(rate * (1 + _DAY_SWING))
                share = (1 + _DAY_SWING * math.sin(2 * math.pi * now / shape.day_seconds)) / (1 + _DAY_SWING)
                if dice.random() > share:
                    if now > shape.seconds:
                        return times
                    continue
            case "bursty":
                gap = dice.expovariate(rate * factor)
                while now + gap > changes:  # no memory: the gap begins again with the other rate
                    now = changes
                    is_burst = factor == _CALM
                    factor = _BURST if is_burst else _CALM
                    changes += dice.expovariate(1 / (_BURST_SECONDS if is_burst else _CALM_SECONDS))
                    gap = dice.expovariate(rate * factor)
                now += gap
            case _:
                now += dice.expovariate(rate)
        if now > shape.seconds:
            return times
        times.append(now)
