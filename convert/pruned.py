"""A model without some layers, or without their attention or MLP, saved as a model of its own."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from convert.export import export_hf
from jaxablate.checkpoint import Checkpoint
from jaxablate.checkpoint_writer import save_checkpoint
from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError


def save_pruned(
    checkpoint: Checkpoint, layers: Sequence[int], component: str, dest: Path
) -> tuple[Path, Path]:
    """Write DEST/checkpoint (Orbax) and DEST/hf (a Hugging Face directory).

    Args:
      checkpoint: the whole model.
      layers: which layers lose something, at least one and not all blocks.
      component: "block" leaves the layers out; "attention" or "mlp" zeroes what that part adds to
        the residual stream (its output projection), since files have no place for half a layer.
      dest: a directory that has neither of the two yet.

    Raises:
      UserError: no layers, all of them, or `dest` holds a model already.
    """
    dest = dest.expanduser().resolve()
    for name in ("checkpoint", "hf"):
        if (dest / name).exists():
            raise UserError(f"{dest / name} exists already; remove it or choose another directory")
    config, params = pruned_params(checkpoint, layers, component)
    provenance = {
        **checkpoint.provenance,
        "pruned_from": checkpoint.digest,
        "removed": {"component": component, "layers": list(layers)},
    }
    saved = save_checkpoint(
        dest / "checkpoint", config, params, checkpoint.tokenizer_dir, provenance
    )
    source = checkpoint.provenance.get("source_config")
    exported = export_hf(config, saved, dest / "hf", checkpoint.tokenizer_dir, source)
    return saved.path, exported


def pruned_params(
    checkpoint: Checkpoint, layers: Sequence[int], component: str
) -> tuple[TransformerConfig, dict[str, Any]]:
    """The pruned model's configuration and parameters; see `save_pruned`."""
    config = checkpoint.config
    removed = sorted(set(layers))
    if not removed or removed[0] < 0 or removed[-1] >= config.num_layers:
        raise UserError(
            f"layers to remove are {list(layers)}; the model's are 0 to {config.num_layers - 1}, "
            "and at least one is needed"
        )
    if component == "block" and len(removed) == config.num_layers:
        raise UserError(f"all {config.num_layers} layers are to be removed; no model is left")
    kept = [i for i in range(config.num_layers) if component != "block" or i not in removed]
    blocks = {}
    for place, layer in enumerate(kept):
        block = checkpoint.read_block(layer)
        if layer in removed:
            part = block["attn"]["o"] if component == "attention" else block["mlp"]["down"]
            part |= {name: np.zeros_like(array) for name, array in part.items()}
        blocks[str(place)] = block
    params: dict[str, Any] = {"blocks": blocks}
    for path in checkpoint.leaves:
        if not path.startswith("blocks/"):
            node, *rest = path.split("/")
            params.setdefault(node, {})["/".join(rest)] = checkpoint.read(path)
    return config.replace(num_layers=len(kept)), params
