"""Screen: lays out the states of a live feed as lines for a terminal of any size."""

import base64
import textwrap
from array import array
from collections import deque
from collections.abc import Sequence
from typing import Any

RATE_SECONDS = 3.0
"""Rates are averages over this time."""
REASONS = {
    "grammar": "its grammar", "rows": "a free row", "pages": "free KV pages", "budget": "the step's token budget",
    "order": "earlier requests", "turn": "other requests' turns", "step": "the end of the step",
}  # fmt: skip
SPARK_SECONDS = 300
TOKENS = 4  # place of the generated tokens in a point of the history (LivePast)
HELD, LOADING = 65535, 65534
# Free, cached, shared, being filled from a tier, cached and held; a page with a single owner is a block.
SHADES = {0: "·", 1: "c", 2: "S", LOADING: "l", HELD: "h"}
OWNED = "█"
BARS = "▁▂▃▄▅▆▇█"
PALETTE = (39, 78, 170, 203, 44, 141, 112, 69, 176, 37, 105, 167)  # of the 256 colours, far from each other and yellow
SHARED_COLOUR, FAINT, WARNING, PLAIN = "\x1b[38;5;220m", "\x1b[2m", "\x1b[1;33m", "\x1b[0m"


class Screen:
    def __init__(self) -> None:
        self._state: dict[str, Any] = {}
        self._pages: array[int] = array("H")
        self._past: deque[tuple[float, dict[str, float]]] = deque()
        self._tokens: dict[int, float] = {}  # tokens generated in each second of the last minutes
        self._ended: deque[dict[str, Any]] = deque(maxlen=50)
        self._lost = ""

    @property
    def is_empty(self) -> bool:
        return not self._state

    @property
    def seconds_seen(self) -> float:
        """For how long the feed has been followed, up to RATE_SECONDS."""
        return self._past[-1][0] - self._past[0][0] if self._past else 0.0

    def remember(self, history: dict[str, Any]) -> None:
        """Take in the server's history, whose intervals are seconds."""
        for past in history.get("points", ()):
            self._tokens[int(past[0])] = past[TOKENS]

    def take(self, state: dict[str, Any]) -> None:
        self._lost = ""
        if state["pages"]:  # a complete map: a new feed, perhaps of another engine, whose totals start at 0
            self._pages = array("H", base64.b64decode(state["pages"]))
            self._past.clear()
            self._ended.clear()
        for start, codes in state.get("changes", ()):
            self._pages[start : start + len(codes)] = array("H", codes)
        self._state = state
        self._ended.extend(state["ended"])
        self._past.append((state["time"], state["totals"]))
        while len(self._past) > 2 and self._past[0][0] < state["time"] - RATE_SECONDS:
            self._past.popleft()
        self.remember({"points": state.get("recent", ())})
        for second in [second for second in self._tokens if second < state["time"] - SPARK_SECONDS]:
            del self._tokens[second]

    def lose(self, why: str, when: str) -> None:
        """Note that the feed has ended: the last state is shown with a warning."""
        self._lost = self._lost or f"No connection since {when}, retrying. This is the last known state. {why}"

    def summary(self) -> str:
        """The main figures in one line."""
        return "  ".join(self._figures())

    def draw(self, width: int, height: int, is_coloured: bool = False, name: str = "octavo top (q quits)") -> list[str]:
        state, rates = self._state, self._rates()
        figures = [
            name, *self._figures(),
            f"first token {_mean(rates['first_token_seconds'], rates['first_tokens'])}",
            f"between tokens {_mean(rates['token_gap_seconds'], rates['token_gaps'])}",
            f"finished {rates['finished']:.1f}/s", f"preempted {rates['preemptions']:.1f}/s",
        ]  # fmt: skip
        lines = [*_flow(figures, width), *self._spark(width), *self._replica_lines(max(1, height // 6))]
        news = self._lost or state["advice"] or self._calm()
        news_lines = textwrap.wrap(news, max(1, width)) or [""]
        at_news = (len(lines), len(lines) + len(news_lines))
        lines += [*news_lines, "", *_flow(self._legend(), width)]
        first_page = len(lines)
        pages = self._page_lines(width, max(1, height // 6))
        lines += ["".join(place for place, _ in line) for line in pages] + [""]
        room = max(2, (height - len(lines) - 4) // 3)
        wide = 26 if width >= 76 else max(8, width - 50)
        lines += self._row_lines(room, wide)
        lines += ["", f"queue: {state['num_waiting']}{self._lanes()}", *self._queue_lines(room, wide)]
        lines += ["", "finished:", *self._ended_lines(max(1, height - len(lines) - 3), wide, width)]
        lines = [line[:width] for line in lines[: height - 1]]
        if is_coloured:
            self._paint(lines, first_page, pages, at_news)
        return lines

    def _calm(self) -> str:
        if self._state["rows"]:
            return "No request has to wait."
        return "Idle: there are no requests. This screen follows them as they come."

    def _figures(self) -> list[str]:
        state, rates = self._state, self._rates()
        used = state["num_pages"] - state["num_free_pages"] - state["num_cached_pages"]
        return [
            f"{len(state['rows'])}/{state['max_rows']} rows",
            f"{state['num_waiting']} waiting",
            f"{rates['generation_tokens']:.0f} tokens/s",
            f"{rates['prompt_tokens']:.0f} prompt tokens/s",
            f"{rates['steps']:.0f} steps/s",
            f"{used}/{state['num_pages']} pages",
            f"device {rates['busy_seconds']:.0%}",
        ]

    def _rates(self) -> dict[str, float]:
        (before, old), (now, new) = self._past[0], self._past[-1]
        span = now - before
        return {name: (value - old[name]) / span if span > 0 else 0.0 for name, value in new.items()}

    def _spark(self, width: int) -> list[str]:
        """Sparkline of tokens per second over the last minutes, the newest at the right."""
        now = int(self._state["time"])
        seconds = range(now - min(SPARK_SECONDS, max(1, width - 24)), now)
        rates = [self._tokens.get(second, 0.0) for second in seconds]
        while rates and not rates[0]:
            del rates[0]
        if not rates:
            return []
        top = max(rates)
        bars = "".join(BARS[min(7, int(8 * rate / top))] if rate else " " for rate in rates)
        return [f"tokens/s {bars} up to {top:.0f}"]

    def _replica_lines(self, num_lines: int) -> list[str]:
        """A line for each replica of a fleet; the last one counts those that do not fit."""
        replicas = self._state.get("replicas") or []
        lines = []
        for each in replicas:
            line = f"replica {each['replica']} {each['status']}"
            if each["totals"] is not None:
                used = each["num_pages"] - each["num_free_pages"] - each["num_cached_pages"]
                prompt, cached = each["totals"]["prompt_tokens"], each["totals"]["cached_tokens"]
                line += f"  {each['num_rows']}/{each['max_rows']} rows  {each['num_waiting']} waiting"
                line += f"  {each['waiting_seconds']:.1f} s of work  {used}/{each['num_pages']} pages"
                line += f"  {cached / prompt if prompt else 0:.0%} of prompts cached"
            lines.append(f"{line}  {each['place']}" if each["place"] else line)
        if len(lines) > num_lines:
            lines[num_lines - 1 :] = [f"and {len(lines) - num_lines + 1} more replicas"]
        return lines

    def _legend(self) -> list[str]:
        state = self._state
        parts = [
            f"pages: {OWNED} owned", f"S {state['num_shared_pages']} shared", f"c {state['num_cached_pages']} cached",
            f"· {state['num_free_pages']} free",
        ]  # fmt: skip
        if state.get("num_held_pages"):
            parts.append(f"h {state['num_held_pages']} of these held")
        if state.get("num_loading_pages"):
            parts.append(f"l {state['num_loading_pages']} loading")
        if state.get("num_ram_pages"):
            parts.append(f"in host memory {state['num_ram_pages']}")
        if state.get("num_tier_pages"):
            parts.append(f"on disk {state['num_tier_pages']}")
        if state["num_host_pages"]:
            parts.append(f"swapped out {state['num_host_pages_used']}/{state['num_host_pages']}")
        return parts

    def _page_lines(self, width: int, num_lines: int) -> list[list[tuple[str, int]]]:
        """The page map: (sign, code) for each place. If there are more pages than places, a place shows the busiest of its
        pages."""
        count = len(self._pages)
        per_place = max(1, -(-count // max(1, width * num_lines)))
        places = [self._place(self._pages[at : at + per_place]) for at in range(0, count, per_place)]
        return [places[at : at + width] for at in range(0, len(places), width)]

    def _place(self, codes: "array[int]") -> tuple[str, int]:
        busiest = max(codes, key=lambda code: {2: 4, HELD: 2, 1: 1, 0: 0}.get(code, 3))
        return SHADES.get(busiest, OWNED), busiest

    def _paint(
        self, lines: list[str], first_page: int, pages: list[list[tuple[str, int]]], at_news: tuple[int, int]
    ) -> None:
        for at, places in enumerate(pages, first_page):
            if at < len(lines):
                lines[at] = "".join(_colour(code) + sign for sign, code in places) + PLAIN
        if self._lost or self._state["advice"]:
            for at in range(at_news[0], min(at_news[1], len(lines))):
                lines[at] = f"{WARNING}{lines[at]}{PLAIN}"

    def _row_lines(self, room: int, wide: int) -> list[str]:
        rows = self._state["rows"]
        lines = [f"  row  {'request':{wide}}  this step         tokens  pages"]
        lines += [
            f"{row:5}  {_name(request, choice, wide):{wide}}  {f'prompt +{tokens}' if is_prompt else f'decode +{tokens}':13}"
            f"{f'{length}/{max_len}':>11}  {pages:5}"
            for row, request, choice, is_prompt, tokens, length, _, max_len, pages, _ in rows[:room]
        ]
        return lines + ([f"       … and {len(rows) - room} more"] if len(rows) > room else [])

    def _lanes(self) -> str:
        lanes = self._state.get("lanes", ())
        return "".join(f"   {name} {count}" for name, count, _ in lanes) if len(lanes) > 1 else ""

    def _queue_lines(self, room: int, wide: int) -> list[str]:
        waiting, total = self._state["waiting"], self._state["num_waiting"]
        lines = [
            f"       {_name(request, 0, wide):{wide}}  waits for {REASONS.get(reason, reason):23} {seconds:7.1f} s{'  preempted' if is_preempted else ''}"
            for request, reason, seconds, _, is_preempted, _ in waiting[:room]
        ]
        return lines + ([f"       … and {total - len(lines)} more"] if total > len(lines) else [])

    def _ended_lines(self, room: int, wide: int, width: int) -> list[str]:
        """Parts at the end of a line that do not fit into `width` are left out whole."""
        lines = []
        for end in [*self._ended][-room:][::-1]:
            line = f"       {_name(end['id'], 0, wide):{wide}}  {end['status']}  {end['seconds']:7.2f} s  "
            line += f"{end['prompt_tokens']} → {end['output_tokens']}"
            stages = [f"{name} {seconds:.2f}" for name, seconds in end["stages"].items() if seconds >= 0.005]
            for part in (_cached(end), *stages):
                if part and len(line) + 2 + len(part) <= width:
                    line += f"  {part}"
            lines.append(line)
        return lines


def _cached(end: dict[str, Any]) -> str:
    """What the prefix cache had of a request's prompt, and why no more, if more could have been there."""
    if end.get("cache_miss") not in ("new", "evicted"):
        return ""
    found = f"{end['cached_tokens']} cached, "
    if end["cache_miss"] == "evicted":
        return f"{found}more was evicted"
    return "" if end.get("differs_at") is None else f"{found}differs at token {end['differs_at']}"


def _flow(parts: Sequence[str], width: int) -> list[str]:
    """Lay out the parts in lines of `width`, without breaking a part that fits."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + 2 + len(part) > width:
            lines.append(part)
        else:
            lines[-1] += f"  {part}" if lines[-1] else part
    return lines


def _colour(code: int) -> str:
    if code == 2:
        return SHARED_COLOUR
    return f"{PLAIN}{FAINT}" if code < 2 else f"{PLAIN}\x1b[38;5;{PALETTE[code % len(PALETTE)]}m"


def _name(request: str, choice: int, wide: int) -> str:
    text = f"{request}#{choice}" if choice else request
    half = (wide - 1) // 2
    return text if len(text) <= wide else text[: wide - 1 - half] + "…" + text[-half:]


def _mean(total: float, count: float) -> str:
    return f"{total / count * 1000:.0f} ms" if count else "–"
