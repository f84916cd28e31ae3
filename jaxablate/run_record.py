"""OUT/run.json: what was run, with what, on what, and for how long."""

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxablate import durable
from jaxablate.manifest import Plan

_PACKAGES = ("jaxablate", "jax", "jaxlib", "flax", "numpy", "pyarrow", "transformers")


@dataclass
class RunRecord:
    """The record of one plan in one directory, over all the sessions that it took.

    A session that was killed has no "ended", and the seconds up to its last save.
    """

    path: Path
    content: dict[str, Any]
    computed: int = 0
    _started: float = field(default_factory=time.monotonic)
    _saved: float = field(default_factory=time.monotonic)

    @property
    def seconds_since_saved(self) -> float:
        """Since the file was written last."""
        return time.monotonic() - self._saved

    @classmethod
    def begin(cls, path: Path, about: dict[str, Any], plan: Plan) -> "RunRecord":
        """Continues the record at `path` if it is of the same plan."""
        earlier: list[Any] = []
        try:
            old = json.loads(path.read_bytes())
            if old["plan"] == plan.digest and isinstance(old["sessions"], list):
                earlier = old["sessions"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            pass  # absent, damaged, or another program's: this one begins anew
        session = {
            "started": _now(),
            "ended": None,
            "command": shlex.join(sys.argv),
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        content = {
            **about,
            "plan": plan.digest,
            "identity": plan.identity,
            "documents": {part["document"]: part["document_digest"] for part in plan.parts},
            "versions": versions(),
            "platform": platform.platform(),
            "sessions": [*earlier, session],
        }
        return cls(path, content)

    def save(self, status: str, owner: str, **more: Any) -> None:
        """Writes the file: "running", "interrupted", "failed: …", "shard complete", "complete"."""
        session = self.content["sessions"][-1]
        session["seconds"] = round(time.monotonic() - self._started, 3)
        session["parts_computed"] = self.computed
        session["ended"] = None if status == "running" else _now()
        sessions = self.content["sessions"]
        seconds = sum(one.get("seconds", 0.0) for one in sessions if isinstance(one, dict))
        self.content.update(status=status, seconds=round(seconds, 3), **more)
        self._saved = time.monotonic()
        self.save_as(self.path, owner)

    def save_as(self, path: Path, owner: str) -> None:
        """Writes the same to `path`."""
        text = json.dumps(self.content, indent=1, sort_keys=True, default=str)
        durable.write_bytes(path, (text + "\n").encode(), owner)


def versions() -> dict[str, str | None]:
    """Of Python and the packages that numbers depend on; None where one is absent."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S %z")
