"""JSON responses, and the list of ignored fields in them."""

from collections.abc import Sequence

import msgspec
from starlette.responses import Response

from octavo.server.state.encoded_json import add_member


def json_response(body: msgspec.Struct, ignored: Sequence[str] = ()) -> Response:
    return Response(name_back(msgspec.json.encode(body), ignored), media_type="application/json")


def name_back(body: bytes, ignored: Sequence[str]) -> bytes:
    """`body`, one JSON object or a stream's first events, with `ignored_fields` as the last member of the (first) object.

    Done to the bytes, so that endpoints need not handle it and other answers are unchanged."""
    if not ignored:
        return body
    head, gap, rest = body.partition(b"\n\n")  # msgspec writes JSON without line breaks
    return add_member(head, "ignored_fields", msgspec.json.encode(list(ignored))) + gap + rest
