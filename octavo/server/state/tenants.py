"""Tenants: what the server knows of each API key beside the key: its number and weight for the engine, its limits, and what it has used."""

import asyncio
import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from octavo import key_settings
from octavo.config import Config
from octavo.errors import BudgetSpent, RateLimited
from octavo.ipc.usage_ledger import Account, Remaining, UsageLedger, Used
from octavo.key_settings import KeySettings
from octavo.messages import GenerateRequest
from octavo.observe.journeys.journey import OpenJourney
from octavo.observe.metrics.key_metrics import key_metrics
from octavo.server.state.owners import OWNER_BYTES, Owners

LEDGER_FILE = "usage.ledger"
LIMIT_HEADERS = [
    f"x-ratelimit-{what}-{kind}" for kind in ("requests", "tokens") for what in ("limit", "remaining", "reset")
]
SYNC_SECONDS = 0.5
"""Between two times that what was counted is brought to the disk. A machine that stops loses what was counted in between, and while it was
being written."""
_LABELLED = 2**32
"""From here on: numbers of tenants that are a user or a header's value."""


class KeyTenant(msgspec.Struct, frozen=True, gc=False):
    number: int  # of the key, in the order in which the server was given them
    name: str  # in metrics and usage
    settings: KeySettings
    account: Account | None = None  # None: what it uses is not counted

    @property
    def weight(self) -> float:
        return self.settings.weight


_NOT_KNOWN = KeyTenant(0, "", KeySettings())


class Tenants:
    def __init__(self, config: Config, owners: Owners) -> None:
        """Raises ConfigError."""
        mode, _, self.header = config.scheduler.fairness.partition(":")
        self.header = self.header.lower()
        self._mode = mode
        settings = key_settings.decode(config.server.key_settings)
        keys = config.server.api_keys
        by_owner = {owners.of(key.encode()): settings.get(key, KeySettings()) for key in keys}
        self.ledger: UsageLedger | None = None
        accounts: dict[bytes, Account] = {}
        if keys and config.batches.files_folder:
            self.ledger = UsageLedger(Path(config.batches.files_folder) / LEDGER_FILE)
            accounts = self.ledger.accounts({_id_of(owner, of.name): of for owner, of in by_owner.items()})
        self._by_owner = {
            owner: KeyTenant(number, of.name or f"key-{number}", of, accounts.get(_id_of(owner, of.name)))
            for number, (owner, of) in enumerate(by_owner.items())
        }
        # By owner, of the keys whose usage is counted. Empty: the server has no keys, or nowhere to count.
        self.accounts = {owner: each.account for owner, each in self._by_owner.items() if each.account is not None}

    def all(self) -> Iterable[tuple[bytes, KeyTenant]]:
        """With their owners."""
        return self._by_owner.items()

    def of(self, owner: bytes) -> KeyTenant:
        return self._by_owner.get(owner, _NOT_KNOWN)

    def admit(self, owner: bytes, requests: Sequence[GenerateRequest]) -> None:
        """Count a response's requests as one, and let them begin. Raises RateLimited or BudgetSpent."""
        account = self.of(owner).account
        if account is None:
            return
        num_prompt = sum(len(request.prompt_ids) for request in requests)
        num_output = sum(
            request.params.n * (request.params.max_tokens or 0) for request in requests if request.pooling is None
        )
        refusal = account.admit(num_prompt, num_prompt + num_output)
        if refusal is None:
            return
        limits = account.settings
        if refusal.kind == "budget":
            left = max(0, limits.budget_tokens - account.used().today)
            raise BudgetSpent(
                f"this API key has {left} of its {limits.budget_tokens} tokens a day left, and the prompt has {num_prompt}: the next "
                f"day (UTC) begins in {refusal.seconds} s",
                refusal.seconds,
            )
        if refusal.kind == "tokens in flight":
            message = (
                f"the open requests of this API key may take {account.used().in_flight} tokens, and this one {num_prompt + num_output} "
                f"more; the limit is {limits.max_tokens_in_flight} (prompt and max_tokens)"
            )
        else:
            limit = limits.rpm if refusal.kind == "requests" else limits.tpm
            message = f"this API key has reached its limit of {limit} {refusal.kind} a minute"
        raise RateLimited(message, refusal.seconds)

    def number_of(self, owner: bytes, journey: OpenJourney) -> tuple[int, float]:
        """The tenant of a request, and its weight, for the engine."""
        tenant = self.of(owner)
        if self._mode == "key":
            return tenant.number, tenant.weight
        value = journey.user if self._mode == "user" else journey.header_value
        label = hashlib.blake2b(owner + value.encode(errors="replace"), digest_size=6).digest()
        return _LABELLED + int.from_bytes(label), tenant.weight

    def headers(self, owner: bytes) -> list[tuple[bytes, bytes]]:
        """OpenAI's x-ratelimit- headers, for a key with limits."""
        account = self.of(owner).account
        if account is None or not account.settings.has_limits:
            return []
        found = []
        for kind, remaining in ((b"requests", account.remaining_requests()), (b"tokens", account.remaining_tokens())):
            if remaining is not None:
                found += _headers(kind, remaining)
        return found

    def used(self, owner: bytes) -> Used | None:
        account = self.of(owner).account
        return None if account is None else account.used()

    def metrics(self) -> str:
        """Usage by key as Prometheus text, for all API processes."""
        if self.ledger is None:
            return ""
        keys = [(each.name, each.account.used()) for each in self._by_owner.values() if each.account is not None]
        return key_metrics((name, (*used,)) for name, used in keys)

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    async def keep(self) -> None:
        """Bring what was counted to the disk, again and again."""
        while self.ledger is not None:
            await asyncio.sleep(SYNC_SECONDS)
            await asyncio.to_thread(self.ledger.sync)


def _id_of(owner: bytes, name: str) -> bytes:
    """Of a key in the ledger. A name's usage stays with it when its key is replaced."""
    if not name:
        return owner
    return hashlib.blake2b(name.encode(), digest_size=OWNER_BYTES, person=b"octavo usage").digest()


def _headers(kind: bytes, remaining: Remaining) -> list[tuple[bytes, bytes]]:
    return [
        (b"x-ratelimit-limit-" + kind, b"%d" % remaining.limit),
        (b"x-ratelimit-remaining-" + kind, b"%d" % remaining.left),
        (b"x-ratelimit-reset-" + kind, duration(remaining.seconds).encode()),
    ]


def duration(seconds: float) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 120ms."""
    if seconds < 1:
        return f"{round(seconds * 1000)}ms"
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    text = f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
    return (f"{hours}h" if hours else "") + (f"{minutes}m" if hours or minutes else "") + text
