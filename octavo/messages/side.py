"""Messages to ranks that must not wait for a step. They have a pipe of their own, beside that of the plans."""

import msgspec

from octavo.messages.requests import AdapterRef


class PrepareGrammar(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Compile a grammar (empty: none), and drop others."""

    number: int
    grammar: str
    forgets: list[str]


class CheckAdapter(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Check an adapter's files against the model, without its numbers."""

    number: int
    adapter: AdapterRef


class ReadAdapter(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Read this rank's share of an adapter into memory."""

    number: int
    adapter: AdapterRef


class ForgetAdapters(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Free adapters, once for each time that they were read."""

    number: int
    ids: list[str]


class SleepRank(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Give memory back until WakeRank: that of these blank pages, and on a GPU that of the weights, and of all pages unless some are kept.
    A rank may still compute a step whose result another rank has sent: `num_plans`, all that it was sent, are carried out first."""

    number: int
    pages: list[int]
    keeps_pages: bool
    num_plans: int


class WakeRank(msgspec.Struct, frozen=True, tag=True, gc=False):
    """Be ready for steps again."""

    number: int


SideMessage = PrepareGrammar | CheckAdapter | ReadAdapter | ForgetAdapters | SleepRank | WakeRank


class SideReply(msgspec.Struct, frozen=True, gc=False):
    """A rank has done what the message with this number asked for, or a part of it."""

    number: int
    error: str = ""  # why it could not
    id: str = ""  # of an adapter that was read
    num_bytes: int = 0  # that the adapter or grammar takes on this rank
    is_over: bool = True  # False: it goes on with it, and another reply follows
