"""One JAX program on several hosts: every process computes, process 0 alone reads and writes OUT.

    hosts.start(coordinator, num_processes, process_id)      # before anything else of JAX
    with hosts.open_run(out, experiment=..., ...) as run:    # as results.Run
        ...

All processes make the same calls in the same order, as the collectives between their devices need.
What only process 0 knows (which parts are there already, whether to stop) it tells the others.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jaxablate import interrupt, results
from jaxablate.errors import UserError
from jaxablate.parts import PartSpec

_GO, _STOP = 1, 0
_Result = TypeVar("_Result")


class ProcessZeroStopped(UserError):
    """Process 0 stopped or failed; it said why."""


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Join the program: see `jax.distributed.initialize`.

    What is not given is found out under SLURM, Open MPI, and Kubernetes (with the package
    `kubernetes`, or JAX_COORDINATOR_ADDRESS, JOB_COMPLETIONS and JOB_COMPLETION_INDEX of an indexed
    Job).

    Raises:
      UserError: too little is known, or the coordinator is not there.
    """
    environment = os.environ
    coordinator = coordinator or environment.get("JAX_COORDINATOR_ADDRESS")
    if coordinator and "JOB_COMPLETION_INDEX" in environment:
        if process_id is None:
            process_id = _number(environment, "JOB_COMPLETION_INDEX")
        if num_processes is None and "JOB_COMPLETIONS" in environment:
            num_processes = _number(environment, "JOB_COMPLETIONS")
    explicit = None not in (coordinator, num_processes, process_id)
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            # Otherwise a cluster found as well would give each process one of its devices only.
            cluster_detection_method="deactivate" if explicit else None,
        )
    except (ValueError, RuntimeError, OSError) as error:
        message = " ".join(str(error).split())[:300]
        raise UserError(
            f"--distributed: {message} Run it under SLURM (srun), Open MPI (mpirun) or Kubernetes, "
            "or give --coordinator=HOST:PORT, --num_processes and --process_id"
        ) from error


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise UserError(f"{name} is {environment[name]!r}; it must be a whole number") from None


def is_leader() -> bool:
    """Whether this is process 0, or the only one. Starts JAX's devices."""
    return jax.process_index() == 0


def leader_first(function: Callable[[], _Result]) -> _Result:
    """Call it in process 0, then in the others: what one of them makes, the others find.

    Raises:
      ProcessZeroStopped: in the others, where it failed in process 0.
    """
    if jax.process_count() == 1:
        return function()
    if not is_leader():
        _hear()
        return function()
    try:
        result = function()
    except BaseException:
        _tell(_STOP)
        raise
    _tell(_GO)
    return result


def open_run(out: Path | str, **about: Any) -> results.Run:
    """A `results.Run`; in the processes of several hosts, one that follows that of process 0."""
    if jax.process_count() == 1:
        return results.Run(out, **about)
    return _Leader(out, **about) if is_leader() else _Follower(out, **about)


class _Leader(results.Run):
    """Tells the others, at every point where they wait for it, to go on or to stop."""

    _others_wait = True

    def __enter__(self) -> "_Leader":
        try:
            super().__enter__()
        except BaseException:
            _tell(_STOP)
            raise
        _tell(_GO)
        return self

    def __exit__(self, kind: Any, failure: BaseException | None, trace: Any) -> None:
        try:
            if failure is not None and self._others_wait:
                _tell(_STOP)
        finally:
            super().__exit__(kind, failure, trace)

    def plan(self, parts: Sequence[PartSpec]) -> list[PartSpec]:
        mine = super().plan(parts)
        missing = {id(part) for part in self.missing()}
        _tell(_GO)
        _share(np.asarray([self.complete(), *(id(part) in missing for part in parts)]))
        return mine

    def pending(self) -> Iterator[PartSpec]:
        for part in super().pending():
            _tell(_GO)
            yield part

    def finish(self) -> Path | None:
        path = super().finish()
        _tell(_GO)
        self._others_wait = False
        return path


class _Follower(results.Run):
    """Computes the parts that process 0 goes through, and keeps nothing."""

    def __enter__(self) -> "_Follower":
        # A signal stops process 0, which stops the others when its part is written.
        self._leaving.enter_context(interrupt.guard("process 0 decides when to stop"))
        try:
            _hear()
        except BaseException:
            self._leaving.close()
            raise
        return self

    def __exit__(self, kind: Any, failure: BaseException | None, trace: Any) -> None:
        self._leaving.close()
        same_everywhere = isinstance(failure, (UserError, ArithmeticError))
        if same_everywhere and not isinstance(failure, ProcessZeroStopped):
            with contextlib.suppress(ProcessZeroStopped):
                _hear()  # process 0 met it, too

    def plan(self, parts: Sequence[PartSpec]) -> list[PartSpec]:
        _hear()
        complete, *missing = _share(np.zeros(1 + len(parts), bool))
        self._complete = bool(complete)
        self._todo = [part for part, is_missing in zip(parts, missing) if is_missing]
        return list(self._todo)

    def complete(self) -> bool:
        return self._complete

    def missing(self) -> list[PartSpec]:
        return list(self._todo)

    def pending(self) -> Iterator[PartSpec]:
        for part in self.missing():
            _hear()
            yield part

    @property
    def progress(self) -> Any:
        return _NoProgress()

    def write(self, part: PartSpec, part_rows: Iterable[Mapping[str, Any]]) -> None:
        self._todo = [other for other in self._todo if other is not part]

    def finish(self) -> Path | None:
        _hear()
        return None


class _NoProgress:
    done, done_items = 0.0, 0

    def reach(self, done: float, items: int | None = None) -> None:
        pass

    def advance(self, amount: float, items: int = 0) -> None:
        pass


def _tell(code: int) -> None:
    _share(np.asarray([code], np.int32))


def _hear() -> None:
    if int(_share(np.zeros(1, np.int32))[0]) != _GO:
        raise ProcessZeroStopped("process 0 stopped; see what it said")


def _share(array: np.ndarray) -> np.ndarray:
    """Process 0's array, in every process."""
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.broadcast_one_to_all(array))
