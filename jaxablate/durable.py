"""Files that are either whole or absent, whatever moment the process or the machine dies."""

import contextlib
import errno
import io
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from jaxablate.errors import UserError


@contextlib.contextmanager
def replacing(path: Path, owner: str) -> Iterator[io.BufferedIOBase]:
    """Gives a file to write; on success it becomes `path` in one step, on failure nothing changes.

    The content reaches the disk before its name does, and the name before this returns. Leftovers
    of a killed process are told apart by `owner`, which names a lock that the caller holds.

    Raises:
      UserError: the disk is full, read-only, failing.
    """
    host = "".join(c for c in socket.gethostname() if c.isalnum())[:40]
    temporary = path.with_name(f".{path.name}.tmp-{owner}-{host}{os.getpid()}")
    try:
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_directory(path.parent)
    except OSError as error:
        raise UserError(disk_message(error, path)) from error


def disk_message(error: OSError, path: Path) -> str:
    """One line on what the disk answered and what to do about it."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return (
            f"no space left on the disk (or quota) while writing {path}: what was finished before "
            "is intact; make room, then give the same command again to go on"
        )
    return (
        f"cannot write {path} ({error.strerror or error}): what was finished before is intact; "
        "choose a writable --out on a working disk, or mend this one and give the command again"
    )


def sync_directory(directory: Path) -> None:
    """Makes renames in `directory` survive a power failure."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot; the rename itself is still atomic there.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


def write_bytes(path: Path, data: bytes, owner: str) -> None:
    """`replacing` for content that is at hand."""
    with replacing(path, owner) as file:
        file.write(data)


def remove_leftovers(directory: Path, owner: str | None) -> int:
    """Removes temporary files of killed processes: of `owner`, or of all. Returns their number."""
    removed = 0
    for path in sorted(directory.glob(f".*.tmp-{owner}-*" if owner else ".*.tmp-*")):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            removed += 1
    return removed


def prepare_directory(path: Path | str, owner: str = "check") -> Path:
    """Makes `path` if absent and proves that files can be written there, before any computing.

    Returns its absolute form.

    Raises:
      UserError: it is no directory, not writable, or its disk is full.
    """
    directory = Path(path).expanduser().resolve()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out={path}: cannot make that directory ({error.strerror}); "
            "choose a path in a directory that you may write to"
        ) from error
    probe = directory / ".writable"
    write_bytes(probe, b"jaxablate\n", owner)
    with contextlib.suppress(OSError):
        probe.unlink()
    return directory
