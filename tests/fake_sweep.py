"""A sweep without a model, run as a child process by the tests that kill, interrupt and shard it.

    python tests/fake_sweep.py OUT --parts=5 --seconds=0.01

Prints "ready", then one line per part that it computes, then "finished". The numbers are a
function of the document and the configuration, as those of a real sweep are.
"""

import argparse
import hashlib
import sys
import time

from jaxablate import results
from jaxablate.errors import UserError

CONFIGURATIONS = ("", "L0H0=3", "L1:block")
COLUMNS = {"layer": int, "ratio": float, "null": str}


def specs(parts: int) -> list[results.PartSpec]:
    """One part per document, of unequal cost."""
    return [
        results.PartSpec(f"topic {i}", f"digest {i}", CONFIGURATIONS, cost=1.0 + i % 3)
        for i in range(parts)
    ]


def rows_of(part: results.PartSpec) -> list[dict[str, object]]:
    """Two questions per configuration, with likelihoods made from a hash."""
    rows: list[dict[str, object]] = []
    for layer, key in enumerate(part.configurations):
        for question in ("q0", "q1"):
            seed = hashlib.sha256(f"{part.document}{key}{question}".encode()).digest()
            blocks = [seed[i] / 7 for i in range(4)]
            row = {"configuration": key, "question": question, "nll_sum": sum(blocks)}
            own = {"layer": layer, "ratio": seed[4] / 255, "null": None if layer else "zero"}
            rows.append({**row, **own, "scored_tokens": 64, "block_nll": blocks})
    return rows


def new_run(out: object, shard: results.Shard | None = None, **changes: object) -> results.Run:
    """A Run of this sweep; `changes` replace arguments of Run."""
    arguments: dict[str, object] = {
        "experiment": "fake",
        "settings": {"article_tokens": 1024, "ratios": [0.0, 0.5]},
        "flags": {"seed": 0},
        "model_digest": "model",
        "columns": COLUMNS,
        "constants": {"dtype": "float32", "seed": 0},
        "shard": shard,
    }
    return results.Run(str(out), **{**arguments, **changes})  # type: ignore[arg-type]


def sweep(out: object, parts: int, shard: results.Shard | None = None, **changes: object) -> int:
    """Runs it to the end in this process; returns how many parts were computed."""
    with new_run(out, shard, **changes) as run:
        run.plan(specs(parts))
        computed = 0
        for part in run.pending():
            run.write(part, rows_of(part))
            computed += 1
        run.finish()
    return computed


def compute(seconds: float, blocking: bool) -> None:
    """Takes time; `blocking` in one call of compiled code, during which no Python runs."""
    if blocking:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1 << 30)
    time.sleep(seconds)


def main() -> int:
    """Exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out")
    parser.add_argument("--parts", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--shard", default="")
    options = parser.parse_args()
    try:
        shard = results.parse_shard(options.shard, {})
        with new_run(options.out, shard) as run:
            run.plan(specs(options.parts))
            print("ready", flush=True)
            for part in run.pending():
                print(f"computing {part.document}", flush=True)
                compute(options.seconds, options.blocking)
                run.write(part, rows_of(part))
            run.finish()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("finished", flush=True)
    assert "jax" not in sys.modules  # results must start fast, and alone
    return 0


if __name__ == "__main__":
    sys.exit(main())
