"""Counts what a piece of code calls. A budget in calls holds on every machine; one in microseconds does not."""

import sys
from types import FrameType
from typing import Any, Self


class Calls:
    """Within `with`, counts the calls of this thread: of Python functions, of functions in C, and of coroutines resumed."""

    def __init__(self) -> None:
        self.num = 0

    def __enter__(self) -> Self:
        sys.setprofile(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _count(self, _frame: FrameType, event: str, _argument: Any) -> None:
        self.num += event in ("call", "c_call")
