"""Why storage, or a library above it, failed: in one line. No JAX."""

from __future__ import annotations

from jaxtrain.checkpoint.files import CheckpointError

LATE = "another process did not write its part in time"


def reason_of(error: BaseException) -> str:
    """One line that says why orbax, an object store, or the file system under them failed."""
    chain: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in chain:
        chain.append(link)
        link = link.__cause__ or link.__context__
    whole = " ".join(str(link) for link in chain)
    for sign in ("RESOURCE_EXHAUSTED", "No space left", "OUT_OF_RANGE", "File too large", "Disk quota"):
        if sign in whole:
            return f"the disk is full or a size limit is reached ({_line(chain[-1])})"
    if isinstance(error, CheckpointError):
        return str(error)
    if "barrier" in whole and "DEADLINE_EXCEEDED" in whole:
        return LATE
    return f"{type(chain[-1]).__name__}: {_line(chain[-1])}"


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 200 else text[:197] + "..."
