"""Before anything imports torch: its threads spin only briefly, as in the engine (see octavo/engine/build.py)."""

import os

os.environ.setdefault("GOMP_SPINCOUNT", "5000")
