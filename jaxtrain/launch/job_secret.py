"""Secret of a launched job, by which its processes know one another: from the environment, or a file of the run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxtrain.core.resolve import resolve
from jaxtrain.errors import ProtocolError, UserError
from jaxtrain.io.atomic import write_atomic
from jaxtrain.io.authenticated import new_secret

VARIABLE = "JAXTRAIN_SECRET"
FILE = "launch.secret"
MIN_CHARACTERS = 16


def secret_folder(source: str, overrides: Sequence[str]) -> Path:
    """Returns the folder of the secret's file, the same on all nodes: RUN_DIR, or DIR/NAME of a config.

    A run that begins in another folder because DIR/NAME is taken has it in DIR/NAME too: only node 0 knows the other.

    Raises:
        UserError: bad input.
    """
    if Path(source).is_dir():
        return Path(source)
    config, _ = resolve(source, *overrides, checks=())
    return config.run_dir


@contextmanager
def published_secret(folder: Path | None, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yields the secret for a leader: that of the environment, else a new one.

    Args:
        folder: where a new one is in a file that only this user can read, until the job ends; None: in no file.
        environ: environment of this process.

    Raises:
        UserError: the environment's is too short, or the file cannot be written.
    """
    if (given := _from_environment(environ)) or folder is None:
        yield given or new_secret()
        return
    secret, path = new_secret(), folder / FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(path, secret, mode=0o600)
    except OSError as error:
        raise UserError(f"launch: {path} cannot be written ({error.strerror}); expected {VARIABLE} instead") from None
    try:
        yield secret
    finally:
        with suppress(OSError):  # the job has ended, whatever its disk does now
            if path.read_text() == secret:  # not that of a later job
                path.unlink()


def shared_secret(folder: Path, environ: Mapping[str, str] = os.environ) -> str:
    """Returns the secret for a node of a job that any node may lead: the first one writes it, the others read it.

    It stays when the job ends, because a node that leaves cannot know who still needs it.

    Args:
        folder: where it is in a file that only this user can read.
        environ: environment of this process, which may hold the secret instead.

    Raises:
        UserError: the environment's is too short, or the file cannot be written.
    """
    if given := _from_environment(environ):
        return given
    path, own = folder / FILE, folder / f"{FILE}.{new_secret()[:16]}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            write_atomic(own, new_secret(), mode=0o600)
            with suppress(FileExistsError):
                os.link(own, path)  # which, unlike a rename, does not replace the file of another node
        finally:
            own.unlink(missing_ok=True)
        return path.read_text()
    except OSError as error:
        raise UserError(f"launch: {path} cannot be written ({error.strerror}); expected {VARIABLE} instead") from None


def secret_reader(folder: Path, environ: Mapping[str, str] = os.environ) -> Callable[[], str]:
    """Returns a function that reads the secret for an agent, each time anew: a leader may start later, or again.

    Raises:
        UserError: the environment's is too short.
    """
    given = _from_environment(environ)

    def read() -> str:
        try:
            return given or (folder / FILE).read_text()
        except OSError as error:
            raise ProtocolError(f"{folder / FILE}: {error.strerror}; expected a shared folder, or {VARIABLE}") from None

    return read


def _from_environment(environ: Mapping[str, str]) -> str:
    given = environ.get(VARIABLE, "")
    if given and len(given) < MIN_CHARACTERS:
        raise UserError(f"launch: {VARIABLE}: {len(given)} characters; expected at least {MIN_CHARACTERS}, at random")
    return given
