"""The engine process on a node of a cluster: the ordinary one, with the clock of the server's machine."""

import os
import runpy

from octavo.ipc.clock import shift

if __name__ == "__main__":
    if offset := int(os.environ.pop("OCTAVO_CLOCK_OFFSET_NS", "0")):
        shift(offset)
    runpy.run_module("octavo.engine.process", run_name="__main__")
