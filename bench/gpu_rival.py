"""The exact sweep's rival in PyTorch on one GPU: whole forward passes, configurations batched.

    python bench/gpu_rival.py --out=rival.json

An 8B-shaped Llama of transformers with random bfloat16 weights; every configuration's questions
behind its own copy of the compacted cache; scaled-dot-product attention, inference mode, logits of
the scored positions only. The edited head's keys are not even edited: what that costs is left out,
in PyTorch's favour.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model; runs on a CPU")
    parser.add_argument("--out", required=True, help="JSON file of what was measured")
    arguments = parser.parse_args()
    tiny = arguments.tiny
    where = "cuda" if torch.cuda.is_available() else "cpu"
    config = transformers.LlamaConfig(
        vocab_size=257 if tiny else 128256,
        hidden_size=32 if tiny else 4096,
        intermediate_size=48 if tiny else 14336,
        num_hidden_layers=3 if tiny else 32,
        num_attention_heads=4 if tiny else 32,
        num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=131072,
    )
    rows, length, scored, article = (2, 12, 6, 64) if tiny else (20, 128, 64, 6144)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(where):
        model = transformers.LlamaForCausalLM(config).eval()
    rate, batch = 0.0, 1
    for count in (1, 2) if tiny else (1, 4, 8, 16):
        try:
            found = measure(model, count, rows, length, scored, article // 20, article, where)
        except torch.cuda.OutOfMemoryError:
            break
        if found > rate:
            rate, batch = found, count
    print(f"PyTorch     {rate:.4g} configurations/s, {batch} at a time ({where})", flush=True)
    result = {"configurations_per_second": rate, "batch": batch, "torch": torch.__version__}
    Path(arguments.out).write_text(json.dumps(result) + "\n")


@torch.inference_mode()
def measure(model, count, rows, length, scored, kept, article, where, repeats=3) -> float:
    """Configurations per second, `count` at a time."""
    config = model.config
    size = config.hidden_size // config.num_attention_heads
    states = count * rows
    shape = states, config.num_key_value_heads, kept, size
    keys = torch.randn(shape, device=where)
    tokens = torch.randint(config.vocab_size, (states, length + 1), device=where)
    positions = torch.arange(article, article + length, device=where)[None]
    best = float("inf")
    for _ in range(1 + repeats):
        cache = transformers.cache_utils.DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(keys, keys, layer)
        _wait(where)
        start = time.perf_counter()
        hidden = model.model(
            tokens[:, :-1], position_ids=positions.expand(states, -1), past_key_values=cache
        ).last_hidden_state[:, -scored:]
        for part, wanted in zip(hidden.split(rows), tokens[:, -scored:].split(rows)):
            logits = model.lm_head(part).float().flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, wanted.flatten(), reduction="none")
        _wait(where)
        best = min(best, time.perf_counter() - start)
    return count / best


def _wait(where: str) -> None:
    if where == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
