"""The whole state of a training run on disk, so that a killed run goes on where it was.

DIR/step_000150/state/     Orbax: parameters, the optimiser's state, losses so far
DIR/step_000150/done       written last; a state without it is a killed writer's
"""

import shutil
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding
from jaxtyping import Float

from jaxablate.errors import UserError
from jaxablate.stored_arrays import orbax_context
from jaxablate.training import TrainState

_DONE = "done"


def save_state(
    directory: Path, step: int, state: TrainState, losses: Float[np.ndarray, " steps"]
) -> None:
    """Write the state after `step` steps, then remove older ones."""
    from orbax.checkpoint import v1 as ocp

    place = directory.resolve() / f"step_{step:06d}"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    tree = _named_leaves(state) | {"losses": np.asarray(losses, np.float32)}
    with orbax_context():
        ocp.save(place / "state", tree)
    (place / _DONE).touch()
    for other in directory.glob("step_*"):
        if other.name != place.name:
            shutil.rmtree(other, ignore_errors=True)


def load_state(
    directory: Path, like: TrainState
) -> tuple[int, TrainState, Float[np.ndarray, " steps"]] | None:
    """The latest finished state: steps done, state, losses; None where there is none.

    Args:
      like: a state of the same shapes and dtypes.

    Raises:
      UserError: the state is damaged or of another model.
    """
    from orbax.checkpoint import v1 as ocp

    finished = sorted(place.parent for place in directory.resolve().glob(f"step_*/{_DONE}"))
    if not finished:
        return None
    place = finished[-1]
    step = int(place.name.removeprefix("step_"))
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    targets: dict[str, Any] = {
        name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        for name, leaf in _named_leaves(like).items()
    }
    targets["losses"] = jax.ShapeDtypeStruct((step,), np.float32, sharding=sharding)
    try:
        with orbax_context():
            tree = ocp.load(place / "state", targets)
    except (ValueError, OSError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"{place} cannot be read: {reason}; remove it to begin anew") from error
    losses = np.asarray(tree.pop("losses"))
    leaves = [tree[name] for name in _named_leaves(like)]
    return step, jax.tree.unflatten(jax.tree.structure(like), leaves), losses


def _named_leaves(state: TrainState) -> dict[str, Any]:
    """Leaves by their path, such as ".params['embed']['embedding']" without the punctuation."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        named[jax.tree_util.keystr(path, simple=True, separator=".")] = leaf
    return named
