"""Memory that processes share through an inherited descriptor. It has no name in a file system, and ends with its last user."""

import os
import tempfile


def anonymous_memory(name: str, num_bytes: int) -> int:
    """Return a descriptor of fresh memory of zeros that processes can inherit. The caller closes it. `name`: shown in /proc."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
        os.truncate(fd, num_bytes)
        return fd
    with tempfile.TemporaryFile(prefix="octavo-") as file:
        file.write(bytes(num_bytes))  # allocates the blocks now, in case the disk is full later
        file.flush()
        return os.dup(file.fileno())
