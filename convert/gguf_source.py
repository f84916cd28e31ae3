"""A GGUF file seen as a Hugging Face model: its tensors' names, row order and configuration."""

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from convert.config_json import one_line
from convert.gguf_files import GgufFile
from jaxablate.errors import UserError

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_KEYS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "vocab_size": "vocab_size",
}
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3's scaling is stored as one factor per pair. These are the published parameter sets
# (3.1; 3.2), recognised by recomputing the factors; anything else is refused.
_KNOWN_SCALINGS = ((8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192))


def hf_name(name: str) -> str:
    """GGUF tensor name -> Hugging Face's; an unknown one is kept, to be refused as it is."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if match and match[2] in _IN_BLOCK:
        return f"model.layers.{match[1]}.{_IN_BLOCK[match[2]]}.{match[3]}"
    return name


def half_split_rows(rows: np.ndarray, head_dim: int) -> np.ndarray:
    """Where the rows of a half-split q or k lie in a file made for interleaved rotation.

    The file has (pair, half) within a head, we have (half, pair).
    """
    head, within = np.divmod(rows, head_dim)
    half, pair = np.divmod(within, head_dim // 2)
    return head * head_dim + pair * 2 + half


class GgufTensors:
    """The tensors of a GGUF file under Hugging Face's names and in its row order."""

    def __init__(self, path: Path):
        self.file = GgufFile(path)
        self.architecture = self.file.metadata.get("general.architecture")
        if self.architecture not in ARCHITECTURES:
            raise UserError(
                f"{path} has architecture {one_line(repr(self.architecture), 60)}; "
                f"{', '.join(ARCHITECTURES)} are read from GGUF files"
            )
        self._names = {hf_name(name): name for name in self.file.entries if name != ROPE_FACTORS}
        self.entries = {theirs: self.file.entries[ours] for theirs, ours in self._names.items()}
        self.config = self._config()

    def rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along the first axis."""
        rows = np.arange(start, stop)
        # llama.cpp permutes q and k of the llama architecture only.
        if self.architecture == "llama" and re.search(r"self_attn\.[qk]_proj\.", name):
            rows = half_split_rows(rows, self.config["head_dim"])
        return self.file.rows(self._names[name], rows)

    def _config(self) -> dict[str, Any]:
        """A config.json for the file."""
        prefix = f"{self.architecture}."
        found = {
            key[len(prefix) :]: value
            for key, value in self.file.metadata.items()
            if key.startswith(prefix)
        }
        config: dict[str, Any] = {"model_type": self.architecture}
        for key, name in _KEYS.items():
            if key in found:
                config[name] = found.pop(key)
        tokens = self.file.metadata.get("tokenizer.ggml.tokens")
        embedding = self.entries.get("model.embed_tokens.weight")
        if embedding is not None:
            config.setdefault("vocab_size", embedding.shape[0])
        elif isinstance(tokens, list):
            config.setdefault("vocab_size", len(tokens))
        config["tie_word_embeddings"] = "lm_head.weight" not in self.entries
        self._fill_head_dim(config)
        self._check_rest(config, found)
        if ROPE_FACTORS in self.file.entries:
            config["rope_scaling"] = self._rope_scaling(config)
        if self.architecture != "qwen2":
            config["attention_bias"] = "model.layers.0.self_attn.o_proj.bias" in self.entries
        return config

    def _fill_head_dim(self, config: dict[str, Any]) -> None:
        if "head_dim" in config:
            return
        heads, width = config.get("num_attention_heads"), config.get("hidden_size")
        if not isinstance(heads, int) or not isinstance(width, int) or heads < 1 or width % heads:
            raise UserError(
                f"{self.file.path} has {one_line(repr(heads), 40)} heads and width "
                f"{one_line(repr(width), 40)}; the head size cannot be told"
            )
        config["head_dim"] = width // heads

    def _check_rest(self, config: dict[str, Any], found: dict[str, Any]) -> None:
        head_dim = config["head_dim"]
        if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
            raise UserError(
                f"{self.file.path} has head size {one_line(repr(head_dim), 40)}; "
                "a positive even number is required"
            )
        harmless = {
            "rope.dimension_count": head_dim,
            "attention.value_length": head_dim,
            "rope.scaling.type": "none",
            "expert_count": 0,
            "expert_used_count": 0,
            "attention.causal": True,
        }
        for key, value in found.items():
            if key not in harmless:
                raise UserError(
                    f"{self.file.path} has metadata {self.architecture}."
                    f"{one_line(key, 80)}, which is not known"
                )
            if value != harmless[key]:
                raise UserError(
                    f"{self.file.path} has {self.architecture}.{key} = "
                    f"{one_line(repr(value), 60)}; only {harmless[key]!r} is implemented"
                )

    def _rope_scaling(self, config: dict[str, Any]) -> dict[str, Any]:
        stored = self.file.entries[ROPE_FACTORS]
        pairs = config["head_dim"] // 2
        theta = config.get("rope_theta", 10000.0)
        if stored.shape == (pairs,) and isinstance(theta, float) and theta > 1:
            factors = self.file.rows(ROPE_FACTORS, np.arange(pairs)).astype(np.float64)
            for known in _KNOWN_SCALINGS:
                if np.allclose(factors, _llama3_factors(pairs, theta, *known), rtol=1e-4):
                    names = (
                        "factor",
                        "low_freq_factor",
                        "high_freq_factor",
                        "original_max_position_embeddings",
                    )
                    return {"rope_type": "llama3", **dict(zip(names, known))}
        raise UserError(
            f"{self.file.path} has rotary factors ({ROPE_FACTORS}) that are not those "
            "of Llama 3.1 or 3.2; convert from the Hugging Face directory instead"
        )


def _llama3_factors(
    pairs: int, theta: float, factor: float, low: float, high: float, original: int
) -> np.ndarray:
    """What each pair's frequency is divided by, as llama.cpp's converter computes it."""
    factors = []
    for pair in range(pairs):
        wavelength = 2 * math.pi * theta ** (pair / pairs)
        if wavelength < original / high:
            factors.append(1.0)
        elif wavelength > original / low:
            factors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors)
