"""Speed against honest rivals on this machine, in one run, as ratios.

    make bench                     # about 12 minutes on 2 CPU cores
    python bench/run.py --quick    # about 2 minutes
    python bench/run.py --only=influence,removals --json=bench.json

Both sides of every row are checked to agree, warmed up, and timed in turn; medians, with the
fastest and slowest repeat. "floor": the time that the operations need at the matrix-product rate
measured in the same run, or what else cannot be undercut; "share": the floor divided by our time.
Run it on an otherwise idle machine.
"""

import dataclasses
import json
import platform
import shutil
import sys
from pathlib import Path

from absl import app, flags, logging

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import measure, tasks

_QUICK = flags.DEFINE_bool("quick", False, "Smaller tasks and fewer repeats, about 2 minutes.")
_ONLY = flags.DEFINE_list("only", None, f"Some of {', '.join(tasks.TASKS)}.")
_JSON = flags.DEFINE_string("json", "out/bench.json", "Where the rows go as JSON.")


def main(argv: list[str]) -> int:
    del argv
    logging.set_verbosity(logging.ERROR)
    chosen = _ONLY.value or list(tasks.TASKS)
    unknown = sorted(set(chosen) - set(tasks.TASKS))
    if unknown:
        print(f"error: --only names {unknown}; there are {list(tasks.TASKS)}", file=sys.stderr)
        return 1
    scratch = tasks.scratch_directory()
    rows: list[measure.Row] = []
    try:
        bench = tasks.Bench(_QUICK.value, scratch)
        for name in chosen:
            print(f"{name} …", file=sys.stderr, flush=True)
            found = tasks.TASKS[name](bench)
            print(measure.table(found), file=sys.stderr, flush=True)
            rows += found
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    print(measure.table(rows))
    _write(rows)
    return 0


def _write(rows: list[measure.Row]) -> None:
    path = Path(_JSON.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    found = [
        dataclasses.asdict(row) | {"ratio": row.ratio, "share_of_floor": row.share_of_floor}
        for row in rows
    ]
    about = {"machine": platform.processor() or platform.machine(), "quick": _QUICK.value}
    path.write_text(json.dumps({"about": about, "rows": found}, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    app.run(main)
