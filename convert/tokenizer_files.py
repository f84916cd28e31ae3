"""The tokenizer that belongs to a model: its files, copied or made from a GGUF file's metadata."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from convert.config_json import one_line
from jaxablate.errors import UserError

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
_ESSENTIAL = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


def found_in(directory: Path) -> list[Path]:
    """The tokenizer's files in a directory; empty where the model comes without one."""
    if not any((directory / name).is_file() for name in _ESSENTIAL):
        return []
    return [directory / name for name in NAMES if (directory / name).is_file()]


def copy(source: Path, dest: Path) -> None:
    """Copy the tokenizer's files as they are; `dest` appears only if there are any."""
    files = found_in(source)
    if files:
        dest.mkdir(parents=True, exist_ok=True)
    for file in files:
        shutil.copyfile(file, dest / file.name)


def from_gguf(path: Path, metadata: Mapping[str, Any], dest: Path) -> None:
    """Write tokenizer.json and its configuration from a GGUF file's metadata.

    Begin and end of text are the ids in the file: some versions of transformers give the tokens
    of another model instead.
    """
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        return
    try:
        tokenizer = _tokenizer_of(metadata)
    except Exception as error:  # made from a stranger's metadata: anything may come
        raise UserError(
            f"the tokenizer in {path} cannot be read: "
            f"{type(error).__name__}: {one_line(error, 200)}"
        ) from error
    for ours, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            setattr(tokenizer, f"{ours}_token", tokens[token_id])
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        tokenizer.chat_template = template
    dest.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(dest))
    _check_ids(dest, metadata)


def _tokenizer_of(metadata: Mapping[str, Any]) -> Any:
    """The tokenizer that metadata describe.

    transformers' own way from a GGUF file reads the file with PyTorch; its builder does not need
    it, so it gets the metadata that we read.
    """
    # It would advise to install PyTorch, which nothing here needs.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_TOKENIZER_MAPPING,
        convert_gguf_tokenizer,
    )

    names = GGUF_TOKENIZER_MAPPING["tokenizer"]
    found = {
        name: metadata[f"tokenizer.{key}"]
        for key, name in names.items()
        if f"tokenizer.{key}" in metadata
    }
    backend, _ = convert_gguf_tokenizer(metadata["general.architecture"], found)
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", found.get("tokenizer_type") == "llama")
    return PreTrainedTokenizerFast(tokenizer_object=backend, add_bos_token=bool(adds_bos))


def _check_ids(directory: Path, metadata: Mapping[str, Any]) -> None:
    config = json.loads((directory / "tokenizer_config.json").read_text())
    tokens = metadata["tokenizer.ggml.tokens"]
    for name in ("bos", "eos"):
        token_id = metadata.get(f"tokenizer.ggml.{name}_token_id")
        saved = config.get(f"{name}_token")
        saved = saved["content"] if isinstance(saved, dict) else saved
        if isinstance(token_id, int) and 0 <= token_id < len(tokens) and saved != tokens[token_id]:
            raise UserError(
                f"the tokenizer's {name} token was saved as {saved!r}; the file says "
                f"{tokens[token_id]!r}"
            )
