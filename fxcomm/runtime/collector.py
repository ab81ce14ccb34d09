"""Python's garbage collector, held still where it can find nothing."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Context, or decorator of a function: no garbage collection inside, in the whole process.

    For work that makes many small objects and no cycles of them, such as reading large graphs. The
    collector would look through all of them again and again (at 40,000 nodes for longer than the
    work itself takes) and free none. Where it is off already it stays off.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
