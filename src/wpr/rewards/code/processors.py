"""Which processor a program runs on: one, and where there are enough, one that no other program has."""

from __future__ import annotations

import contextlib
import os
import random
import socket
from collections.abc import Iterator

NAME = "\0wpr-processor-{}"
"""Of a processor that was given to a program, in the kernel's list of local sockets."""


def usable_processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def own_processor() -> Iterator[int | None]:
    """A processor that this process may use and that no other program was given, in this process or another, for as
    long as the block runs. If all were given away: any. None where a system cannot bind processes to processors.

    Who holds a processor holds its `NAME`: no files, and nothing to clean up after a process that was killed. The list
    of names is that of a network namespace, so two containers do not see each other's; hence the order is random, and
    the first processors are not the most used.
    """
    if not hasattr(os, "sched_setaffinity"):
        yield None
        return
    numbers = list(os.sched_getaffinity(0))
    random.SystemRandom().shuffle(numbers)  # not the generator that a seed made
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as name:
        for number in numbers:
            try:
                name.bind(NAME.format(number))
            except OSError:  # given away
                continue
            break
        yield number
