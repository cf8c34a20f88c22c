"""Targets for Octavo on a CPU: ratios to the best peer measured in the same run, and absolute limits."""

from typing import NamedTuple

OCTAVO, OCTAVO_FLOAT32 = "octavo", "octavo-float32"


class Target(NamedTuple):
    title: str
    server: str
    load: str  # "": a measure of the server, not of a load
    measure: str
    must: float
    aim: float
    is_ratio: bool = True  # times better than the best peer; else a limit in the measure's own unit


TARGETS = (
    Target("c1: time per output token, ms", OCTAVO, "c1", "tpot", 1.45, 2.2),
    Target("c1: time to first token, ms", OCTAVO, "c1", "ttft", 2.0, 3.0),
    Target("c8: output tokens/s", OCTAVO, "c8", "rate", 2.7, 4.0),
    Target("c32: output tokens/s", OCTAVO, "c32", "rate", 2.4, 4.0),
    Target("shared prefix: output tokens/s", OCTAVO, "prefix", "rate", 2.5, 4.0),
    Target("float32, c1: output tokens/s", OCTAVO_FLOAT32, "c1", "rate", 1.05, 1.15),
    Target("float32, c8: output tokens/s", OCTAVO_FLOAT32, "c8", "rate", 1.3, 1.8),
    Target("float32, c32: output tokens/s", OCTAVO_FLOAT32, "c32", "rate", 1.4, 2.0),
    Target("start to first token, s", OCTAVO, "", "start", 3.0, 1.8, is_ratio=False),
    Target("resident memory, GB", OCTAVO, "", "memory", 0.8, 0.6, is_ratio=False),
    Target("memory beyond 1.3 × weights and pages, MB", OCTAVO, "", "beyond", 250, 250, is_ratio=False),
    Target("float32: the same, MB", OCTAVO_FLOAT32, "", "beyond", 250, 250, is_ratio=False),
)

MORE_IS_BETTER = {"rate": True, "tpot": False, "ttft": False, "start": False, "memory": False, "beyond": False}
