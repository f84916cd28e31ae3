"""Results of an experiment in OUT: rows in parts as they are computed, resumed, finished.

    with results.Run(out, experiment="influence", settings=settings, flags=flags,
                     model_digest=checkpoint.digest, columns={"layer": int, "ratio": float},
                     constants={"dtype": "float32", "seed": 0}) as run:
        run.plan(parts)                      # list[PartSpec], the whole sweep, in order
        for part in run.pending():           # what is missing here; shows progress
            run.write(part, compute(part))   # rows as mappings; on the disk when it returns
        run.finish()                         # OUT/rows.parquet, rows.csv, run.json
    table = results.read_rows(out)

Within `with`, the first Ctrl-C or SIGTERM lets the current part be written and then stops
(`interrupt`); killed at any moment, at most the part being computed is lost, and the same command
goes on from there to the same bytes.
"""

import contextlib
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxablate import durable, interrupt, manifest, rows, run_record
from jaxablate.errors import UserError
from jaxablate.finished import assemble, is_complete, read_rows
from jaxablate.lock import DirectoryLock
from jaxablate.parts import PartFiles, PartSpec, digest, group_configurations, part_key
from jaxablate.progress import Progress
from jaxablate.shards import Shard, parse_shard, split

__all__ = [
    "PartSpec",
    "Run",
    "Shard",
    "group_configurations",
    "parse_shard",
    "prepare_directory",
    "read_rows",
]

prepare_directory = durable.prepare_directory
# How often run.json is brought up to date, so that it tells of sessions that are killed, too.
_RECORD_SECONDS = 30.0


