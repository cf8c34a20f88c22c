"""Usage by API key as Prometheus text. Unlike other metrics these are kept across restarts of the server (octavo/ipc/usage_ledger.py)."""

from collections.abc import Iterable

from octavo.observe.metrics.exposition import Scrape

MAX_KEYS = 100
"""Keys with series of their own; the others are one, "other"."""

Totals = tuple[int, int, int, int, int]
"""Tokens of prompts and of answers, requests, tokens of the day, tokens in flight."""


def key_metrics(keys: Iterable[tuple[str, Totals]]) -> str:
    by_key: dict[str, Totals] = {}
    for number, (key, used) in enumerate(keys):
        name = key if number < MAX_KEYS else "other"
        before = by_key.get(name, (0, 0, 0, 0, 0))
        by_key[name] = (
            before[0] + used[0], before[1] + used[1], before[2] + used[2], before[3] + used[3], before[4] + used[4],
        )  # fmt: skip
    scrape = Scrape({})
    tokens = [
        ({"key": key, "kind": kind}, used[at])
        for key, used in by_key.items()
        for at, kind in enumerate(("prompt", "output"))
    ]
    scrape.counter("octavo:key_tokens", "Tokens of prompts and answers by API key, kept across restarts.", tokens)
    requests = [({"key": key}, used[2]) for key, used in by_key.items()]
    scrape.counter("octavo:key_requests", "Requests that were admitted by API key, kept across restarts.", requests)
    today = [({"key": key}, used[3]) for key, used in by_key.items()]
    scrape.gauge("octavo:key_tokens_today", "Tokens since midnight (UTC) by API key.", today)
    in_flight = [({"key": key}, used[4]) for key, used in by_key.items()]
    scrape.gauge(
        "octavo:key_tokens_in_flight", "Prompts and max_tokens of open requests, in tokens, by API key.", in_flight
    )
    return scrape.text()
