"""The collection: schemas of our own in many styles, made from a seed. It is frozen: DIGEST is that of all of them as JSON, and changing a
style without meaning to is an error."""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from benchmarks.schemas.styles import STYLES
from benchmarks.schemas.words import Source

SEED = "2026-11-17"
NUM_OF_EACH = 96
NUM_LARGE = 24  # large ones take long
DIGEST = "c7f3d750bddcacdf4b51b4acfc517cd3"


def collection(seed: str = SEED) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name, schema) of each."""
    for style, make in STYLES.items():
        for number in range(NUM_LARGE if style == "large" else NUM_OF_EACH):
            yield f"{style}-{number}", make(Source(f"{seed}/{style}/{number}"))


def digest(seed: str = SEED) -> str:
    found = hashlib.sha256()
    for name, schema in collection(seed):
        found.update(f"{name} {json.dumps(schema)}\n".encode())
    return found.hexdigest()[:32]
