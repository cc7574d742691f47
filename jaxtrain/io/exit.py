"""End of the interpreter: closes generators that are still open, while threads can start."""

from __future__ import annotations

import atexit
import threading
import traceback
import weakref
from collections.abc import Generator
from typing import Any


def close_at_exit(generator: Generator[Any, Any, Any]) -> None:
    """Closes a generator when the main thread ends, if it is open then; it is not kept alive until then.

    A generator of another thread is left to that thread.

    The interpreter closes one that a variable still holds last of all. What it does then can start no thread, and on
    Python 3.11 waits for it for ever. `atexit` is too late, too: pools of threads take no work any more.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    known = weakref.ref(generator)

    def close() -> None:
        if (found := known()) is not None:
            try:
                found.close()
            except BaseException:
                traceback.print_exc()

    getattr(threading, "_register_atexit", atexit.register)(close)
