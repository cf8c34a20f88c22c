"""`octavo top`: a running server in the terminal: rows, queue, pages, and what requests wait for.
Knows nothing of the engine: it draws what the live feed of a server says."""

import base64
import shutil
import sys
from array import array
from collections import deque
from typing import Any

from octavo.talk import Remote

ROUTE = "/live"  # below the server's /v1
RATE_SECONDS = 3.0
"""Rates are means over this long."""
SHADES = {0: "·", 1: "c", 2: "S"}  # free, cached, shared; a page that one request owns is a block
OWNED = "█"
HOME, CLEAR_LINE, CLEAR_BELOW, HIDE, SHOW = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[?25l", "\x1b[?25h"


def run(url: str, api_key: str, once: bool = False) -> int:
    server = Remote(url, api_key)
    screen = Screen()
    is_terminal = sys.stdout.isatty() and not once
    try:
        if is_terminal:
            print(HIDE, end="")
        for state in server.events(ROUTE):
            screen.take(state)
            if once:
                print("\n".join(screen.draw(*_size())))
                return 0
            if is_terminal:
                lines = [line + CLEAR_LINE for line in screen.draw(*_size())]
                print(HOME + "\n".join(lines) + CLEAR_BELOW, end="", flush=True)
            else:
                print(screen.summary(), flush=True)
    except KeyboardInterrupt:
        pass
    finally:
        if is_terminal:
            print(SHOW)
    return 0


def _size() -> tuple[int, int]:
    size = shutil.get_terminal_size((100, 40))
    return size.columns, size.lines


class Screen:
    """What the feed has told so far, as lines."""

    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._pages: array[int] = array("H")
        self._past: deque[tuple[float, dict[str, float]]] = deque()
        self._ended: deque[dict[str, Any]] = deque(maxlen=50)

    def take(self, state: dict[str, Any]) -> None:
        self._state = state
        if state["pages"]:
            self._pages = array("H", base64.b64decode(state["pages"]))
        for start, codes in state.get("changes", ()):
            self._pages[start : start + len(codes)] = array("H", codes)
        self._ended.extend(state["ended"])
        self._past.append((state["time"], state["totals"]))
        while len(self._past) > 2 and self._past[0][0] < state["time"] - RATE_SECONDS:
            self._past.popleft()

    def summary(self) -> str:
        """One line."""
        state = self._state
        rates = self._rates()
        used = state["num_pages"] - state["num_free_pages"] - state["num_cached_pages"]
        return (
            f"{len(state['rows'])}/{state['max_rows']} rows  {state['num_waiting']} waiting  {rates['generation_tokens']:.0f} tokens/s  "
            f"{rates['prompt_tokens']:.0f} prompt tokens/s  {rates['steps']:.0f} steps/s  {used}/{state['num_pages']} pages  "
            f"device {rates['busy_seconds']:.0%}"
        )

    def draw(self, width: int, height: int) -> list[str]:
        state, rates = self._state, self._rates()
        gaps, firsts = rates["token_gaps"], rates["first_tokens"]
        lines = [
            "octavo top  " + self.summary(),
            f"first token {_mean(rates['first_token_seconds'], firsts)}   between tokens {_mean(rates['token_gap_seconds'], gaps)}   "
            f"ended {rates['finished']:.1f}/s   preempted {rates['preemptions']:.1f}/s",
            state["advice"] or "nothing has to wait",
            "",
            f"pages: {OWNED} owned  S {state['num_shared_pages']} shared  c {state['num_cached_pages']} cached  · {state['num_free_pages']} free"
            f"  swapped out {state['num_host_pages_used']}/{state['num_host_pages']}",
            *self._page_lines(width, max(1, height // 6)),
            "",
        ]
        room = max(2, (height - len(lines) - 3) // 3)
        lines += ["  row  request                     this step          tokens       pages", *self._row_lines(room)]
        lines += ["", f"queue: {state['num_waiting']}", *self._queue_lines(room)]
        lines += ["", "ended:", *self._ended_lines(max(1, height - len(lines) - 3))]
        return [line[:width] for line in lines[: height - 1]]

    def _rates(self) -> dict[str, float]:
        (before, old), (now, new) = self._past[0], self._past[-1]
        span = now - before
        return {name: (value - old[name]) / span if span > 0 else 0.0 for name, value in new.items()}

    def _page_lines(self, width: int, num_lines: int) -> list[str]:
        """The map; where there are more pages than places, a place shows the busiest of those it stands for."""
        count = len(self._pages)
        per_place = max(1, -(-count // max(1, width * num_lines)))
        places = [self._place(self._pages[at : at + per_place]) for at in range(0, count, per_place)]
        return ["".join(places[at : at + width]) for at in range(0, len(places), width)]

    def _place(self, codes: "array[int]") -> str:
        busiest = max(codes, key=lambda code: {2: 3, 1: 1, 0: 0}.get(code, 2))
        return SHADES.get(busiest, OWNED)

    def _row_lines(self, room: int) -> list[str]:
        rows = self._state["rows"]
        lines = [
            f"{row:5}  {_name(request, choice):26}  {f'prompt, {tokens}' if is_prompt else f'decode, {tokens}':16}  "
            f"{length:5}/{max_len:<6}  {pages:5}"
            for row, request, choice, is_prompt, tokens, length, _, max_len, pages, _ in rows[:room]
        ]
        return lines + ([f"       … and {len(rows) - room} more"] if len(rows) > room else [])

    def _queue_lines(self, room: int) -> list[str]:
        waiting = self._state["waiting"]
        return [
            f"       {_name(request, 0):26}  waits for {reason:7} {seconds:7.1f} s{'  preempted' if is_preempted else ''}"
            for request, reason, seconds, _, is_preempted, _ in waiting[:room]
        ]

    def _ended_lines(self, room: int) -> list[str]:
        return [
            f"       {_name(end['id'], 0):26}  {end['status']}  {end['seconds']:7.2f} s  {end['prompt_tokens']} → {end['output_tokens']}  "
            + "  ".join(f"{name} {seconds:.2f}" for name, seconds in end["stages"].items() if seconds >= 0.005)
            for end in [*self._ended][-room:][::-1]
        ]


def _name(request: str, choice: int) -> str:
    text = f"{request}#{choice}" if choice else request
    return text if len(text) <= 26 else text[:12] + "…" + text[-13:]


def _mean(total: float, count: float) -> str:
    return f"{total / count * 1000:.0f} ms" if count else "–"
