"""Arc coverage of Octavo's own code, by sys.settrace: which pairs of consecutive lines a case executes."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any

import octavo

_ROOT = str(Path(octavo.__file__).parent)

Arc = tuple[CodeType, int, int]
_Tracer = Callable[[FrameType, str, Any], Any]


class Coverage:
    """Use as a context manager around a case. `new` is then what it executed for the first time."""

    def __init__(self) -> None:
        self.seen: set[Arc] = set()
        self.new: set[Arc] = set()
        self._is_ours: dict[CodeType, bool] = {}
        self._before: Any = None

    def __enter__(self) -> "Coverage":
        self.new = set()
        self._before = sys.gettrace()
        sys.settrace(self._called)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        sys.settrace(self._before)
        self.seen |= self.new

    def lines(self) -> dict[str, tuple[int, int]]:
        """File → (lines executed, lines of the functions that were entered)."""
        hit: dict[str, set[int]] = {}
        known: dict[str, set[int]] = {}
        for code, _, line in self.seen:
            hit.setdefault(code.co_filename, set()).add(line)
        for code in {code for code, _, _ in self.seen}:
            own = {line for _, _, line in code.co_lines() if line is not None and line != code.co_firstlineno}
            known.setdefault(code.co_filename, set()).update(own)
        return {
            file.removeprefix(_ROOT + "/"): (len(hit[file] & known[file]), len(known[file])) for file in sorted(known)
        }

    def _called(self, frame: FrameType, event: str, arg: Any) -> _Tracer | None:
        code = frame.f_code
        is_ours = self._is_ours.get(code)
        if is_ours is None:
            is_ours = self._is_ours[code] = code.co_filename.startswith(_ROOT)
        if not is_ours:
            return None
        seen, new, before = self.seen, self.new, 0

        def on_event(frame: FrameType, event: str, arg: Any) -> _Tracer:
            nonlocal before
            if event == "line":
                arc = (code, before, frame.f_lineno)
                before = frame.f_lineno
                if arc not in seen:
                    new.add(arc)
            return on_event

        return on_event
