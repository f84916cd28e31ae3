"""Joins the results of shards: the rows that a single run would have written, byte for byte.

    python experiments/merge.py out/shard-0 out/shard-1 out/shard-2 --out=out/whole

Takes the directories in any order; merging again, or parts computed twice, change nothing. Refuses
directories that are not of one sweep, naming what differs (exit code 1), and names the parts that
are still missing (exit code 1, nothing written). Then the experiment's own command with
--out=out/whole draws the figures without computing. A few seconds.
"""

import sys

from absl import app, flags

from jaxablate import merging
from jaxablate.errors import UserError

_OUT = flags.DEFINE_string("out", None, "directory of the merged result", required=True)


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    try:
        merged = merging.merge(argv[1:], _OUT.value)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if merged.contradicting:
        print(
            f"note: {merged.contradicting} parts were computed more than once with other numbers "
            "(another device or version rounds differently); one of each was taken, the same in "
            "any order of directories"
        )
    if merged.unchanged:
        print(f"{merged.rows} is complete already: nothing to do")
    else:
        print(f"{merged.parts} parts merged: {merged.rows}")
    return 0


if __name__ == "__main__":
    app.run(main)
