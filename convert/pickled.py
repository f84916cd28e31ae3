"""PyTorch's pickled weights (.bin), loaded by PyTorch with weights_only and nothing else."""

from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from convert.config_json import one_line
from convert.safetensors_files import indexed_paths
from jaxablate.errors import UserError

INDEX_NAME = "pytorch_model.bin.index.json"
SINGLE_NAME = "pytorch_model.bin"


class Entry(NamedTuple):
    dtype: np.dtype
    shape: tuple[int, ...]


def pickled_paths(directory: Path) -> list[Path]:
    """The .bin files of a Hugging Face directory, by its index where there is one."""
    if (directory / INDEX_NAME).exists():
        return indexed_paths(directory / INDEX_NAME)
    single = directory / SINGLE_NAME
    return [single] if single.exists() else []


class PickledTensors:
    """The tensors of some .bin files; mapped, not read, where the file format allows it."""

    def __init__(self, paths: list[Path]):
        self._tensors: dict[str, Any] = {}
        for path in paths:
            for name, tensor in _load(path).items():
                if name in self._tensors:
                    raise UserError(
                        f"tensor {one_line(repr(name), 100)} is in {path} and in "
                        "another file of the same model"
                    )
                self._tensors[name] = tensor
        self.entries = {name: _entry(name, tensor) for name, tensor in self._tensors.items()}

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis."""
        import torch

        rows = self._tensors[name][start:stop]
        if rows.dtype == torch.bfloat16:  # numpy has none: reinterpret the bits
            return rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return rows.numpy()


def _load(path: Path) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise UserError(
            f"{path} is a pickle, which only PyTorch reads; install torch, or get the "
            "model as safetensors"
        ) from None
    try:
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before PyTorch 1.6 cannot be mapped
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a pickle from a stranger: anything may come
        raise UserError(
            f"{path} is not read by torch.load(weights_only=True): {one_line(error, 200)}"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str)
        and isinstance(tensor, torch.Tensor)
        and tensor.layout == torch.strided
        for name, tensor in loaded.items()
    ):
        raise UserError(f"{path} holds something else than tensors by name")
    return loaded


def _entry(name: str, tensor: Any) -> Entry:
    text = str(tensor.dtype).removeprefix("torch.")
    try:
        dtype = np.dtype(ml_dtypes.bfloat16) if text == "bfloat16" else np.dtype(text)
    except TypeError:
        raise UserError(
            f"tensor {one_line(repr(name), 100)} has dtype {text}, which is not read"
        ) from None
    return Entry(dtype, tuple(tensor.shape))
