"""JSON responses, and the list of ignored fields in them."""

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from octavo.server.state.encoded_json import add_member


def json_response(body: msgspec.Struct | Sequence[msgspec.Struct], ignored: Sequence[str] = ()) -> Response:
    """The list of ignored fields is in each object of a list."""
    if isinstance(body, msgspec.Struct):
        content = name_back(msgspec.json.encode(body), ignored)
    else:
        content = b"[%b]" % b",".join(name_back(msgspec.json.encode(one), ignored) for one in body)
    return Response(content, media_type="application/json")


EVENT_END = b"\n\n"  # of a server-sent event


def name_back(body: bytes, ignored: Sequence[str], frame_end: bytes = EVENT_END) -> bytes:
    """`body`, one JSON object or a stream's first frames, with `ignored_fields` as the last member of the (first) object.
    `frame_end`: the bytes after each frame of the stream.

    Done to the bytes, so that endpoints need not handle it and other answers are unchanged."""
    if not ignored:
        return body
    head, gap, rest = body.partition(frame_end)  # msgspec writes JSON without line breaks
    return add_member(head, "ignored_fields", msgspec.json.encode(list(ignored))) + gap + rest
