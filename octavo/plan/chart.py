"""An SVG chart of latency over load, with the service levels and the knee."""

import math
from collections.abc import Callable, Sequence
from html import escape

from octavo.plan.answer import Load, knee_of
from octavo.plan.figures import Figures, Levels

_WIDTH, _HEIGHT = 760, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 150, 40, 45
_COLOURS = {"p50": "#2f6f9f", "p99": "#b3452c"}


def chart(loads: Sequence[Load], levels: Levels, title: str) -> str:
    """Time to the first token above, time between tokens below; both axes in the fleet's own terms."""
    knee = knee_of(loads)
    panels = [
        _panel(loads, levels, "ttft", "time to first token", 0, knee),
        _panel(loads, levels, "itl", "time between tokens", _HEIGHT, knee),
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {2 * _HEIGHT}" font-family="sans-serif" font-size="12">'
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="20" font-size="15">{escape(title)}</text>'
        + "".join(panels)
        + "</svg>\n"
    )


def _panel(loads: Sequence[Load], levels: Levels, measure: str, name: str, top: int, knee: float | None) -> str:
    def value_of(figures: Figures, which: str) -> float:
        spread = getattr(figures, measure)
        return float(getattr(spread, which)) if spread is not None else math.nan

    points = {
        which: [(load.factor * _rate(loads), value_of(load.figures, which)) for load in loads]
        for which in ("p50", "p99")
    }
    limits = {level: limit for level, limit in levels.limits.items() if level.startswith(measure + "_")}
    values = [value for line in points.values() for _, value in line if value > 0] + list(limits.values())
    if not values:
        return ""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    high = max(high, low + 1)
    most = max(x for x, _ in points["p50"])

    def across(rate: float) -> float:
        return _LEFT + rate / most * (_WIDTH - _LEFT - _RIGHT)

    def down(seconds: float) -> float:
        share = (math.log10(max(seconds, 10**low)) - low) / (high - low)
        return top + _HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM)

    parts = [f'<text x="{_LEFT}" y="{top + _TOP - 6}" fill="#333">{escape(name)}</text>']
    for power in range(low, high + 1):
        y = down(10.0**power)
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{_seconds(10.0**power)}</text>'
        )
    for load in loads:
        x = across(load.factor * _rate(loads))
        if load.factor in (0.5, 1.0, 1.5, 2.0):
            label = f"{load.factor * _rate(loads):.3g}/s"
            parts.append(
                f'<text x="{x:.1f}" y="{top + _HEIGHT - _BOTTOM + 16}" text-anchor="middle" fill="#666">{label}</text>'
            )
    parts += _lines(points, across, down)
    for level, limit in limits.items():
        y = down(limit)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#555" stroke-dasharray="5 4"/>'
        )
        parts.append(
            f'<text x="{_WIDTH - _RIGHT + 6}" y="{y + 4:.1f}" fill="#555">{escape(level)} {_seconds(limit)}</text>'
        )
    now = across(_rate(loads))
    parts.append(
        f'<line x1="{now:.1f}" x2="{now:.1f}" y1="{top + _TOP}" y2="{top + _HEIGHT - _BOTTOM}" stroke="#999"/>'
    )
    if knee is not None:
        x = across(knee * _rate(loads))
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top + _TOP}" y2="{top + _HEIGHT - _BOTTOM}" stroke="#d09000" stroke-width="2"/>'
        )
        parts.append(f'<text x="{x + 4:.1f}" y="{top + _TOP + 12}" fill="#a07000">knee</text>')
    return "".join(parts)


def _lines(
    points: dict[str, list[tuple[float, float]]], across: Callable[[float], float], down: Callable[[float], float]
) -> list[str]:
    parts = []
    for which, line in points.items():
        known = [(across(x), down(value)) for x, value in line if value > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in known)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{_COLOURS[which]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{_COLOURS[which]}"/>' for x, y in known]
        if known:
            x, y = known[-1]
            parts.append(f'<text x="{x + 6:.1f}" y="{y + 4:.1f}" fill="{_COLOURS[which]}">{which}</text>')
    return parts


def _rate(loads: Sequence[Load]) -> float:
    """Requests a second at the planned load."""
    return next(load.figures.rate for load in loads if load.factor == 1.0)


def _seconds(seconds: float) -> str:
    return f"{seconds:g} s" if seconds >= 1 else f"{seconds * 1000:g} ms"
