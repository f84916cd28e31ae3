"""A checkpoint, or a model in memory, as a Hugging Face directory."""

import json
import math
import os
import shutil
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from convert.conversion import bits, family_of
from convert.layouts import Rule, source_shape, views
from convert.safetensors_files import INDEX_NAME, SINGLE_NAME, write_file
from jaxablate.checkpoint import Checkpoint, flattened
from jaxablate.config import TransformerConfig, param_shapes
from jaxablate.errors import UserError
from jaxablate.stored_arrays import DTYPES

SHARD_BYTES = 5 * 10**9  # what the hub's own tools cut at
# Attributes of the original config.json that are kept: they concern generation and training only.
_KEPT = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range")


def export_hf(
    config: TransformerConfig,
    params: Checkpoint | Mapping[str, Any],
    dest: str | os.PathLike[str],
    tokenizer_dir: Path | None = None,
    source_config: Mapping[str, Any] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Path:
    """Write config.json, safetensors (sharded when large) and the tokenizer's files.

    Args:
      config: what `params` has; it may have fewer layers than the model they came from.
      params: a checkpoint (read tensor by tensor) or the nested dict of `Transformer.to_params`.
      dest: a directory that does not exist yet; it appears when it is complete.
      tokenizer_dir: its files are copied.
      source_config: the original config.json; its token ids are kept.

    Raises:
      UserError: `dest` exists or cannot be written, or `params` are not those of `config`.
    """
    path = Path(dest).expanduser().resolve()
    if path.exists():
        raise UserError(f"{path} exists already; remove it or choose another name")
    reader = ParamsReader(config, params)
    work = path.parent / f".{path.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        work.mkdir(parents=True)
        if tokenizer_dir is not None:
            shutil.copytree(tokenizer_dir, work, dirs_exist_ok=True)
        raw = family_of(config.family).write_config(config)
        raw |= {key: source_config[key] for key in _KEPT if source_config and key in source_config}
        raw["torch_dtype"] = reader.dtype_name
        (work / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        _write_weights(work, reader, shard_bytes)
        work.rename(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


class ParamsReader:
    """Parameters one at a time, in the order and shape of the family's own files."""

    def __init__(self, config: TransformerConfig, params: Checkpoint | Mapping[str, Any]):
        self.rules: list[Rule] = family_of(config.family).rules(config)
        self.shapes = param_shapes(config)
        self._checkpoint = params if isinstance(params, Checkpoint) else None
        self._flat = {} if isinstance(params, Checkpoint) else flattened(params)
        found: Mapping[str, Any] = params.leaves if self._checkpoint else self._flat  # type: ignore
        wrong = [p for p in self.shapes if p not in found or found[p].shape != self.shapes[p]]
        if wrong:
            raise UserError(
                f"{len(wrong)} parameters do not fit the configuration, the first is "
                f"{wrong[0]}, which must have shape {self.shapes[wrong[0]]}"
            )
        self._dtypes = {path: np.dtype(found[path].dtype) for path in self.shapes}
        unknown = {dtype.name for dtype in self._dtypes.values()} - set(DTYPES)
        if unknown:
            raise UserError(
                f"parameters have dtype {sorted(unknown)}; {', '.join(DTYPES)} are exported"
            )

    @property
    def dtype_name(self) -> str:
        names = {dtype.name for dtype in self._dtypes.values()}
        return names.pop() if len(names) == 1 else "float32"

    def info(self, rule: Rule) -> tuple[np.dtype, tuple[int, ...]]:
        return self._dtypes[rule.targets[0]], source_shape(rule, self.shapes)

    def read(self, rule: Rule) -> np.ndarray:
        """The tensor of one rule as the family's files have it."""
        dtype, shape = self.info(rule)
        sources = views(rule, [self._array(path) for path in rule.targets])
        tensor = np.empty(shape, dtype)
        parts = bits(tensor).reshape(sources[0].shape[0], len(sources), *sources[0].shape[1:])
        for i, view in enumerate(sources):
            parts[:, i] = bits(view)
        return tensor

    def _array(self, path: str) -> np.ndarray:
        if self._checkpoint is not None:
            return self._checkpoint.read(path)
        return np.ascontiguousarray(self._flat[path])


def _write_weights(directory: Path, reader: ParamsReader, shard_bytes: int) -> None:
    shards: list[list[Rule]] = [[]]
    size = 0
    for rule in reader.rules:
        dtype, shape = reader.info(rule)
        num_bytes = math.prod(shape) * dtype.itemsize
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(rule)
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, rules in enumerate(shards, 1):
        name = SINGLE_NAME
        if len(shards) > 1:
            name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        infos = {rule.source: reader.info(rule) for rule in rules}
        write_file(directory / name, infos, (reader.read(rule) for rule in rules))
        weight_map |= dict.fromkeys(infos, name)
    if len(shards) > 1:
        sizes = [reader.info(rule) for rule in reader.rules]
        total = sum(math.prod(shape) * dtype.itemsize for dtype, shape in sizes)
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n")
