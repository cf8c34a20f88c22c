"""Open requests of one asyncio process: deltas of all requests come in together, and each reader takes those of its request.

Every open request keeps the tokens received so far. They are all that another engine needs to continue it."""

import asyncio
import time
from collections.abc import Callable, Collection
from hashlib import blake2b

import msgspec

from octavo.errors import OctavoError, RequestFailed
from octavo.ipc.heartbeat import is_named
from octavo.ipc.usage_ledger import Account, Charge
from octavo.messages import Finish, GenerateRequest, TokenDelta

PROOF_TOKENS = 8
"""A request that has received this many more tokens, in all of its choices together, is not the cause of the earlier crash: it
would have crashed the next engine before."""
SUSPICIOUS = 2
"""A request that held a row in this many engines when they ended, without progress in between, is a suspect."""
MAX_ALONE = 2
"""A request that was alone in this many engines when they ended is failed."""
BAN_SECONDS = 600.0
"""How long a request identical to a failed one is refused: clients retry on their own."""
_MAX_BANNED = 64
_MANY_DELTAS = 256
"""Unread deltas of a slow reader are joined from this number on, so that waiting tokens cost no more than their ids."""


class _Stream:
    __slots__ = (
        "account",
        "alone",
        "deltas",
        "is_charged",
        "mark",
        "note_charge",
        "num_charged",
        "num_paid",
        "open_choices",
        "outputs",
        "reader",
        "request",
        "strikes",
    )

    def __init__(self, request: GenerateRequest, account: Account | None) -> None:
        self.request = request
        self.account = account  # None: what it uses is not counted
        self.is_charged = False  # its prompt has been counted
        self.num_charged = 0  # tokens that were counted, prompt included, also by processes that have ended
        self.num_paid = 0  # output tokens that such a process has counted, and that come again
        self.note_charge: Callable[[Charge], None] | None = None  # called before each is made
        self.open_choices = set(range(request.params.n))
        self.outputs: list[list[int]] = [[] for _ in range(request.params.n)]  # all tokens received, by choice
        self.deltas: list[TokenDelta] = []  # not yet read
        self.reader: asyncio.Future[None] | None = None  # set while the reader waits
        self.strikes = 0  # engines that ended while it held a row, since it last made PROOF_TOKENS of progress
        self.alone = 0  # those in which no other request held a row
        self.mark = 0  # its number of tokens at the last strike

    def wake(self) -> None:
        reader, self.reader = self.reader, None
        if reader is not None and not reader.done():
            reader.set_result(None)

    @property
    def is_untouched(self) -> bool:
        """Whether no token has arrived and no choice has ended."""
        return len(self.open_choices) == len(self.outputs) and not any(self.outputs)

    def strike(self, seated: Collection[str]) -> None:
        """Count an engine's end against this request if it held a row. `seated`: the requests that did."""
        num_tokens = sum(map(len, self.outputs))
        if num_tokens >= self.mark + PROOF_TOKENS:
            self.strikes = self.alone = 0
        if is_named(self.request.id, seated):
            self.strikes += 1
            self.alone += len(seated) == 1
            self.mark = num_tokens

    def as_survivor(self) -> GenerateRequest:
        choices = enumerate(self.outputs)
        begun = [tokens if index in self.open_choices else None for index, tokens in choices]
        return msgspec.structs.replace(self.request, begun=begun, strikes=self.strikes)


