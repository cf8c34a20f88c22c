"""A request to the Responses API with the conversation before it: its items, and the same as a chat request."""

import asyncio

import msgspec

from octavo.errors import Field, InvalidRequest, TooLarge
from octavo.server.dialects.openai_responses import request as requests
from octavo.server.dialects.openai_responses import types
from octavo.server.dialects.openai_responses.items import chat_messages, read_input, references
from octavo.server.dialects.openai_responses.request import NAMES, InputRequest
from octavo.server.dialects.openai_responses.store import KeptResponses, decode_items, not_found
from octavo.server.generate import chat_request
from octavo.server.generate.offload import offload_prompt
from octavo.server.generate.requests import check_text_len
from octavo.server.state.service import Service

MAX_REFERENCES = 256  # to earlier items, in one request: each may need a query to another process


class Conversation(msgspec.Struct, frozen=True):
    items: list[types.Item]
    fields: chat_request.ChatFields
    prompt: chat_request.ChatPrompt

    @staticmethod
    async def read(
        service: Service, kept: KeptResponses, fields: InputRequest, owner: bytes, closing: str = ""
    ) -> "Conversation":
        """`closing`: a last message of the user, which is not one of its items."""
        config = service.config
        requests.check(fields, config)
        before, num_bytes = b"", fields.num_bytes
        if fields.previous_response_id is not None:
            previous = await kept.get(fields.previous_response_id, owner)
            if previous is None:
                error = not_found(fields.previous_response_id)
                error.param = "previous_response_id"
                raise error
            before = previous.items
            num_bytes += len(before)
        wanted_ids = references(fields.input)
        if len(wanted_ids) > MAX_REFERENCES:
            raise InvalidRequest(
                f"input has {len(wanted_ids)} item references; at most {MAX_REFERENCES} are allowed", "input"
            )
        referred = {}
        for wanted in wanted_ids:
            await asyncio.sleep(0)  # finding an item takes some milliseconds in a long conversation
            if (item := await kept.item(wanted, owner)) is not None:
                referred[wanted] = item
                num_bytes += len(msgspec.json.encode(item))
                if num_bytes > (most := int(config.budget.max_body_bytes)):
                    raise TooLarge(
                        Field("input") + f" refers to items of more than {most} bytes, the limit (--max-body-bytes)"
                    )

        def convert() -> tuple[list[types.Item], chat_request.ChatFields]:
            check_text_len(service, num_bytes, (fields.input, fields.instructions, fields.tools), Field("input"))
            items = decode_items(before)
            if fields.input != [] or not closing:
                items = [*items, *read_input(fields.input, referred.get, config.budget)]
            if len(items) > config.budget.max_messages:
                raise InvalidRequest(
                    f"input has {len(items)} items, including those of earlier responses; this server allows at most "
                    f"{config.budget.max_messages} (--max-messages)",
                    param="input",
                )
            messages = chat_messages(fields.instructions, items)
            if closing:
                messages.append({"role": "user", "content": closing})
            with NAMES.in_errors():
                return items, requests.chat_request(fields, messages, num_bytes)

        items, chat_fields = await offload_prompt(num_bytes, convert)
        with NAMES.in_errors():
            parse = chat_request.parse_cut if fields.truncation == "auto" else chat_request.parse
            return Conversation(items, chat_fields, await parse(service, chat_fields))
