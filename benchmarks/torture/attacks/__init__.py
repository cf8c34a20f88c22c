"""The catalogue of attacks: one list per theme, one entry per attack."""

from benchmarks.torture.attacks import (
    adapters,
    connections,
    files,
    gateway,
    grammars,
    heads,
    lists,
    pairs,
    prompts,
    sites,
)
from benchmarks.torture.attacks.base import Attack

CATALOGUE: list[Attack] = [
    *sites.ATTACKS,
    *heads.ATTACKS,
    *connections.ATTACKS,
    *lists.ATTACKS,
    *prompts.ATTACKS,
    *pairs.ATTACKS,
    *files.ATTACKS,
    *grammars.ATTACKS,
    *gateway.ATTACKS,
    *adapters.ATTACKS,
]
