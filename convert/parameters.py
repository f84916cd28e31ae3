"""Single parameters of a model, wherever it lies, without reading or converting the rest."""

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

from convert.config_json import one_line
from convert.conversion import Filler, Plan
from convert.layouts import Rule
from convert.sources import fingerprint, open_source
from jaxablate.checkpoint import is_checkpoint, open_checkpoint
from jaxablate.config import TransformerConfig
from jaxablate.errors import UserError


class Parameters:
    """A model's parameters by our paths, such as "blocks/3/attn/q/kernel", read one at a time.

    Attributes:
      name: short, for tables.
      config: the model's description.
      digest: changes when a weight does: of the weights for a checkpoint, else of the files'
        names, sizes and times.
    """

    def __init__(
        self,
        name: str,
        config: TransformerConfig,
        digest: str,
        read: Callable[[str], np.ndarray],
    ):
        self.name, self.config, self.digest = name, config, digest
        self.read = read


def open_parameters(spec: str, revision: str | None = None) -> Parameters:
    """Open a checkpoint, or any source of `convert.resolve`, reading headers only.

    Args:
      spec: a checkpoint's directory, a Hugging Face directory, a .gguf file, a registered name
        or a hub name.
      revision: of a hub name, such as "step1000".

    Raises:
      UserError: there is no such model, or its tensors do not fit its configuration.
    """
    if revision is not None:
        spec, name = str(_hub_revision(spec, revision)), revision
    elif is_checkpoint(spec):
        checkpoint = open_checkpoint(spec)
        name = checkpoint.path.name
        return Parameters(name, checkpoint.config, checkpoint.digest, checkpoint.read)
    else:
        name = ""
    source = open_source(spec)
    plan = Plan(source)
    rules = {target: rule for rule in plan.rules for target in rule.targets}
    read = _Reader(Filler(plan, None), rules)
    return Parameters(name or source.name, plan.config, fingerprint(source), read)


class _Reader:
    """Reads through the conversion table; the other parts of a fused tensor are kept for a while.

    Only the last tensor is: q, k and v of one layer are asked for one after the other.
    """

    def __init__(self, filler: Filler, rules: dict[str, Rule]):
        self._filler, self._rules = filler, rules
        self._last: dict[str, np.ndarray] = {}

    def __call__(self, path: str) -> np.ndarray:
        if path not in self._rules:
            raise UserError(f"the model has no parameter {path!r}")
        if path not in self._last:
            self._last = self._filler.fill(self._rules[path])
        return self._last[path]


def _hub_revision(name: str, revision: str) -> Path:
    """The directory of one revision in the hub's own cache, fetched where there is a network."""
    if Path(name).exists():
        raise UserError(
            f"revisions are of a hub name, but {name} is on this disk; give a list of directories"
        )
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(
                name, revision=revision, allow_patterns=["*.json", "*.safetensors"]
            )
        )
    except Exception as error:  # the hub's client raises many kinds: network, login, name
        raise UserError(
            f"revision {revision} of {name} is not on this disk and cannot be fetched from the "
            f"hub ({type(error).__name__}: {one_line(error, 150)}). On a machine with a network, "
            f"run 'hf download {name} --revision {revision} --local-dir DIR', copy DIR here and "
            "give the list of such directories as --model"
        ) from error
