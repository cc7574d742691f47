"""Standard output and error of a run that goes on when its terminal or the reader of its pipe is gone."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any, TextIO

GONE = {errno.EPIPE, errno.EIO, errno.EBADF}  # a reader that has ended; a closed terminal; a closed file


class DroppingStream:
    """A text stream that drops what cannot be written. Everything else is that of the stream it wraps."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        """Writes text, or drops it. Returns its length."""
        try:
            return self._stream.write(text)
        except OSError as error:
            self._drop(error)
            return len(text)

    def flush(self) -> None:
        """Writes what is buffered, or drops it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Lets the file descriptor lead nowhere if its other end is gone, also for code that writes to it directly."""
        if error.errno in GONE:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def drop_lost_output() -> None:
    """Makes standard output and error of this process drop what cannot be written. Their text is in the run folder."""
    sys.stdout, sys.stderr = DroppingStream(sys.stdout), DroppingStream(sys.stderr)  # pyright: ignore[reportAttributeAccessIssue]