class Streams:
    """The open requests by id. Not thread-safe: all calls come from the event loop."""

    def __init__(self) -> None:
        self._streams: dict[str, _Stream] = {}
        self._failure: OctavoError | None = None
        self._banned: dict[bytes, tuple[float, str]] = {}  # digest of a failed request → (refused until, its id)
        self.accounts: dict[bytes, Account] = {}  # owner → where its tokens are counted
        # Called with a request and one of its choices that a budget has ended: the engine still computes it.
        self.on_budget_end: Callable[[str, int], None] = lambda request_id, index: None

    def __len__(self) -> int:
        return len(self._streams)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    @property
    def num_growing(self) -> int:
        """Requests with a choice that has not ended."""
        return sum(1 for stream in self._streams.values() if stream.open_choices)

    def open(self, request: GenerateRequest) -> None:
        if self._failure is not None:
            raise self._failure
        assert request.id not in self._streams, "request ids are unique"
        if self._banned:
            self._check_ban(request)
        account = self.accounts.get(request.owner)
        if account is not None:
            account.hold(_most_tokens(request))
        self._streams[request.id] = stream = _Stream(request, account)
        for index, tokens in enumerate(request.begun):  # by another process, which has ended
            if tokens is None:
                stream.open_choices.discard(index)
            else:
                stream.outputs[index] = list(tokens)
                stream.is_charged = stream.is_charged or bool(tokens)

    def resume_charges(self, request_id: str, num_charged: int, num_known: int, note: Callable[[Charge], None]) -> None:
        """Go on counting for a request that another process may have begun. `num_charged`: tokens that were counted for it, prompt included;
        `num_known`: as many of them as it was opened with. The others come again, and are not counted again. `note`: called with every charge
        before it is made: what it writes down tells the next process, if this one is killed."""
        stream = self._streams[request_id]
        stream.note_charge, stream.num_charged = note, max(num_charged, num_known)
        if num_charged > num_known:
            num_prompt = 0 if stream.is_charged else len(stream.request.prompt_ids)
            stream.is_charged, stream.num_paid = True, max(0, num_charged - num_known - num_prompt)

    def deliver(self, deltas: list[TokenDelta]) -> None:
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            if stream is not None and delta.index in stream.open_choices:
                if stream.account is not None and (delta.token_ids or delta.vector):
                    delta = self._charge(stream, stream.account, delta)
                stream.deltas.append(delta)
                stream.outputs[delta.index] += delta.token_ids
                if delta.finish is not None:
                    stream.open_choices.discard(delta.index)
                if stream.reader is not None:
                    stream.wake()
                elif len(stream.deltas) >= _MANY_DELTAS:
                    stream.deltas = joined(stream.deltas)

    def _charge(self, stream: _Stream, account: Account, delta: TokenDelta) -> TokenDelta:
        """Count what is handed over: the tokens, and the prompt with the first of them. Returns the delta as far as the budget goes."""
        num_prompt, num_output = 0 if stream.is_charged else len(stream.request.prompt_ids), len(delta.token_ids)
        num_allowed = self._count(stream, account, num_prompt, num_output)
        if num_allowed == num_output:
            stream.is_charged = True
            return delta
        if delta.finish is None:
            self.on_budget_end(delta.request_id, delta.index)
        if num_allowed < 0:  # requests that came at the same time have used it up before this one had its first token
            message = "the API key's budget of tokens for today is used up"
            finish = Finish("error", message=message, cause="overload", retry_after=account.seconds_of_day())
            return TokenDelta(delta.request_id, delta.index, [], finish)
        stream.is_charged = True
        finish = msgspec.structs.replace(
            delta.finish or Finish("length"), reason="length", stop_token=None, is_budget=True
        )
        return msgspec.structs.replace(
            delta, token_ids=delta.token_ids[:num_allowed], logprobs=delta.logprobs[:num_allowed], finish=finish
        )

    @staticmethod
    def _count(stream: _Stream, account: Account, num_prompt: int, num_output: int) -> int:
        """As Account.charge, without tokens that were counted before."""
        note = stream.note_charge
        if note is None:
            return account.charge(num_prompt, num_output)
        num_paid = min(stream.num_paid, num_output)
        stream.num_paid -= num_paid
        if num_paid == num_output and not num_prompt:
            return num_output
        wanted = num_prompt + num_output - num_paid
        note(account.next_charge(stream.num_charged + wanted, wanted))
        num_allowed = account.charge(num_prompt, num_output - num_paid)
        counted = 0 if num_allowed < 0 else num_prompt + num_allowed
        stream.num_charged += counted
        if counted < wanted:
            note(account.next_charge(stream.num_charged, 0))
        return num_allowed if num_allowed < 0 and not num_paid else max(num_allowed, 0) + num_paid

    def end_choice(self, request_id: str, index: int) -> None:
        """Close one choice (−1: all choices) and drop its unread deltas."""
        stream = self._streams.get(request_id)
        if stream is not None:
            stream.open_choices = {choice for choice in stream.open_choices if index not in (-1, choice)}
            stream.deltas = [delta for delta in stream.deltas if index not in (-1, delta.index)]
            stream.wake()

    def fail(self, error: OctavoError) -> None:
        """Make every open stream and every later `open` raise `error`."""
        self._failure = error
        for stream in self._streams.values():
            stream.wake()

    async def next(self, request_id: str) -> list[TokenDelta]:
        """Wait for deltas and return all that arrived since the last call. Empty: every choice has ended."""
        stream = self._streams[request_id]
        while not stream.deltas:
            if not stream.open_choices:
                return []
            if self._failure is not None:
                raise self._failure
            stream.reader = asyncio.get_running_loop().create_future()
            await stream.reader
        deltas, stream.deltas = stream.deltas, []
        return deltas

    def close(self, request_id: str) -> bool:
        """Forget the request. True: some of its choices had not ended."""
        stream = self._streams.pop(request_id, None)
        if stream is not None and stream.account is not None:
            stream.account.hold(-_most_tokens(stream.request))
        return stream is not None and bool(stream.open_choices)

    def has_begun(self, request_id: str) -> bool:
        """Whether the request is open and has received a token."""
        stream = self._streams.get(request_id)
        return stream is not None and any(stream.outputs)

    def end(self, request_id: str, finish: Finish) -> bool:
        """End every open choice, as the engine would. False: there is none."""
        stream = self._streams.get(request_id)
        if stream is None or not stream.open_choices:
            return False
        self.deliver([TokenDelta(request_id, index, [], finish) for index in [*stream.open_choices]])
        return True

    # ── when an engine has ended ──

    def strike(self, seated: Collection[str], suspects: Collection[str] | None = None) -> list[str]:
        """Count the end of an engine against the requests that held a row. Fails those that were alone in MAX_ALONE engines, and
        returns their ids. `suspects`: those that held a row in another replica when that ended; of a fleet, a request is failed as soon
        as it is the only one, because the next victim would be one more replica. None: there is no fleet."""
        failed = []
        for name, stream in self._streams.items():
            if not stream.open_choices:
                continue
            stream.strike(seated)
            if suspects is not None:
                is_cause = stream.strikes >= SUSPICIOUS and is_named(name, seated) and 1 in (len(seated), len(suspects))
                how = (
                    f"{stream.strikes} engines have ended with request {name}, and no other request was in all of them"
                )
            else:
                is_cause = stream.alone >= MAX_ALONE
                how = f"request {name} was alone in the engine {stream.alone} times in a row when the engine ended"
            if is_cause:
                message = f"{how}: it is failed, the others continue"
                self.end(name, Finish("error", message=message))
                failed.append(name)
                self._ban(stream.request)
        return failed

    def _ban(self, request: GenerateRequest) -> None:
        if len(self._banned) == _MAX_BANNED:
            del self._banned[next(iter(self._banned))]
        self._banned[_digest(request)] = (time.monotonic() + BAN_SECONDS, request.id)

    def _check_ban(self, request: GenerateRequest) -> None:
        until, name = self._banned.get(_digest(request), (0.0, ""))
        if (left := until - time.monotonic()) > 0:
            raise RequestFailed(
                f"request {name}, which was identical, ended two engines: it is refused for another {left:.0f} s"
            )

    def without_tokens(self) -> list[GenerateRequest]:
        """Open requests that have received no token, oldest first."""
        return [stream.request for stream in self._streams.values() if stream.open_choices and not any(stream.outputs)]

    def untaken(self, was_taken: Callable[[GenerateRequest], bool]) -> list[GenerateRequest]:
        """Requests that no engine has taken in, so the next one may refuse them. All others are survivors."""
        return [
            stream.request for stream in self._streams.values() if stream.is_untouched and not was_taken(stream.request)
        ]

    def survivor(self, request_id: str) -> GenerateRequest | None:
        """An open request with its tokens so far, as another engine continues it. None: it has ended."""
        stream = self._streams.get(request_id)
        return stream.as_survivor() if stream is not None and stream.open_choices else None

    def survivors(self, untaken: Collection[str] = ()) -> list[GenerateRequest]:
        """Open requests, with their tokens so far, that the next engine continues."""
        return [
            stream.as_survivor()
            for name, stream in self._streams.items()
            if stream.open_choices and name not in untaken
        ]


