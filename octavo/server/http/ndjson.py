"""Newline-delimited JSON, in which Ollama's clients read streams: one object per line."""

import msgspec

from octavo.server.http.sse import EventStream

MEDIA_TYPE = "application/x-ndjson"

_encode = msgspec.json.Encoder().encode


def line(body: msgspec.Struct) -> bytes:
    return _encode(body) + b"\n"


class LineStream(EventStream):
    """An EventStream of lines. It has no comments: `keep_alive` is a line that changes nothing for a client."""

    media_type = MEDIA_TYPE
    frame_end = b"\n"
