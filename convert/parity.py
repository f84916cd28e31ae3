"""Does our model compute what PyTorch's computes? Logits side by side, in float32, on real text."""

import dataclasses
import math
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from convert.config_json import one_line
from convert.export import export_hf
from jaxablate.checkpoint import Checkpoint
from jaxablate.errors import UserError

MAX_ERROR = 1e-3
MEAN_ERROR = 1e-4


@dataclasses.dataclass(frozen=True)
class Parity:
    """How far logits [T, V] of ours are from PyTorch's, and what both predict.

    Attributes:
      max_error, mean_error: of |ours - PyTorch's| over all tokens and the vocabulary.
      perplexity, reference_perplexity: of the same tokens, ours and PyTorch's.
    """

    num_tokens: int
    max_error: float
    mean_error: float
    perplexity: float
    reference_perplexity: float

    def within(self, max_error: float, mean_error: float) -> bool:
        # Written so that NaN is out of the limits.
        return self.max_error <= max_error and self.mean_error <= mean_error

    def table(self, max_error: float, mean_error: float) -> str:
        rows = [
            ("", "found", "limit"),
            ("largest |difference| of a logit", f"{self.max_error:.2e}", f"{max_error:.0e}"),
            ("mean |difference|", f"{self.mean_error:.2e}", f"{mean_error:.0e}"),
            ("perplexity, ours", f"{self.perplexity:.6f}", ""),
            ("perplexity, PyTorch", f"{self.reference_perplexity:.6f}", ""),
        ]
        lines = [f"{name:<34}{found:>14}{limit:>10}" for name, found, limit in rows]
        return "\n".join([f"parity with PyTorch in float32 on {self.num_tokens} tokens", *lines])


def measure(checkpoint: Checkpoint, source: Path | None = None, num_tokens: int = 512) -> Parity:
    """Compare a checkpoint with PyTorch's model on the Python language reference.

    Args:
      source: the Hugging Face directory or .gguf file that it was made from; PyTorch reads the
        weights from there, so that a wrong conversion shows. None: from an export of the
        checkpoint, which shows a wrong model, but not a conversion that export undoes.
      num_tokens: at most; the model's own maximum is respected.

    Raises:
      UserError: PyTorch is not installed, or the model does not fit into memory twice.
    """
    try:
        import torch
    except ImportError:
        raise UserError("verifying needs PyTorch: pip install torch") from None
    _require_memory(checkpoint)
    tokens = example_tokens(checkpoint, min(num_tokens, checkpoint.config.max_positions))
    model = pytorch_model(checkpoint, source)
    with torch.no_grad():
        reference = model(torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    del model
    with jax.default_matmul_precision("highest"):
        ours = np.asarray(checkpoint.restore(jnp.float32)(jnp.asarray(tokens[None]))[0])
    difference = np.abs(ours - reference)
    return Parity(
        num_tokens=len(tokens),
        max_error=float(np.max(difference)),
        mean_error=float(np.mean(difference)),
        perplexity=perplexity(ours, tokens),
        reference_perplexity=perplexity(reference, tokens),
    )


def perplexity(logits: np.ndarray, tokens: np.ndarray) -> float:
    """exp of the mean -log probability of each token [T] but the first; logits [T, V]."""
    logits = logits[:-1].astype(np.float64)
    top = logits.max(-1)
    log_total = np.log(np.exp(logits - top[:, None]).sum(-1)) + top
    return math.exp(float(np.mean(log_total - logits[np.arange(len(logits)), tokens[1:]])))


def example_tokens(checkpoint: Checkpoint, num_tokens: int) -> np.ndarray:
    """The Python language reference in the model's tokens; random ones without a tokenizer."""
    vocab_size = checkpoint.config.vocab_size
    if checkpoint.tokenizer_dir is None:
        print("the model came without a tokenizer: random tokens are compared")
        return np.random.default_rng(0).integers(0, vocab_size, num_tokens)
    from pydoc_data.topics import topics

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(checkpoint.tokenizer_dir))
    text = topics["types"] + "".join(topics[name] for name in sorted(topics))
    tokens = np.asarray(tokenizer(text, verbose=False)["input_ids"][:num_tokens], np.int64)
    if tokens.max() >= vocab_size:
        raise UserError(f"the tokenizer gives token {tokens.max()}; the model has {vocab_size}")
    return tokens


def pytorch_model(checkpoint: Checkpoint, source: Path | None) -> Any:
    """PyTorch's model in float32, its weights rounded to the checkpoint's dtype before."""
    import torch

    dtype = getattr(torch, checkpoint.dtype.name)
    if source is not None and source.is_file():
        return _model_from_gguf(source).to(dtype).float().eval()
    with tempfile.TemporaryDirectory() as scratch:
        if source is None:
            source = export_hf(checkpoint.config, checkpoint, Path(scratch) / "exported")
        return _model_from_directory(source, dtype).float().eval()


def _model_from_directory(path: Path, dtype: Any) -> Any:
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            str(path),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            attn_implementation="eager",
        )
    except Exception as error:  # any kind may come out of another library's reader
        raise UserError(
            f"PyTorch's model cannot be made from {path}: {one_line(error, 200)}"
        ) from error


def _model_from_gguf(path: Path) -> Any:
    """Through transformers' own GGUF reader: only the package gguf is shared with ours."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.for_model(**load_gguf_checkpoint(str(path))["config"])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    loaded = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=empty)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    result = model.load_state_dict(loaded["tensors"], strict=False)
    model.tie_weights()
    absent = set(result.missing_keys) - {"lm_head.weight"}
    if absent or result.unexpected_keys:
        raise UserError(
            f"PyTorch's model does not take the tensors of {path}: missing {sorted(absent)[:5]}, "
            f"left over {result.unexpected_keys[:5]}"
        )
    return model


def _require_memory(checkpoint: Checkpoint) -> None:
    needed = 2 * 4 * sum(math.prod(leaf.shape) for leaf in checkpoint.leaves.values())
    try:
        with open("/proc/meminfo") as file:
            values = dict(line.split(":", 1) for line in file)
        available = int(values["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return  # not Linux: no way to tell without another package
    if needed > available:
        raise UserError(
            f"verifying holds the model twice in float32, {needed / 1e9:.1f} GB; "
            f"{available / 1e9:.1f} GB are free. Run it on a machine with more memory"
        )
