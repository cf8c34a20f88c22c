"""A request to the Responses API with the conversation before it: its items, and the same as a chat request."""

import msgspec

from octavo.errors import InvalidRequest
from octavo.server.dialects.openai_responses import request as requests
from octavo.server.dialects.openai_responses import types
from octavo.server.dialects.openai_responses.items import chat_messages, read_input, references
from octavo.server.dialects.openai_responses.request import NAMES, InputRequest
from octavo.server.dialects.openai_responses.store import KeptResponses, not_found
from octavo.server.generate import chat_request
from octavo.server.state.service import Service

MAX_REFERENCES = 256  # to earlier items, in one request: each may need a query to another process


class Conversation(msgspec.Struct, frozen=True):
    items: list[types.Item]
    fields: chat_request.ChatRequest
    prompt: chat_request.ChatPrompt

    @staticmethod
    async def read(service: Service, kept: KeptResponses, fields: InputRequest, owner: bytes) -> "Conversation":
        server = service.config.server
        requests.check(fields, server)
        before: list[types.Item] = []
        if fields.previous_response_id is not None:
            previous = await kept.get(fields.previous_response_id, owner)
            if previous is None:
                error = not_found(fields.previous_response_id)
                error.param = "previous_response_id"
                raise error
            before = previous.read_items()
        wanted_ids = references(fields.input)
        if len(wanted_ids) > MAX_REFERENCES:
            raise InvalidRequest(
                f"input has {len(wanted_ids)} item references; at most {MAX_REFERENCES} are allowed", "input"
            )
        referred = {wanted: await kept.item(wanted, owner) for wanted in wanted_ids}
        items = [*before, *read_input(fields.input, referred.get)]
        if len(items) > server.max_messages:
            raise InvalidRequest(
                f"input has {len(items)} items, including those of earlier responses; this server allows at most "
                f"{server.max_messages} (--max-messages)",
                param="input",
            )
        messages = chat_messages(fields.instructions, items)
        with NAMES.in_errors():
            chat_fields = requests.chat_request(fields, messages)
            parse = chat_request.parse_cut if fields.truncation == "auto" else chat_request.parse
            return Conversation(items, chat_fields, await parse(service, chat_fields))
