"""A progress line with rate and time left, weighted by what the work costs."""

import io
import sys
import time
from collections.abc import Callable
from typing import Any


class Progress:
    """Progress over work whose pieces cost unequally.

    On a terminal one line is redrawn; elsewhere (a log file) a line is added every few seconds.

    Args:
      total: cost of everything, in any unit, such as block evaluations.
      items: number of things of everything, such as configurations times documents.
      done, done_items: what an earlier run finished; it counts as done but not for the rate.
      label, unit: words to show.
      stream: where to; standard error by default.
      log_seconds: least time between two lines where the stream is not a terminal.
      clock: seconds, monotonic; for tests.
    """

    def __init__(
        self,
        total: float | int,
        items: int,
        *,
        done: float | int = 0.0,
        done_items: int = 0,
        label: str = "",
        unit: str = "configurations",
        stream: io.TextIOBase | None = None,
        log_seconds: float | int = 10.0,
        clock: Callable[[], float | int] = time.monotonic,
    ):
        self.total, self.items = float(total), items
        self.done, self.done_items = float(done), done_items
        self.label, self.unit = label, unit
        self._stream: Any = sys.stderr if stream is None else stream
        self._terminal = bool(getattr(self._stream, "isatty", lambda: False)())
        self._pause = 0.2 if self._terminal else log_seconds
        self._clock = clock
        self._started = self._shown = clock()
        self._first, self._first_items = self.done, done_items
        self._width = 0

    def advance(self, cost: float | int, items: int = 0) -> None:
        """Adds finished work and shows it if it is time to."""
        self.reach(self.done + cost, self.done_items + items)

    def reach(self, done: float | int, done_items: int) -> None:
        """Sets the finished work, and so corrects the sum of finer advances."""
        self.done = min(done, self.total)
        self.done_items = min(done_items, self.items)
        now = self._clock()
        if now - self._shown >= self._pause:
            self._shown = now
            self._show()

    def close(self) -> None:
        """Shows the last state."""
        self._show()
        if self._terminal and self._width:
            self._stream.write("\n")
            self._stream.flush()
        self._width = 0

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    @property
    def seconds_left(self) -> float | int | None:
        """Predicted from the cost finished since the start; None before any was."""
        gone, cost = self._clock() - self._started, self.done - self._first
        return None if cost <= 0 else (self.total - self.done) * gone / cost

    def line(self) -> str:
        """The text shown, such as
        "influence  37 %  122/330 configurations  4.1/s  0:30 gone  0:51 left"."""
        gone = self._clock() - self._started
        percent = 100 * self.done / self.total if self.total > 0 else 100.0
        words = [self.label] if self.label else []
        words += [f"{percent:3.0f} %", f"{self.done_items}/{self.items} {self.unit}"]
        fresh = self.done_items - self._first_items
        if fresh > 0 and gone > 0:
            rate = fresh / gone
            words.append(f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each")
        words.append(f"{_duration(gone)} gone")
        left = self.seconds_left
        words.append("time left unknown yet" if left is None else f"{_duration(left)} left")
        return "  ".join(words)

    def _show(self) -> None:
        line = self.line()
        if self._terminal:
            self._stream.write("\r" + line.ljust(self._width))
            self._width = len(line)
        else:
            self._stream.write(line + "\n")
        self._stream.flush()


def _duration(seconds: float | int) -> str:
    """Seconds as m:ss, h:mm:ss, or days."""
    whole = round(seconds)
    if whole >= 86_400:
        return f"{whole // 86_400} d {whole % 86_400 // 3600} h"
    hours, rest = divmod(whole, 3600)
    minutes, rest = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
