"""One run per output directory: an advisory lock that dies with its process."""

import contextlib
import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

from jaxablate.errors import UserError


class DirectoryLock:
    """Holds OUT/.lock for one run, or, for a shard, OUT/.lock-i-of-n beside other shards.

    A shard shares OUT/.lock with other shards, so that a run of everything (or a merge into OUT)
    and shards exclude each other. The kernel releases both when the process ends in any way.
    """

    def __init__(self, directory: Path, shard: str | None = None):
        self.directory = directory
        self.shard = shard
        self._descriptors: list[int] = []
        self._signed = False

    def acquire(self) -> None:
        """Raises UserError naming the process that holds the directory."""
        whole = fcntl.LOCK_EX if self.shard is None else fcntl.LOCK_SH
        try:
            self._take(self.directory / ".lock", whole)
            if self.shard is not None:
                self._take(self.directory / f".lock-{self.shard}", fcntl.LOCK_EX)
            self._sign()
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Gives the directory free; the (empty) lock files stay, as removing them would race."""
        if self._signed:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptors[-1], 0)
            self._signed = False
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _take(self, path: Path, operation: int) -> None:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(
                f"cannot open {path} ({error.strerror}); choose another --out"
            ) from error
        self._descriptors.append(descriptor)
        try:
            fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise UserError(self._refusal()) from error
            # Parts are atomic and keyed by content, so that two runs at once only waste work.
            print(
                f"warning: {self.directory} is on a file system without locks "
                f"({error.strerror}): do not start two runs there",
                file=sys.stderr,
            )

    def _sign(self) -> None:
        """Writes who holds the lock, for the message of the one who comes second."""
        who = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S %z"),
            "command": shlex.join(sys.argv),
        }
        descriptor = self._descriptors[-1]
        with contextlib.suppress(OSError):  # a full disk must not hinder a run that only redraws
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(who).encode(), 0)
        self._signed = True

    def _refusal(self) -> str:
        holders = [who for path in sorted(self.directory.glob(".lock*")) if (who := _holder(path))]
        names = "; ".join(
            f"process {who.get('pid')} on {who.get('host')}, started {who.get('started')}, "
            f"{who.get('command')!r}"
            for who in holders
        )
        return (
            f"{self.directory} is in use by another run ({names or 'unknown process'}): wait for "
            "its end, stop it, or choose another --out"
        )


def _holder(path: Path) -> dict[str, Any] | None:
    """Who signed the lock file at `path`, if that process still holds it."""
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                who = json.loads(file.read(10_000))
                return who if isinstance(who, dict) else None
    except (OSError, ValueError, RecursionError):
        pass
    return None
