"""The progress line: time left by cost, a log instead of a bar where there is no terminal."""

import io

from jaxablate.progress import Progress


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_time_left_goes_by_cost_and_not_by_number() -> None:
    clock = Clock()
    progress = Progress(100, 10, stream=io.StringIO(), clock=clock)
    assert progress.seconds_left is None
    assert "unknown" in progress.line()
    clock.now += 30
    progress.advance(20, 8)  # eight cheap ones of ten
    assert progress.seconds_left == 120
    assert progress.line() == " 20 %  8/10 configurations  3.75 s each  0:30 gone  2:00 left"


def test_what_an_earlier_run_did_counts_as_done_but_not_for_the_rate() -> None:
    clock = Clock()
    progress = Progress(100, 10, done=50, done_items=5, stream=io.StringIO(), clock=clock)
    assert progress.seconds_left is None
    clock.now += 10
    progress.advance(10, 1)
    assert progress.seconds_left == 40
    assert "6/10" in progress.line()
    progress.reach(1000, 1000)
    assert progress.seconds_left == 0
    assert progress.line().startswith("100 %  10/10")


def test_a_log_gets_a_line_every_few_seconds_and_the_last() -> None:
    clock, stream = Clock(), io.StringIO()
    with Progress(100, 100, label="sweep", stream=stream, log_seconds=5, clock=clock) as progress:
        for _ in range(100):
            clock.now += 0.24
            progress.advance(1, 1)
    lines = stream.getvalue().splitlines()
    assert len(lines) == 5
    assert lines[-1] == "sweep  100 %  100/100 configurations  4.17/s  0:24 gone  0:00 left"
    assert "\r" not in stream.getvalue()


def test_a_terminal_line_is_redrawn_over_its_whole_width() -> None:
    clock, stream = Clock(), Terminal()
    with Progress(10, 10, stream=stream, clock=clock) as progress:
        clock.now += 100_000
        progress.advance(1)
        clock.now += 1
        progress.advance(9, 10)
    first, second, third = stream.getvalue().split("\r")[1:]
    assert "10 d 10 h left" in first
    assert len(second) >= len(first)
    assert third.endswith("\n")
    assert "1 d 3 h gone" in third


def test_nothing_to_do_is_all_done() -> None:
    assert Progress(0, 0, stream=io.StringIO()).line().startswith("100 %")
