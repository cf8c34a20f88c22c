"""Which replica of a fleet gets a request: an index of the pages that replicas hold, their work in seconds, and policies over both.
Pure: no clock, no sockets. Equal inputs give equal choices."""

from octavo.routing.policy import POLICIES
from octavo.routing.prefix_index import PrefixIndex
from octavo.routing.router import Choice, PageScheme, Router

__all__ = ["POLICIES", "Choice", "PageScheme", "PrefixIndex", "Router"]
