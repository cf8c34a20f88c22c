"""A second stream for work that does not depend on the next product."""

from collections.abc import Callable

import torch


class SideStream:
    """Runs launches beside those of the current stream, in captured steps. Elsewhere the host is the slower one, and a second stream would
    cost it more than is gained: there, and on a CPU, they run in their order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def run(self, launch: Callable[[], None]) -> Callable[[], object]:
        """Make a launch that begins after what was launched so far. Returns what makes later launches wait for it."""
        side = self._stream
        if side is None or not torch.cuda.is_current_stream_capturing():
            launch()
            return lambda: None
        main = torch.cuda.current_stream(self._device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            launch()
        return lambda: main.wait_stream(side)
