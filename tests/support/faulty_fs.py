"""A file system by FUSE that shows a folder and fails or waits on request. `mounted` starts it in a process of its own.

What one client of it does another one sees up to `stale` seconds later, as with the caches of NFS; a file that is
deleted while it is open stays in its folder under another name for its own client, as with NFS, and is stale (ESTALE)
for the others.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

LIFETIME = 500.0  # seconds after which the process ends, whatever its client does
CHANGES = ("create", "write", "truncate", "rename", "unlink", "mkdir", "rmdir", "symlink", "link", "chmod", "utimens")
OPERATIONS = (
    *CHANGES,
    "getattr",
    "readdir",
    "open",
    "read",
    "flush",
    "fsync",
    "fsyncdir",
    "chown",
    "readlink",
    "statfs",
)
GROWTH = ("create", "write", "mkdir", "symlink", "link")  # what needs room


class FaultyFolder:
    """A mounted folder.

    Args:
        path: where it is mounted.
        process: serves it.
    """

    def __init__(self, path: Path, process: subprocess.Popen) -> None:
        self.path, self._process = path, process

    def fail(self, error: int, operations: tuple[str, ...] = GROWTH, match: str = "", times: int = -1) -> None:
        """Lets operations on paths with `match` in them fail, at most `times` times if that is not negative."""
        self._ask({"errno": error, "operations": operations, "match": match, "times": times})

    def heal(self) -> int:
        """Lets nothing fail any more. Returns how often something did since the last call."""
        return self._ask({})

    def _ask(self, request: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


@contextmanager
def mounted(folder: Path, path: Path, *, delay: float = 0.0, stale: float = 0.0) -> Iterator[FaultyFolder]:
    """Mounts `folder` at `path`. Skips the test where that is not possible.

    Args:
        folder: has the files.
        path: where they are shown; created if absent.
        delay: seconds that every operation takes.
        stale: seconds for which attributes and listings are cached.
    """
    reason = unavailable()
    if reason:
        pytest.skip(reason)
    for one in (folder, path):
        one.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, __file__, str(folder), str(path), str(delay), str(stale)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "mounted\n":
            pytest.skip("this user cannot mount by FUSE")
        yield FaultyFolder(path, process)
    finally:
        subprocess.run(["umount", "-l", str(path)], capture_output=True, check=False)
        process.kill()
        process.communicate()


def unavailable() -> str | None:
    """Why nothing can be mounted here, or None."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "there is no /dev/fuse that this user may open"
    if not shutil.which("umount"):
        return "there is no umount here"
    try:
        import mfusepy  # noqa: F401
    except ImportError:
        return "needs the package mfusepy"
    except OSError:
        return "there is no libfuse here (Debian: libfuse2)"
    return None


