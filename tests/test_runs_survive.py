"""Runs that are killed, interrupted, refused, or out of disk lose nothing that was finished."""

import errno
import json
import os
import random
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from jaxablate import durable, interrupt, results
from jaxablate.errors import UserError
from tests import fake_sweep

ROOT = Path(__file__).resolve().parents[1]


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """The fake sweep in a child process."""
    return subprocess.Popen(
        [sys.executable, "tests/fake_sweep.py", str(out), *options],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(child: subprocess.Popen[str], line: str, times: int = 1) -> None:
    """Reads the child's output up to the n-th line that begins with `line`."""
    assert child.stdout is not None
    for read in child.stdout:
        times -= read.startswith(line)
        if not times:
            return
    assert child.stderr is not None
    raise AssertionError(f"no {line!r}: {child.stderr.read()}")


def run_to_end(out: Path, *options: str) -> list[str]:
    """The documents that were computed."""
    child = start(out, *options)
    output, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    return re.findall("^computing (.*)$", output, re.MULTILINE)


@pytest.fixture
def undisturbed(tmp_path: Path) -> Path:
    """Makes a directory name for a run that nothing happens to."""
    return tmp_path / "undisturbed"


def test_killed_at_twenty_random_moments_ends_with_the_same_bytes(
    tmp_path: Path, undisturbed: Path
) -> None:
    parts = 150
    moments = random.Random(0)
    out = tmp_path / "out"
    hit = 0
    for attempt in range(20):
        child = start(out, f"--parts={parts}", "--seconds=0.005")
        if attempt % 4:
            wait_for(child, "computing", times=2)
            time.sleep(moments.uniform(0, 0.06))
        else:  # somewhere within the start
            time.sleep(moments.uniform(0, 0.4))
        hit += child.poll() is None
        child.kill()
        child.communicate()
    done = len(list((out / "parts").glob("*.parquet")))
    assert hit >= 18
    assert done >= 20
    computed = run_to_end(out, f"--parts={parts}")
    assert len(computed) == parts - done
    assert fake_sweep.sweep(undisturbed, parts) == parts
    for name in ("rows.parquet", "rows.csv", "plan.json"):
        assert (out / name).read_bytes() == (undisturbed / name).read_bytes()
    assert not list(out.rglob(".*.tmp-*"))
    record = json.loads((out / "run.json").read_text())
    assert record["status"] == "complete"
    assert sum(session["ended"] is None for session in record["sessions"]) >= 10


def test_killed_during_the_final_file_ends_with_the_same_bytes(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_sweep.sweep(undisturbed, 3)
    replaced = []

    def replace_none(source: Path, target: Path) -> None:
        replaced.append(Path(target).name)
        if Path(target).name == "rows.parquet":
            raise MemoryError
        real_replace(source, target)

    real_replace = os.replace
    monkeypatch.setattr(durable.os, "replace", replace_none)
    with pytest.raises(MemoryError):
        fake_sweep.sweep(tmp_path / "out", 3)
    assert "rows.parquet" in replaced
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"give the experiment's command again"):
        results.read_rows(tmp_path / "out")
    assert fake_sweep.sweep(tmp_path / "out", 3) == 0
    ours = (tmp_path / "out" / "rows.parquet").read_bytes()
    assert ours == (undisturbed / "rows.parquet").read_bytes()


def test_killed_after_two_of_five_parts_only_three_run(tmp_path: Path, undisturbed: Path) -> None:
    out = tmp_path / "out"
    child = start(out, "--parts=5", "--seconds=0.2")
    wait_for(child, "computing topic 2")
    child.kill()
    child.communicate()
    computed = run_to_end(out, "--parts=5")
    assert computed == ["topic 2", "topic 3", "topic 4"]
    fake_sweep.sweep(undisturbed, 5)
    assert (out / "rows.parquet").read_bytes() == (undisturbed / "rows.parquet").read_bytes()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_first_signal_writes_the_current_part_and_says_how_to_go_on(
    tmp_path: Path, signum: int, code: int
) -> None:
    out = tmp_path / "out"
    child = start(out, "--parts=5", "--seconds=0.3")
    wait_for(child, "computing topic 1")
    child.send_signal(signum)
    output, errors = child.communicate(timeout=20)
    assert child.returncode == code
    assert "computing topic 2" not in output
    assert "finishing and writing the current part first; once more stops at once" in errors
    command = f"python tests/fake_sweep.py {out} --parts=5 --seconds=0.3"
    assert f"stopped: 2 of 5 parts are done and kept in {out}" in errors
    assert f"go on with the same command: {command}" in errors
    assert "Traceback" not in errors
    assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert run_to_end(out, "--parts=5") == ["topic 2", "topic 3", "topic 4"]


@pytest.mark.parametrize("blocking", [False, True], ids=["python", "compiled"])
def test_second_signal_stops_at_once(tmp_path: Path, blocking: bool) -> None:
    out = tmp_path / "out"
    fake_sweep_options = ["--parts=2", "--seconds=60"] + ["--blocking"] * blocking
    child = start(out, *fake_sweep_options)
    wait_for(child, "computing topic 0")
    started = time.monotonic()
    child.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert time.monotonic() - started < 5
    assert child.returncode == 130
    assert "once more stops at once" in errors
    assert "Traceback" not in errors
    if blocking:
        assert "stopped at once; the parts that were finished are intact" in errors
    else:  # there Python could still say goodbye
        assert "stopped: 0 of 2 parts are done" in errors
        assert json.loads((out / "run.json").read_text())["status"] == "interrupted"
    assert run_to_end(out, "--parts=2") == ["topic 0", "topic 1"]


def test_a_signal_during_the_last_part_stops_before_anything_else(tmp_path: Path) -> None:
    child = start(tmp_path, "--parts=1", "--seconds=0.3")
    wait_for(child, "computing topic 0")
    child.send_signal(signal.SIGINT)
    _, errors = child.communicate(timeout=20)
    assert child.returncode == 130
    assert "stopped: 1 of 1 parts are done" in errors
    assert run_to_end(tmp_path, "--parts=1") == []


def test_second_run_on_one_directory_refuses_and_names_the_first(tmp_path: Path) -> None:
    first = start(tmp_path, "--parts=1", "--seconds=60")
    wait_for(first, "computing topic 0")
    try:
        with pytest.raises(UserError) as refusal:
            fake_sweep.sweep(tmp_path, 1)
        message = str(refusal.value)
        assert f"process {first.pid} on {socket.gethostname()}, started 20" in message
        assert "tests/fake_sweep.py" in message
        assert "another --out" in message
        with pytest.raises(UserError, match="in use by another run"):
            fake_sweep.sweep(tmp_path, 1, results.Shard(0, 2))
    finally:
        first.kill()
        first.communicate()
    assert fake_sweep.sweep(tmp_path, 1) == 1  # the lock died with its process


def test_shards_share_a_directory_but_one_shard_runs_once(tmp_path: Path) -> None:
    with fake_sweep.new_run(tmp_path, results.Shard(0, 2)):
        with fake_sweep.new_run(tmp_path, results.Shard(1, 2)):
            pass
        with (
            pytest.raises(UserError, match=f"process {os.getpid()}"),
            fake_sweep.new_run(tmp_path, results.Shard(0, 2)),
        ):
            pass
        with pytest.raises(UserError, match="in use"), fake_sweep.new_run(tmp_path):
            pass
    with fake_sweep.new_run(tmp_path):
        pass


@pytest.mark.parametrize("where", ["file/below", "/proc/nowhere"])
def test_unwritable_out_is_refused_before_computing(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match=r"cannot make that directory .*; choose a path"):
        fake_sweep.sweep(tmp_path / where, 1)
    with pytest.raises(UserError, match="cannot make that directory"):
        results.prepare_directory(tmp_path / where)


def test_out_without_permission_is_refused(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    tmp_path.chmod(0o500)
    with pytest.raises(UserError, match=r"Permission denied"):
        fake_sweep.sweep(tmp_path, 1)


def test_full_disk_is_a_clear_error_and_the_run_goes_on_later(
    tmp_path: Path, undisturbed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    fake_sweep.sweep(undisturbed, 5)

    def full_for_parts(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if "parquet" in name and len(list((out / "parts").glob("*.parquet"))) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.os, "fsync", full_for_parts)
    with pytest.raises(UserError, match=r"no space left .* intact; make room.*same command again"):
        fake_sweep.sweep(out, 5)
    monkeypatch.undo()
    assert not list(out.rglob(".*.tmp-*"))
    assert json.loads((out / "run.json").read_text())["status"].startswith("failed: no space")
    assert fake_sweep.sweep(out, 5) == 3
    assert (out / "rows.parquet").read_bytes() == (undisturbed / "rows.parquet").read_bytes()


def test_content_is_on_the_disk_before_its_name_and_the_name_before_write_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    synced: list[int] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        status = os.fstat(descriptor)
        calls.append("fsync directory" if stat.S_ISDIR(status.st_mode) else "fsync file")
        synced.append(status.st_size)
        real_fsync(descriptor)

    def replace(source: Path, target: Path) -> None:
        calls.append("replace")
        real_replace(source, target)

    monkeypatch.setattr(durable.os, "fsync", fsync)
    monkeypatch.setattr(durable.os, "replace", replace)
    durable.write_bytes(tmp_path / "file", b"x" * 1000, "whole")
    assert calls == ["fsync file", "replace", "fsync directory"]
    assert synced[0] == 1000
    assert (tmp_path / "file").read_bytes() == b"x" * 1000


def test_a_shard_clears_only_its_own_leftovers(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    for owner in ("0-of-2", "1-of-2", "whole"):
        (tmp_path / "parts" / f".k.parquet.tmp-{owner}-host1").write_text("half")
    with fake_sweep.new_run(tmp_path, results.Shard(0, 2)):
        left = sorted(path.name for path in (tmp_path / "parts").iterdir())
        assert left == [".k.parquet.tmp-1-of-2-host1", ".k.parquet.tmp-whole-host1"]
    with fake_sweep.new_run(tmp_path):
        assert not list((tmp_path / "parts").iterdir())


@pytest.mark.usefixtures("interrupted_by_default")
def test_guard_polls_restores_and_is_idle_elsewhere() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupt.guard(), interrupt.guard():
        assert not interrupt.requested()
        interrupt.check()
        os.kill(os.getpid(), signal.SIGTERM)
        assert interrupt.requested()
        with pytest.raises(interrupt.Interrupted) as stop:
            interrupt.check()
        assert stop.value.code == 143
    assert not interrupt.requested()
    assert signal.getsignal(signal.SIGTERM) is before
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with interrupt.guard():
        assert not interrupt.requested()


def test_guard_installs_nothing_outside_of_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGINT)
    seen = []

    def work() -> None:
        with interrupt.guard():
            seen.append(signal.getsignal(signal.SIGINT))
            interrupt.check()

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
