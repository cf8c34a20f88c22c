"""Converts a Finish with reason "error" into an exception of octavo.errors."""

from octavo.errors import DeadlineExceeded, InvalidRequest, OctavoError, Overloaded, RequestFailed
from octavo.messages import Finish


def failure_of(finish: Finish) -> OctavoError:
    message = finish.message or "the engine could not continue this request"
    match finish.cause:
        case "overload":
            return Overloaded(message, finish.retry_after)
        case "deadline":
            return DeadlineExceeded(message)
        case "grammar":  # it passed the check, and takes more than it may, or allows nothing that can be said
            return InvalidRequest(message)
        case "adapter":  # its files have changed or are gone since it was registered
            return InvalidRequest(message, param="model")
        case _:
            return RequestFailed(message)
