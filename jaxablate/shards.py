"""Which share of a sweep this process computes, when several machines share it."""

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jaxablate.errors import UserError

ALLOWED = "'i/n' with 0 <= i < n (such as 0/4), 'auto', or 'auto/n'"


@dataclass(frozen=True)
class Shard:
    """Share `index` of `count`, 0 <= index < count. Raises UserError otherwise."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UserError(f"shard {self.index}/{self.count}: want {ALLOWED}")

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"

    @property
    def tag(self) -> str:
        """For file names: "0-of-4"."""
        return f"{self.index}-of-{self.count}"


def parse_shard(text: str | None, environment: Mapping[str, str]) -> Shard | None:
    """Reads --shard; None or "" is the whole sweep.

    "auto" takes the share from an array job: SLURM (SLURM_ARRAY_TASK_ID, _MIN, _MAX, _STEP and
    _COUNT), or an indexed Kubernetes Job (JOB_COMPLETION_INDEX, and JOB_COMPLETIONS, which the
    manifest must set). "auto/n" takes only the index (counted from 0) from there: use it where an
    array is not whole, as after resubmitting some of its tasks.

    Raises:
      UserError: anything else, naming what was got and what is allowed.
    """
    if not text:
        return None
    if match := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text, re.ASCII):
        return Shard(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"auto(?:/(\d{1,9}))?", text, re.ASCII):
        return _from_job(environment, int(match[1]) if match[1] else None)
    raise UserError(f"--shard={text}: want {ALLOWED}")


def _from_job(environment: Mapping[str, str], count: int | None) -> Shard:
    if "SLURM_ARRAY_TASK_ID" in environment:
        index = _number(environment, "SLURM_ARRAY_TASK_ID")
        return Shard(index, count) if count is not None else _from_array(environment, index)
    if "JOB_COMPLETION_INDEX" in environment:
        index = _number(environment, "JOB_COMPLETION_INDEX")
        if count is None and "JOB_COMPLETIONS" not in environment:
            raise UserError(
                "--shard=auto: JOB_COMPLETION_INDEX is set but not JOB_COMPLETIONS; set it in the "
                "Job's manifest, or give the number of shards as --shard=auto/n"
            )
        return Shard(index, _number(environment, "JOB_COMPLETIONS") if count is None else count)
    raise UserError(
        "--shard=auto: neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX is set, so this is no "
        f"array job; want {ALLOWED}"
    )


def _from_array(environment: Mapping[str, str], task: int) -> Shard:
    first = _number(environment, "SLURM_ARRAY_TASK_MIN")
    count = _number(environment, "SLURM_ARRAY_TASK_COUNT")
    last = _number(environment, "SLURM_ARRAY_TASK_MAX", first + count - 1)
    step = _number(environment, "SLURM_ARRAY_TASK_STEP", 1)
    if step < 1 or (last - first) // step + 1 != count or not first <= task <= last:
        raise UserError(
            f"--shard=auto: task {task} of an array of {count} tasks from {first} to {last}, step "
            f"{step}, which has gaps: give the number of shards as --shard=auto/n"
        )
    return Shard((task - first) // step, count)


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name)
    if text is None and default is not None:
        return default
    if text is None or not re.fullmatch(r"\d{1,9}", text, re.ASCII):
        raise UserError(f"--shard=auto: {name} is {text!r}, want a whole number")
    return int(text)


def split(costs: Sequence[float | int], count: int) -> list[list[int]]:
    """Indices of each of `count` shares: the longest first, each to the least loaded share.

    Every machine computes the same split from the same costs: ties go to the earlier piece, and to
    the share with fewer pieces, then to the lower one. No share exceeds 4/3 of the best possible
    largest one (Graham 1969). Within a share the order of the plan is kept.
    """
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [(0.0, 0, share) for share in range(count)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, pieces, share = loads[0]
        shares[share].append(index)
        heapq.heapreplace(loads, (load + costs[index], pieces + 1, share))
    return [sorted(share) for share in shares]
