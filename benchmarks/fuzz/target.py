"""What a target of the fuzzer is."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.fuzz.mutate import mutate, mutate_json


@dataclass(frozen=True)
class Target:
    """`run` parses a case. An exception other than those in `refusals` is a fault, as are a signal, a case that takes longer than
    `seconds`, and more memory than the process is allowed.

    `words`: pieces that the format knows. `is_json`: half of the cases are mutated as JSON values, `prefix` and all.
    `generate`: makes a case from nothing; half of the cases then come from there."""

    name: str
    seeds: Sequence[bytes]
    run: Callable[[bytes], None]
    refusals: tuple[type[BaseException], ...]
    words: Sequence[str] = ()
    is_json: bool = False
    encode: Callable[[Any], bytes] = field(default=lambda value: json.dumps(value).encode("utf-8", "surrogatepass"))
    decode: Callable[[bytes], Any] = json.loads
    generate: Callable[[random.Random], bytes] | None = None
    seconds: float = 5.0

    def case(self, dice: random.Random, corpus: Sequence[bytes]) -> bytes:
        if self.generate is not None and dice.random() < 0.5:
            return self.generate(dice)
        parent = dice.choice(corpus)
        if self.is_json and dice.random() < 0.6:
            try:
                return self.encode(mutate_json(dice, self.decode(parent), self.words))
            except (ValueError, RecursionError, OverflowError):  # the parent is not JSON any more
                pass
        return mutate(dice, parent, [word.encode("utf-8", "surrogatepass") for word in self.words], corpus)
