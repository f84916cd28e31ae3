"""Write a random Llama model as a Hugging Face directory, shard by shard, in bfloat16.

    python bench/make_random_checkpoint.py --size=8b --out=/tmp/random-8b

Sizes: tiny (0.5 MB), 1b (TinyLlama's shape, 2.2 GB), 8b (Llama 3.1's shape, 16 GB in 4 shards). The
memory needed is 100 MB whatever the size. Weights are drawn from a table of 8 million normal
numbers at random offsets, so that the disk and not the generator sets the pace. No tokenizer.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from absl import app, flags

from convert import llama
from convert.layouts import source_shape
from convert.safetensors_files import INDEX_NAME, write_file
from jaxablate.config import RopeScaling, TransformerConfig, param_shapes

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
PIECE = 2**22
LLAMA3 = RopeScaling(
    factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
)
# name -> layers, D, F, N, K, H, V, RoPE scaling, shards
SIZES = {
    "tiny": (2, 64, 160, 4, 2, 16, 512, None, 2),
    "1b": (22, 2048, 5632, 32, 4, 64, 32000, None, 2),
    "8b": (32, 4096, 14336, 32, 8, 128, 128256, LLAMA3, 4),
}
_SIZE = flags.DEFINE_enum("size", "tiny", list(SIZES), "which shape")
_OUT = flags.DEFINE_string("out", None, "directory to make", required=True)
_SEED = flags.DEFINE_integer("seed", 0, "of the random numbers")


def random_config(size: str) -> tuple[TransformerConfig, int]:
    """The model's shape and the number of shards that its file is cut into."""
    layers, d, f, n, k, h, v, scaling, num_shards = SIZES[size]
    config = TransformerConfig(
        family="llama",
        num_layers=layers,
        model_dim=d,
        mlp_dim=f,
        num_heads=n,
        num_kv_heads=k,
        head_dim=h,
        vocab_size=v,
        norm="rms",
        norm_eps=1e-5,
        mlp="gated_silu",
        rotary_dim=h,
        rope_theta=500000.0 if scaling else 10000.0,
        rope_scaling=scaling,
        tie_embeddings=False,
        max_positions=131072 if scaling else 2048,
    )
    return config, num_shards


def make(config: TransformerConfig, out: Path, num_shards: int, seed: int = 0) -> None:
    """Write config.json, the shards and their index into the new directory `out`."""
    out.mkdir(parents=True)
    raw = llama.write_config(config) | {"torch_dtype": "bfloat16"}
    (out / "config.json").write_text(json.dumps(raw, indent=2))
    shapes = param_shapes(config)
    tensors = {rule.source: source_shape(rule, shapes) for rule in llama.rules(config)}
    total = 2 * sum(map(math.prod, tensors.values()))
    rng = np.random.default_rng(seed)
    table = (0.02 * rng.standard_normal(2 * PIECE, dtype=np.float32)).astype(BFLOAT16)
    shard: dict[str, tuple[np.dtype, tuple[int, ...]]] = {}
    shards = [shard]
    size = 0
    for name, shape in tensors.items():
        if size > len(shards) * total / num_shards:
            shards.append({})
        shards[-1][name] = BFLOAT16, shape
        size += 2 * math.prod(shape)
    weight_map: dict[str, str] = {}
    for number, infos in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_file(out / name, infos, _pieces(infos, table, rng))
        weight_map |= dict.fromkeys(infos, name)
        print(f"{out / name}: {(out / name).stat().st_size / 1e9:.2f} GB", flush=True)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / INDEX_NAME).write_text(json.dumps(index, indent=2))


def _pieces(
    infos: dict[str, tuple[np.dtype, tuple[int, ...]]], table: np.ndarray, rng: np.random.Generator
) -> Iterator[np.ndarray]:
    for name, (_, shape) in infos.items():
        left = math.prod(shape)
        if "norm" in name:
            yield np.ones(left, BFLOAT16)
            continue
        while left:
            count = min(left, PIECE)
            start = rng.integers(0, len(table) - count + 1)
            yield table[start : start + count]
            left -= count


def main(arguments: Sequence[str]) -> None:
    if len(arguments) > 1:
        raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    config, num_shards = random_config(_SIZE.value)
    make(config, Path(_OUT.value), num_shards, _SEED.value)


if __name__ == "__main__":
    app.run(main)
