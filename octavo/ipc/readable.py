"""is_readable(): whether something can be read from a descriptor, whatever its number. select.select() fails for descriptors above 1,023, which a
process with as many connections reaches."""

import math
import select


def is_readable(descriptor: int, seconds: float) -> bool:
    """Wait for at most so many seconds until there is something to read, or the other end is closed."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(math.ceil(seconds * 1000)))
