"""Stored responses, bounded in bytes and in number: the least recently used is dropped first.

Entries are kept encoded, so that their size is the memory they take."""

import operator
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Literal

import msgspec

from octavo.errors import NotFound
from octavo.server.dialects.openai_responses.types import Item
from octavo.server.state.peers import Peers

_OVERHEAD = 1024  # bytes of an entry beside its text
MAX_ID_LEN = 100


class StoredResponse(msgspec.Struct, frozen=True):
    id: str
    owner: bytes  # of the API key that made it (state/owners.py)
    body: bytes  # the response, as it was sent
    items: bytes  # the whole conversation including this response's output, as JSON
    num_output: int  # how many of the last items are the response's own output

    def read_input(self) -> list[Item]:
        items = decode_items(self.items)
        return items[: len(items) - self.num_output]

    def find_item(self, item_id: str) -> Item | None:
        """Only this item is decoded: a request may refer to many items of a long conversation."""
        entries = msgspec.json.decode(self.items, type=list[msgspec.Raw])
        found = next((entry for entry in reversed(entries) if _decode_named(entry).id == item_id), None)
        return None if found is None else _decode_item(found)


class _Named(msgspec.Struct):
    id: str


_decode_named = msgspec.json.Decoder(_Named).decode
_decode_item: Callable[[bytes | msgspec.Raw], Item] = msgspec.json.Decoder(Item).decode


def decode_items(items: bytes) -> list[Item]:
    return msgspec.json.decode(items, type=list[Item]) if items else []


class ResponseStore:
    def __init__(
        self, max_responses: int, max_bytes: int, may_see: Callable[[bytes, bytes], bool] = operator.eq
    ) -> None:
        """`may_see`: whether an owner (the first) may see what another has."""
        self._max_responses = max_responses
        self._may_see = may_see
        self._max_bytes = max_bytes
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._own_items: dict[str, list[str]] = {}  # response id → ids of the items that it added
        self._homes: dict[str, str] = {}  # item id → response id
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def is_on(self) -> bool:
        return self._max_responses > 0 and self._max_bytes > 0

    def put(self, response: StoredResponse, own_items: Sequence[str], *, is_spare: bool = False) -> bool:
        """Store a response. False: there is no room. `own_items`: ids of items that no earlier response has. `is_spare`: it
        displaces no other, and is dropped first unless it is used."""
        size = _size(response)
        if not self.is_on or size > self._max_bytes:
            return False
        if is_spare and (self.num_bytes + size > self._max_bytes or len(self._entries) >= self._max_responses):
            return False
        assert response.id not in self._entries, "ids are random"
        self._entries[response.id] = response
        self._entries.move_to_end(response.id, last=not is_spare)
        self._own_items[response.id] = list(own_items)
        self._homes.update(dict.fromkeys(own_items, response.id))
        self.num_bytes += size
        while self.num_bytes > self._max_bytes or len(self._entries) > self._max_responses:
            self._drop(next(iter(self._entries)))
        return True

    def get(self, response_id: str, owner: bytes) -> StoredResponse | None:
        response = self._entries.get(response_id)
        if response is None or not self._may_see(owner, response.owner):
            return None
        self._entries.move_to_end(response_id)
        return response

    def delete(self, response_id: str, owner: bytes) -> bool:
        if self.get(response_id, owner) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        self.num_bytes -= _size(self._entries.pop(response_id))
        for item_id in self._own_items.pop(response_id):
            if self._homes.get(item_id) == response_id:
                del self._homes[item_id]

    def item(self, item_id: str, owner: bytes) -> Item | None:
        response = self.get(self._homes.get(item_id, ""), owner)
        return None if response is None else response.find_item(item_id)


Verb = Literal["get", "delete", "item", "cancel"]


class _Wanted(msgspec.Struct, frozen=True):
    verb: Verb
    id: str
    owner: bytes


class KeptResponses:
    """The stored responses of all API processes: each keeps its own, and asks the others for the rest."""

    KIND = "responses"  # of queries to other API processes

    def __init__(
        self,
        store: ResponseStore,
        peers: Peers,
        cancel: Callable[[str, bytes], bytes | None] = lambda response_id, owner: None,
        end: Callable[[str, bytes], bool] = lambda response_id, owner: False,
    ) -> None:
        """Callbacks for responses that this process still generates, or whose stream it keeps: `cancel` returns the response as
        far as it came, `end` whether there was one."""
        self.own = store
        self._cancel, self._end = cancel, end
        self._peers = peers
        peers.handle(self.KIND, self._reply)

    async def get(self, response_id: str, owner: bytes) -> StoredResponse | None:
        found = await self._find("get", response_id, owner)
        return None if found is None else msgspec.msgpack.decode(found, type=StoredResponse)

    async def delete(self, response_id: str, owner: bytes) -> bool:
        return await self._find("delete", response_id, owner) is not None

    async def cancel(self, response_id: str, owner: bytes) -> bytes | None:
        """Cancel a response that is being generated, and return it as far as it came. None: there is none."""
        return await self._find("cancel", response_id, owner)

    async def item(self, item_id: str, owner: bytes) -> Item | None:
        found = await self._find("item", item_id, owner)
        return None if found is None else msgspec.msgpack.decode(found, type=Item)

    async def _find(self, verb: Verb, wanted_id: str, owner: bytes) -> bytes | None:
        wanted = _Wanted(verb, wanted_id, owner)
        found = self._find_here(wanted)
        if found is not None or len(wanted_id) > MAX_ID_LEN:
            return found
        return await self._peers.ask_whole(self.KIND, msgspec.json.encode(wanted))

    def _find_here(self, wanted: _Wanted) -> bytes | None:
        match wanted.verb:
            case "get":
                found: StoredResponse | Item | None = self.own.get(wanted.id, wanted.owner)
            case "item":
                found = self.own.item(wanted.id, wanted.owner)
            case "cancel":
                return self._cancel(wanted.id, wanted.owner)
            case "delete":
                was_kept, was_streamed = self.own.delete(wanted.id, wanted.owner), self._end(wanted.id, wanted.owner)
                return b"" if was_kept or was_streamed else None
        return None if found is None else msgspec.msgpack.encode(found)

    def _reply(self, question: bytes) -> AsyncGenerator[bytes, None] | None:
        found = self._find_here(msgspec.json.decode(question, type=_Wanted))
        return None if found is None else _as_stream(found)


async def _as_stream(reply: bytes) -> AsyncGenerator[bytes, None]:
    if reply:
        yield reply


def _size(response: StoredResponse) -> int:
    return len(response.body) + len(response.items) + _OVERHEAD


def not_found(response_id: str) -> NotFound:
    return NotFound(
        f"no response {response_id[:100]!r} is stored here: it was not stored, was deleted, or was removed to make room for others"
    )