def serve(folder: str, path: str, delay: float, stale: float) -> None:
    """Serves the folder until it is unmounted, or standard input ends."""
    import mfusepy

    class Passthrough(mfusepy.Operations):
        use_ns = True

        def __init__(self) -> None:
            self.rule: dict[str, Any] = {}
            self.failed, self.guard = 0, threading.Lock()
            self.listings: dict[str, tuple[float, list[str]]] = {}
            for name in OPERATIONS:
                setattr(self, name, partial(self.perform, name, getattr(self, name)))

        def perform(self, name: str, operation: Any, *args: Any) -> Any:
            time.sleep(delay)
            self.fail_if_asked(name, " ".join(arg for arg in args if isinstance(arg, str)))
            return operation(*args)

        def fail_if_asked(self, operation: str, names: str) -> None:
            with self.guard:
                rule = self.rule
                if not rule or operation not in rule["operations"] or not re.search(rule["match"], names):
                    return
                if rule["times"] == 0:
                    return
                rule["times"] -= 1
                self.failed += 1
            raise OSError(rule["errno"], os.strerror(rule["errno"]))

        def below(self, name: str) -> str:
            return folder + name

        def getattr(self, name: str, fh: int | None = None) -> dict[str, Any]:
            status = os.lstat(self.below(name)) if fh is None else os.fstat(fh)
            names = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
            times = {f"st_{kind}time": getattr(status, f"st_{kind}time_ns") for kind in "amc"}
            return {key: getattr(status, key) for key in names} | times

        def readdir(self, name: str, fh: int) -> list[tuple[str, dict[str, int], int]]:
            listed, names = self.listings.get(name, (0.0, []))
            if time.monotonic() - listed >= stale:
                names = [".", "..", *os.listdir(self.below(name))]
                self.listings[name] = time.monotonic(), names
            return [(name, {"st_ino": 1}, 0) for name in names]  # of those without a number nothing is listed

        def forget(self, *names: str) -> None:
            """This client sees its own changes at once."""
            for name in names:
                self.listings.pop(os.path.dirname(name), None)
                self.listings.pop(name, None)

        def open(self, name: str, flags: int) -> int:
            return os.open(self.below(name), flags & ~os.O_APPEND)

        def create(self, name: str, mode: int, fi: Any = None) -> int:
            self.forget(name)
            return os.open(self.below(name), os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

        def read(self, name: str, size: int, offset: int, fh: int) -> bytes:
            if stale and os.fstat(fh).st_nlink == 0:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
            return os.pread(fh, size, offset)

        def write(self, name: str, data: bytes, offset: int, fh: int) -> int:
            return os.pwrite(fh, data, offset)

        def truncate(self, name: str, length: int, fh: int | None = None) -> int:
            os.truncate(self.below(name) if fh is None else fh, length)
            return 0

        def flush(self, name: str, fh: int) -> int:
            return 0

        def fsync(self, name: str, datasync: int, fh: int) -> int:
            os.fsync(fh)
            return 0

        def fsyncdir(self, name: str, datasync: int, fh: int) -> int:
            return 0

        def release(self, name: str, fh: int) -> int:
            os.close(fh)
            return 0

        def rename(self, old: str, new: str) -> int:
            self.listings.clear()
            os.rename(self.below(old), self.below(new))
            return 0

        def unlink(self, name: str) -> int:
            self.forget(name)
            os.unlink(self.below(name))
            return 0

        def mkdir(self, name: str, mode: int) -> int:
            self.forget(name)
            os.mkdir(self.below(name), mode)
            return 0

        def rmdir(self, name: str) -> int:
            self.forget(name)
            os.rmdir(self.below(name))
            return 0

        def chmod(self, name: str, mode: int) -> int:
            os.chmod(self.below(name), mode)
            return 0

        def chown(self, name: str, uid: int, gid: int) -> int:
            os.lchown(self.below(name), uid, gid)
            return 0

        def utimens(self, name: str, times: Any = None) -> int:
            os.utime(self.below(name), ns=times)
            return 0

        def readlink(self, name: str) -> str:
            return os.readlink(self.below(name))

        def symlink(self, target: str, source: str) -> int:
            self.forget(target)
            os.symlink(source, self.below(target))
            return 0

        def link(self, target: str, source: str) -> int:
            self.forget(target)
            os.link(self.below(source), self.below(target))
            return 0

        def access(self, name: str, amode: int) -> int:
            return 0

        def statfs(self, name: str) -> dict[str, int]:
            found = os.statvfs(self.below(name))
            names = ("f_bsize", "f_frsize", "f_blocks", "f_bfree", "f_bavail", "f_files", "f_ffree", "f_namemax")
            return {key: getattr(found, key) for key in names}

        def init(self, name: str) -> None:
            print("mounted", flush=True)

    operations = Passthrough()

    def obey() -> None:
        for line in sys.stdin:
            with operations.guard:
                operations.rule, failed, operations.failed = json.loads(line), operations.failed, 0
            print(failed, flush=True)
        end()

    def end() -> None:
        subprocess.run(["umount", "-l", path], capture_output=True, check=False)
        os._exit(0)

    threading.Thread(target=obey, daemon=True).start()
    timer = threading.Timer(LIFETIME, end)
    timer.daemon = True
    timer.start()
    caches = {f"{kind}_timeout": stale for kind in ("attr", "entry", "negative")}
    with suppress(RuntimeError):  # it cannot be mounted; the client reads no `mounted`
        mfusepy.FUSE(operations, path, foreground=True, allow_other=False, use_ino=True, big_writes=True, **caches)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4]))
