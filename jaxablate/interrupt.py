"""Stopping a long run politely: finish what is being computed, write it, say how to go on.

    with interrupt.guard():
        for part in parts:
            compute_and_write(part)
            interrupt.check()

The first SIGINT (Ctrl-C) or SIGTERM only asks; the second stops at once, even in the middle of a
compiled computation. Nothing is installed at import, nor outside of the main thread.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
# How long the second signal waits for Python to unwind before the process is ended.
_GRACE_SECONDS = 1.0

_active = False
_asked: int | None = None


class Interrupted(SystemExit):
    """The user or the scheduler asked to stop. Exit code 130 (SIGINT) or 143 (SIGTERM)."""

    def __init__(self, signum: int):
        super().__init__(128 + signum)
        self.signum = signum


def requested() -> bool:
    """Whether a stop was asked for; the engine polls this between chunks."""
    return _asked is not None


def check() -> None:
    """Raises Interrupted if a stop was asked for."""
    if _asked is not None:
        raise Interrupted(_asked)


@contextlib.contextmanager
def guard(message: str = "finishing and writing the current part first") -> Iterator[None]:
    """Within it, the first signal sets `requested()`, the second stops at once.

    Args:
      message: what happens after the first signal, for the line that is then shown.
    """
    global _active, _asked
    if _active or threading.current_thread() is not threading.main_thread():
        yield
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old_handlers = {signum: signal.signal(signum, _on_signal) for signum in _SIGNALS}
    old_descriptor = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    _active, _asked = True, None
    # Python runs handlers only between its own instructions, so that a signal would go unnoticed
    # during a long compiled call; the interpreter writes the wake-up pipe at once.
    watcher = threading.Thread(target=_watch, args=(reader, message), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(old_descriptor)
        for signum, handler in old_handlers.items():
            signal.signal(signum, handler)
        _active, _asked = False, None
        os.close(writer)
        watcher.join(timeout=_GRACE_SECONDS)


def _on_signal(signum: int, frame: FrameType | None) -> None:
    global _asked
    if _asked is not None:
        raise Interrupted(signum)
    _asked = signum


def _watch(reader: int, message: str) -> None:
    """Answers signals from a thread of its own until the guard closes the pipe."""
    count = 0
    with open(reader, "rb", buffering=0) as pipe:
        while received := pipe.read(1):
            if received[0] not in _SIGNALS:
                continue
            count += 1
            name = "Ctrl-C" if received[0] == signal.SIGINT else "SIGTERM"
            if count == 1:
                _say(f"\n{name}: {message}; once more stops at once")
            elif not hasattr(sys, "ps1"):  # a notebook's process must live on
                deadline = time.monotonic() + _GRACE_SECONDS
                while _active and time.monotonic() < deadline:
                    time.sleep(0.02)
                if _active:
                    _say("stopped at once; the parts that were finished are intact")
                    os._exit(128 + received[0])


def _say(line: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, (line + "\n").encode())
