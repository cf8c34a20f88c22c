"""What a compaction item holds: the summary of a conversation, in base64 with a mark before it. OpenAI's name for it is encrypted_content, and
clients only hand it back; it is not secret from them, whose conversation it is."""

import base64
import binascii

from octavo.errors import InvalidRequest

MARK = "octavo-summary-1."


def write_summary(summary: str) -> str:
    return MARK + base64.urlsafe_b64encode(summary.encode("utf-8", "replace")).decode()


def read_summary(content: str, where: str) -> str:
    """Raises InvalidRequest for what write_summary did not make."""
    try:
        if not content.startswith(MARK):
            raise ValueError
        return base64.b64decode(content.removeprefix(MARK).encode(), b"-_", validate=True).decode()
    except (ValueError, binascii.Error):
        raise InvalidRequest(
            f"{where}.encrypted_content was not made by /v1/responses/compact of such a server",
            f"{where}.encrypted_content",
        ) from None