def _most_tokens(request: GenerateRequest) -> int:
    """The most tokens that a request may take: its prompt, and max_tokens of every choice."""
    num_output = 0 if request.pooling is not None else request.params.n * (request.params.max_tokens or 0)
    return len(request.prompt_ids) + num_output


def _digest(request: GenerateRequest) -> bytes:
    """Digest of what a request asks for: prompt, parameters without the seed, stop ids."""
    params = msgspec.structs.replace(request.params, seed=0)
    return blake2b(msgspec.msgpack.encode([request.prompt_ids, params, request.stop_ids]), digest_size=16).digest()


def joined(deltas: list[TokenDelta]) -> list[TokenDelta]:
    """Merge deltas into one for each choice. Deltas with an embedding vector are kept apart."""
    together: dict[int, TokenDelta] = {}
    rest = []
    for delta in deltas:
        before = together.get(delta.index)
        if delta.vector:
            rest.append(delta)
        elif before is None:
            together[delta.index] = delta
        else:
            # Prompt logprobs that do not continue the earlier ones come from a new engine, which starts with the first.
            is_next = delta.num_scored == before.num_scored + len(before.prompt_logprobs)
            scores = (*before.prompt_logprobs, *delta.prompt_logprobs) if is_next else delta.prompt_logprobs
            together[delta.index] = msgspec.structs.replace(
                delta,
                token_ids=[*before.token_ids, *delta.token_ids],
                logprobs=(*before.logprobs, *delta.logprobs),
                prompt_logprobs=scores if delta.prompt_logprobs else before.prompt_logprobs,
                num_scored=before.num_scored if is_next or not delta.prompt_logprobs else delta.num_scored,
                progress=delta.progress or before.progress,
            )
    return [*together.values(), *rest]
