"""Converted models on disk: Orbax arrays in groups, with configuration, tokenizer and digest.

    DIR/checkpoint.json     format version, config, leaves (dtype, shape, digest), digest, origin
    DIR/weights/embed       one Orbax checkpoint per group, a leaf per tensor of a layer:
    DIR/weights/block_0     a layer can be read, or written, without the others
    DIR/weights/final       final norm, and the unembedding where it is not tied
    DIR/tokenizer/          the tokenizer's own files, where the model came with one

A checkpoint is finished or absent: it is written beside its place, verified, and renamed.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import Sharding, SingleDeviceSharding
from tqdm import tqdm

from jaxablate.config import TransformerConfig, param_shapes
from jaxablate.errors import UserError
from jaxablate.model import Transformer
from jaxablate.stored_arrays import DTYPES, Leaf, load_arrays, verify_group

if TYPE_CHECKING:
    from jaxablate.streaming import StreamedTransformer

FORMAT = "jaxablate checkpoint"
FORMAT_VERSION, READABLE_VERSIONS = 2, (1, 2)
METADATA_NAME = "checkpoint.json"
WEIGHTS_NAME = "weights"
TOKENIZER_NAME = "tokenizer"

ShardingRule = Sharding | Callable[[str, tuple[int, ...]], Sharding]


class Checkpoint:
    """An opened checkpoint; arrays are read when asked for.

    Attributes:
      path: its directory, absolute.
      config: the model's description.
      digest: sha256 over the configuration and every weight as stored; what a restore casts to
        does not change it.
      provenance: where the weights came from (source, versions, the original config.json).
      leaves: path such as "blocks/0/attn/q/kernel" -> Leaf.
      tokenizer_dir: the tokenizer's files, or None.
    """

    def __init__(self, path: Path, metadata: Mapping[str, Any]):
        self.path = path
        self.config = TransformerConfig.from_dict(metadata["config"])
        self.digest: str = metadata["digest"]
        self.provenance: dict[str, Any] = metadata["provenance"]
        self.leaves = {
            name: Leaf(
                DTYPES[leaf["dtype"]],
                tuple(leaf["shape"]),
                leaf["digest"] if "digest" in leaf else leaf["sha256"],  # of format version 1
                leaf.get("parts", 1),
            )
            for name, leaf in metadata["leaves"].items()
        }
        tokenizer = path / TOKENIZER_NAME
        self.tokenizer_dir = tokenizer if tokenizer.is_dir() else None

    @property
    def dtype(self) -> np.dtype:
        """The dtype that holds every stored weight exactly: theirs, where all have the same."""
        found = {leaf.dtype for leaf in self.leaves.values()}
        return found.pop() if len(found) == 1 else DTYPES["float32"]

    @property
    def num_bytes(self) -> int:
        """Size of all weights as stored."""
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in self.leaves.values())

    def read(self, path: str) -> np.ndarray:
        """One parameter, as stored."""
        if path not in self.leaves:
            raise UserError(
                f"{self.path} has no parameter {path!r}; its blocks are 0 to "
                f"{self.config.num_layers - 1}, and a path is like "
                f"{next(iter(self.leaves))!r}"
            )
        leaf = self.leaves[path]
        return self._load(group_of(path), {path: leaf.dtype})[path]

    def read_block(self, layer: int) -> dict[str, Any]:
        """The parameters of one block as a nested dict of numpy arrays, as stored."""
        prefix = self._block_prefix(layer)
        targets = {
            path: leaf.dtype for path, leaf in self.leaves.items() if path.startswith(prefix)
        }
        loaded = self._load(group_of(prefix), targets)
        return nested({path[len(prefix) :]: array for path, array in loaded.items()})

    def load_block(
        self, layer: int, dtype: Any = None, sharding: ShardingRule | None = None
    ) -> dict[str, Any]:
        """The parameters of one block as a nested dict of JAX arrays; see `restore`."""
        prefix = self._block_prefix(layer)
        loaded = self.load_group(group_of(prefix), dtype, sharding)
        return nested({path[len(prefix) :]: array for path, array in loaded.items()})

    def load_group(
        self, group: str, dtype: Any = None, sharding: ShardingRule | None = None
    ) -> dict[str, jax.Array]:
        """Path -> JAX array of the parameters of one group ("embed", "block_0", ..., "final")."""
        dtype = self.dtype if dtype is None else np.dtype(dtype)
        sharding = sharding or SingleDeviceSharding(jax.local_devices()[0])
        targets = {
            path: jax.ShapeDtypeStruct(
                leaf.shape,
                dtype,
                sharding=sharding if isinstance(sharding, Sharding) else sharding(path, leaf.shape),
            )
            for path, leaf in self.leaves.items()
            if group_of(path) == group
        }
        return self._load(group, targets)

    def restore(
        self, dtype: Any = None, sharding: ShardingRule | None = None, progress: bool = True
    ) -> Transformer:
        """The whole model in device memory.

        Args:
          dtype: cast every parameter to it while reading; None: see `Checkpoint.dtype`.
          sharding: one sharding for every parameter, or a function of path and shape; None: the
            first local device. It does not matter on how many devices the weights were saved.
          progress: show a bar when it takes more than five seconds.
        """
        params: dict[str, jax.Array] = {}
        groups = groups_of(self.config)
        for group in tqdm(
            groups, "restoring", delay=5, disable=None if progress else True, leave=False
        ):
            params |= self.load_group(group, dtype, sharding)
        return Transformer.from_params(self.config, nested(params))

    def stream(
        self, dtype: Any = None, sharding: ShardingRule | None = None
    ) -> "StreamedTransformer":
        """A model with the interface of `restore`'s that holds two blocks in memory at most."""
        from jaxablate.streaming import StreamedTransformer

        return StreamedTransformer(self, dtype, sharding)

    def verify(self) -> None:
        """Read every weight again and compare it with its digest.

        Raises:
          UserError: a weight is damaged; the message names it.
        """
        for group in tqdm(groups_of(self.config), "verifying", delay=5, leave=False):
            leaves = {path: leaf for path, leaf in self.leaves.items() if group_of(path) == group}
            verify_group(self.path / WEIGHTS_NAME / group, leaves)
        if weights_digest(self.config.to_dict(), self.leaves) != self.digest:
            raise UserError(
                f"{self.path} is damaged: {METADATA_NAME} does not have its digest; "
                "delete the checkpoint and convert again"
            )

    def _block_prefix(self, layer: int) -> str:
        if not 0 <= layer < self.config.num_layers:
            raise UserError(
                f"layer is {layer}; {self.path} has layers 0 to {self.config.num_layers - 1}"
            )
        return f"blocks/{layer}/"

    def _load(self, group: str, targets: Mapping[str, Any]) -> dict[str, Any]:
        leaves = {path: leaf for path, leaf in self.leaves.items() if group_of(path) == group}
        return load_arrays(self.path / WEIGHTS_NAME / group, leaves, targets)


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a finished checkpoint; its files' sizes are checked, its weights are not read.

    Raises:
      UserError: there is none at `path`, its format version is unknown, or files are missing or
        have another size.
    """
    directory = Path(os.path.expanduser(path)).resolve()
    file = directory / METADATA_NAME
    if not file.is_file():
        raise UserError(
            f"{directory} is no checkpoint: it has no {METADATA_NAME}; make one with "
            "'python -m convert SOURCE DEST'"
        )
    try:
        metadata = json.loads(file.read_text())
        if metadata["format"] != FORMAT:
            raise ValueError(f"format is {metadata['format']!r}")
        version = metadata["format_version"]
        if version not in READABLE_VERSIONS:
            raise UserError(
                f"{directory} has format version {version}; this program reads "
                f"versions up to {FORMAT_VERSION}: convert again, or use a newer version"
            )
        checkpoint = Checkpoint(directory, metadata)
        sizes = dict(metadata["files"])
    except UserError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{file} cannot be read ({type(error).__name__}: {error}); "
            "delete the checkpoint and convert again"
        ) from error
    _check_leaves(checkpoint)
    for name, size in sizes.items():
        found = (directory / name).stat().st_size if (directory / name).is_file() else None
        if found is None:
            raise UserError(f"{directory} is damaged: {name} is missing; convert again")
        if found != size:
            raise UserError(
                f"{directory} is damaged: {name} has {found} bytes instead of {size}; "
                "delete the checkpoint and convert again"
            )
    return checkpoint


def is_checkpoint(path: str | os.PathLike[str]) -> bool:
    """Whether a finished checkpoint lies at `path`."""
    # os.path answers False where pathlib raises: names that no file system has.
    return os.path.isfile(os.path.join(os.path.expanduser(path), METADATA_NAME))


def group_of(path: str) -> str:
    """The group that a parameter is stored in."""
    first, *rest = path.split("/")
    if first == "blocks":
        return f"block_{rest[0]}"
    return "embed" if first == "embed" else "final"


def groups_of(config: TransformerConfig) -> list[str]:
    """All groups, in the order of the forward pass."""
    return ["embed", *(f"block_{layer}" for layer in range(config.num_layers)), "final"]


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """{"a/b": x} -> {"a": {"b": x}}."""
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *parents, last = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value
    return tree


def flattened(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The inverse of `nested`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flattened(value, f"{prefix}{key}/")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def weights_digest(config: Mapping[str, Any], leaves: Mapping[str, Leaf]) -> str:
    """sha256 over the configuration and every leaf's dtype, shape and own digest."""
    described = {path: [leaf.dtype.name, *leaf.shape, leaf.digest] for path, leaf in leaves.items()}
    text = json.dumps({"config": config, "leaves": described}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _check_leaves(checkpoint: Checkpoint) -> None:
    found = {path: leaf.shape for path, leaf in checkpoint.leaves.items()}
    expected = param_shapes(checkpoint.config)
    if found != expected:
        wrong = sorted(path for path in expected.keys() | found.keys()
                       if expected.get(path) != found.get(path))  # fmt: skip
        raise UserError(
            f"{checkpoint.path} is damaged: its parameters are not those of its "
            f"configuration, for example {wrong[0]}; convert again"
        )