class Run:
    """One run of one experiment into one directory.

    Args:
      out: directory of the results; made if absent.
      experiment: its name, in every row.
      settings: everything that changes numbers, apart from the model, the documents and the
        configurations; plain JSON values. Other settings, other parts.
      flags: every resolved flag, for run.json only.
      model_digest: of the weights.
      columns: the experiment's own scalar columns, {"layer": int, "ratio": float, "null": str}.
      constants: values that all rows share, such as dtype, seed, method, estimator.
      device: in words, for run.json.
      shard: the share to compute; None is everything.
      scored: whether rows hold likelihoods (see RowSchema).
      label, unit: words of the progress line.
    """

    def __init__(
        self,
        out: Path | str,
        *,
        experiment: str,
        settings: Mapping[str, Any],
        flags: Mapping[str, Any],
        model_digest: str,
        columns: Mapping[str, type] | None = None,
        constants: Mapping[str, Any] | None = None,
        device: str = "",
        shard: Shard | None = None,
        scored: bool = True,
        label: str = "",
        unit: str = "configurations",
    ):
        if not str(out).strip():  # an unset variable of a script; pathlib takes it for "."
            raise UserError("--out is empty; name a directory for the results")
        self.out = Path(out).expanduser().resolve()
        self.shard = shard
        self.schema = rows.RowSchema.declare(columns or {}, scored)
        self._same = {"experiment": experiment, "model_digest": model_digest, **(constants or {})}
        if unknown := sorted(set(self._same) - set(self.schema.arrow.names)):
            raise ValueError(f"constants {unknown} are no columns: {self.schema.arrow.names}")
        self._identity = manifest.identity(
            experiment=experiment,
            model_digest=model_digest,
            settings=settings,
            constants=constants or {},
            schema=self.schema,
        )
        self._about = {
            "experiment": experiment,
            "flags": dict(flags),
            "device": device,
            "shard": str(shard) if shard else None,
        }
        self._owner = shard.tag if shard else "whole"
        self._files = PartFiles(self.out / "parts", self.schema, self._owner)
        self._lock = DirectoryLock(self.out, shard.tag if shard else None)
        self._label, self._unit = label or experiment, unit
        self._leaving = contextlib.ExitStack()
        self._plan: manifest.Plan | None = None
        self._specs: dict[str, PartSpec] = {}
        self._mine: dict[str, None] = {}  # keys, in order
        self._done: set[str] = set()
        self._amount_done = (0.0, 0)
        self._record: run_record.RunRecord | None = None
        self._progress: Progress | None = None
        self._complete = False

    # --- beginning and end -------------------------------------------------------------------

    def __enter__(self) -> "Run":
        """Takes the directory. Raises UserError if it cannot be written or another run has it."""
        durable.prepare_directory(self.out, self._owner)
        self._lock.acquire()
        self._leaving.callback(self._lock.release)
        try:
            durable.prepare_directory(self._files.directory, self._owner)
            # Whoever holds the whole directory may clear what any killed process left there.
            owner = self._owner if self.shard else None
            for directory in (self.out, self._files.directory):
                durable.remove_leftovers(directory, owner)
            self._leaving.enter_context(interrupt.guard())
        except BaseException:
            self._leaving.close()
            raise
        return self

    def __exit__(self, kind: Any, failure: BaseException | None, trace: Any) -> None:
        try:
            if failure is not None and self._record is not None and self._plan is not None:
                self._stopped(failure)
        finally:
            self._leaving.close()

    def _stopped(self, failure: BaseException) -> None:
        stopped = isinstance(failure, (interrupt.Interrupted, KeyboardInterrupt))
        with contextlib.suppress(UserError):  # a full disk: the parts alone carry the state
            self._save("interrupted" if stopped else f"failed: {failure}"[:500])
        if stopped:
            command = shlex.join(["python", *sys.argv]) if sys.argv[0] else "the same command"
            _say(
                f"stopped: {len(self._done)} of {len(self._mine)} parts are done and kept in "
                f"{self.out}; go on with the same command: {command}"
            )

    # --- plan --------------------------------------------------------------------------------

    def plan(self, parts: Sequence[PartSpec]) -> list[PartSpec]:
        """Takes the whole sweep's parts, in the order of the final rows; returns this shard's.

        Writes OUT/plan.json and finds out which parts are there and intact. Parts of other
        settings that OUT may hold are neither used nor removed.
        """
        plan = manifest.make_plan(self._identity, parts)
        self._plan = plan
        self._specs = dict(zip(plan.keys, parts))
        shares = split([part.cost for part in parts], self.shard.count) if self.shard else None
        chosen = shares[self.shard.index] if shares and self.shard else range(len(parts))
        keys = plan.keys
        self._mine = dict.fromkeys(keys[index] for index in chosen)
        self._mention_other_plan(plan)
        self._complete = is_complete(self.out, plan)
        if not self._complete:
            self._start(plan)
        return [self._specs[key] for key in self._mine]

    def _mention_other_plan(self, plan: manifest.Plan) -> None:
        try:
            other = manifest.read_plan(self.out)
        except UserError:
            return
        if found := manifest.differences(other, plan):
            if other.identity == plan.identity:
                _say(f"note: {self.out} holds another plan of these settings; its parts are used")
                return
            _say(
                f"note: {self.out} was used before with other {', '.join(found)} (then, now); the "
                "parts computed then stay there, and its rows are replaced when this run is done"
            )

    def _start(self, plan: manifest.Plan) -> None:
        manifest.write_plan(self.out, plan, self._owner)
        self._done, damage = self._files.check(self._mine)
        self._amount_done = self._amount(self._done)
        for line in damage:
            _say(f"{line}; computing it again")
        if self._done and len(self._done) < len(self._mine):
            _say(f"going on: {len(self._done)} of {len(self._mine)} parts are there already")
        name = f"run-{self.shard.tag}.json" if self.shard else "run.json"
        self._record = run_record.RunRecord.begin(self.out / name, self._about, plan)
        self._save("running")

    def complete(self) -> bool:
        """Whether OUT holds the finished rows of this very plan: then there is only to draw."""
        self._planned()
        return self._complete

    def missing(self) -> list[PartSpec]:
        """This shard's parts that are still to be computed, in order."""
        self._planned()
        if self._complete:
            return []
        return [self._specs[key] for key in self._mine if key not in self._done]

    @property
    def progress(self) -> Progress:
        """The progress line; `write` moves it, and an engine may `advance` it in between."""
        self._planned()
        if self._progress is None:
            cost, items = self._amount(self._mine)
            self._progress = Progress(
                cost,
                items,
                done=self._amount_done[0],
                done_items=self._amount_done[1],
                label=self._label,
                unit=self._unit,
            )
        return self._progress

    def pending(self) -> Iterator[PartSpec]:
        """Yields each missing part, for the caller to compute and `write`; shows progress.

        Raises Interrupted between two parts once a stop was asked for.
        """
        parts = self.missing()
        if not parts:
            return
        with self.progress:
            for part in parts:
                interrupt.check()
                yield part
            interrupt.check()

    # --- rows --------------------------------------------------------------------------------

    def write(self, part: PartSpec, part_rows: Iterable[Mapping[str, Any]]) -> None:
        """Writes one part's rows; when it returns they survive whatever comes.

        Args:
          part: one of the plan's.
          part_rows: mappings from column to Python value: "configuration", "scored_tokens",
            "nll_sum", and whichever else differ between rows ("question", "block_nll", own
            columns). Experiment, digests, document and constants are filled in.

        Raises:
          TypeError, ValueError: rows that are not this part's or not of the declared columns.
          UserError: a likelihood that is not a number; a full disk.
        """
        key = part_key(digest(self._identity), part)
        if key not in self._specs:
            raise ValueError(f"{part} is not in the plan")
        same = {**self._same, "document": part.document, "document_digest": part.document_digest}
        table = rows.table_from_rows(part_rows, self.schema, same)
        self._files.write(key, rows.in_order(table, part.configurations))
        if self._record is not None:
            self._record.computed += 1
            if self._record.seconds_since_saved > _RECORD_SECONDS:
                self._save("running")
        if key in self._mine and key not in self._done:
            self._done.add(key)
            cost, items = self._amount_done
            self._amount_done = (cost + part.cost, items + len(part.configurations))
        self.progress.reach(*self._amount_done)

    def finish(self) -> Path | None:
        """Writes OUT/rows.parquet, rows.csv and run.json from the parts, in the plan's order.

        Returns the path of rows.parquet; or None for a shard while parts of other shards are not
        in OUT: then `python experiments/merge.py` joins the shards' directories.

        Raises:
          UserError: a full disk, or a part damaged since it was written.
          RuntimeError: parts of this run are not written yet.
        """
        plan = self._planned()
        if self._complete:
            return self.out / "rows.parquet"
        if absent := self.missing():
            raise RuntimeError(f"{len(absent)} parts of {self.out} are not computed yet")
        if self.shard and len(self._files.check(plan.keys)[0]) < len(plan.parts):
            self._save("shard complete")
            _say(
                f"shard {self.shard} is done: {len(self._mine)} of {len(plan.parts)} parts; when "
                "all are, join them with: python experiments/merge.py DIR... --out=OUT"
            )
            return None
        sha256 = assemble(self.out, plan, self._files)
        self._save("complete", rows_sha256=sha256)
        if self.shard and self._record is not None:
            self._record.save_as(self.out / "run.json", self._owner)
        self._complete = True
        return self.out / "rows.parquet"

    def read(self) -> Any:
        """The finished rows as a pandas DataFrame."""
        return read_rows(self.out)

    # --- within ------------------------------------------------------------------------------

    def _planned(self) -> manifest.Plan:
        if self._plan is None:
            raise RuntimeError("call plan(parts) first")
        return self._plan

    def _amount(self, keys: Iterable[str]) -> tuple[float, int]:
        specs = [self._specs[key] for key in keys]
        return float(sum(one.cost for one in specs)), sum(len(one.configurations) for one in specs)

    def _save(self, status: str, **more: Any) -> None:
        assert self._record is not None  # _start made it
        parts = {"plan": len(self._specs), "mine": len(self._mine), "done": len(self._done)}
        self._record.save(status, self._owner, parts=parts, **more)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
