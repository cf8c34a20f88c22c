"""A whole answer as JSON, and the fields that had no effect named back in it.
Knows nothing of what an answer says."""

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from octavo.server.state.encoded_json import add_member


def json_response(body: msgspec.Struct, ignored: Sequence[str] = ()) -> Response:
    return Response(name_back(msgspec.json.encode(body), ignored), media_type="application/json")


def name_back(body: bytes, ignored: Sequence[str]) -> bytes:
    """`body`, one JSON object or a stream's first events, with `ignored_fields` as the last member of the (first) object.

    Done to the bytes, so that no endpoint has to think of it, and that an answer to a request without such fields is
    what it would be without this."""
    if not ignored:
        return body
    head, gap, rest = body.partition(b"\n\n")  # JSON as msgspec writes it holds no line breaks
    return add_member(head, "ignored_fields", msgspec.json.encode(list(ignored))) + gap + rest
