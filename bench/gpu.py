"""Speed on one accelerator: an 8B-shaped Llama with random bfloat16 weights made on the device.

    bench/gpu.sh                 # this, and PyTorch beside it
    python bench/gpu.py --tiny   # a minute on a CPU: that it runs, not how fast

Measures the device's bfloat16 matrix rate; parity of small models with PyTorch in float32 (skipped
without torch and transformers); and an exact influence sweep of the published setting: 20 questions
of 128 tokens behind a compacted article of 6,144. Prints a table, and writes JSON to --out.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxablate import estimate
from jaxablate.attention import LayerPrefix
from jaxablate.config import RopeScaling, TransformerConfig, param_shapes
from jaxablate.edits import Configuration, keep_keys
from jaxablate.model import Transformer
from jaxablate.prefill import prefill
from jaxablate.problem import Problem
from jaxablate.sweep import Sweep, SweepOptions
from jaxablate.windows import Batch

# The published map: KV heads x ratios x articles (arXiv 2602.16284).
MAP_HEADS, MAP_RATIOS, MAP_ARTICLES = 256, 51, 10
BAR = 0.5


def main() -> None:
    arguments = _arguments()
    tiny = arguments.tiny
    device = jax.devices()[0]
    say(f"device      {device.device_kind} ({device.platform}), JAX {jax.__version__}")
    report: dict[str, Any] = {"device": device.device_kind, "jax": jax.__version__, "tiny": tiny}
    report["parity"] = parity()
    rate = max(estimate.matmul_rate("bfloat16", 0.1 if tiny else 1.0) for _ in range(3))
    say(f"rate        {rate / 1e12:.4g} TFLOP/s of large bfloat16 matrix products")
    report["matmul_tflops"] = rate / 1e12
    config = tiny_config() if tiny else llama_8b()
    start = time.perf_counter()
    model = random_model(config)
    size = sum(int(np.prod(shape)) for shape in param_shapes(config).values())
    say(f"model       {size:,} parameters made in {time.perf_counter() - start:.1f} s")
    article = 64 if tiny else 6144
    report["prefill_seconds"] = measure_prefill(model, article)
    report |= measure_sweep(model, article, rate, tiny, arguments.configurations)
    report |= compare(report, arguments.rival)
    stats = device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        report["peak_gib"] = stats["peak_bytes_in_use"] / 2**30
        say(f"memory      {report['peak_gib']:.1f} GiB at the peak")
    else:
        say("memory      this device does not tell")
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(report, indent=2) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tiny", action="store_true", help="a small model; runs on a CPU")
    parser.add_argument("--out", help="JSON file of all that was measured")
    parser.add_argument("--rival", help="JSON file that bench/gpu_rival.py wrote")
    parser.add_argument("--configurations", type=int, default=256, help="of the sweep")
    return parser.parse_args()


def llama_8b() -> TransformerConfig:
    """Llama 3.1 8B's shape."""
    scaling = RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=8192
    )
    return TransformerConfig(
        family="llama", num_layers=32, model_dim=4096, mlp_dim=14336, num_heads=32,
        num_kv_heads=8, head_dim=128, vocab_size=128256, norm="rms", norm_eps=1e-5,
        mlp="gated_silu", rotary_dim=128, rope_theta=5e5, rope_scaling=scaling,
        tie_embeddings=False, max_positions=131072,
    )  # fmt: skip


def tiny_config() -> TransformerConfig:
    return llama_8b().replace(
        num_layers=3, model_dim=32, mlp_dim=48, num_heads=4, num_kv_heads=2, head_dim=8,
        rotary_dim=8, vocab_size=257,
    )  # fmt: skip


def random_model(config: TransformerConfig) -> Transformer:
    """Random bfloat16 weights, drawn on the device."""
    make = jax.jit(
        lambda key, shape, scale: jax.random.normal(key, shape, jnp.bfloat16) * scale,
        static_argnums=(1,),
    )
    params: dict[str, Any] = {}
    for index, (path, shape) in enumerate(param_shapes(config).items()):
        *parents, last = path.split("/")
        node = params
        for parent in parents:
            node = node.setdefault(parent, {})
        if last == "scale":
            node[last] = jnp.ones(shape, jnp.bfloat16)
        else:
            scale = jnp.asarray(0.02, jnp.bfloat16)
            node[last] = make(jax.random.fold_in(jax.random.key(0), index), shape, scale)
    jax.block_until_ready(params)
    return Transformer.from_params(config, params)


def parity() -> dict[str, float] | str:
    """Largest difference of logits from PyTorch's, float32 with full-precision products."""
    try:
        import torch
        import transformers
    except ImportError as error:
        say(f"parity      skipped: {error}; the test suite checks it on the CPU")
        return f"skipped: {error}"
    import convert

    where = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    shared: dict[str, Any] = {
        "vocab_size": 97, "hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 96,
        "num_attention_heads": 8,
    }  # fmt: skip
    models = {
        "llama": transformers.LlamaConfig(**shared, num_key_value_heads=2),
        "gpt_neox": transformers.GPTNeoXConfig(**shared),
    }
    tokens = np.random.default_rng(0).integers(0, 97, (2, 40))
    found = {}
    for name, config in models.items():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        with tempfile.TemporaryDirectory() as home, torch.no_grad():
            model.save_pretrained(f"{home}/hf")
            theirs = model.to(where)(torch.as_tensor(tokens).to(where)).logits.cpu().numpy()
            ours = convert.resolve(f"{home}/hf", cache_dir=f"{home}/cache").restore("float32")
            with jax.default_matmul_precision("highest"):
                logits = np.asarray(ours(jnp.asarray(tokens.astype(np.int32))))
        found[name] = float(np.abs(logits - theirs).max())
        say(f"parity      {name}: logits within {found[name]:.1e} of PyTorch's ({where})")
        if not found[name] < 1e-4:
            raise SystemExit(f"error: {name} differs from PyTorch by {found[name]:.1e}")
    return found


def measure_prefill(model: Transformer, length: int) -> float:
    """Seconds of one full-cache pass over an article, its queries and keys brought to the host."""
    tokens = np.arange(length, dtype=np.int32) % model.config.vocab_size
    seconds, first = _timed(lambda: [None for _ in prefill(model, tokens)], repeats=1)
    say(f"prefill     {length} tokens in {seconds:.2f} s (the first time {first:.1f} s)")
    return seconds


def influence_problem(config: TransformerConfig, article: int, tiny: bool) -> Problem:
    """Questions behind a compacted article of random keys and values."""
    rows, length, scored_tokens = (2, 12, 6) if tiny else (20, 128, 64)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, config.vocab_size, (rows, length + 1)).astype(np.int32)
    positions = np.broadcast_to(
        np.arange(article, article + length, dtype=np.int32), (rows, length)
    )
    scored = np.zeros((rows, length), bool)
    scored[:, -scored_tokens:] = True
    shape = config.num_kv_heads, article, config.head_dim
    keys, values = (rng.normal(size=shape).astype(jnp.bfloat16) for _ in range(2))
    base = max(1, article // 20)
    prefix = LayerPrefix(
        jnp.asarray(keys[:, :base]),
        jnp.asarray(values[:, :base]),
        jnp.zeros((config.num_kv_heads, base), jnp.float32),
    )
    return Problem(
        batch=Batch(
            inputs=tokens[:, :-1], positions=positions, targets=tokens[:, 1:], scored=scored,
            lengths=np.full(rows, length),
        ),
        prefix=[prefix] * config.num_layers,
        head_prefix=lambda layer, head, count: (
            keys[head, :count], values[head, :count], np.zeros(count, np.float32),
        ),
    )  # fmt: skip


def spread_configurations(
    config: TransformerConfig, article: int, count: int
) -> list[Configuration]:
    """Heads of four layers spread over the depth, each at as many numbers of keys."""
    layers = sorted({config.num_layers * i // 4 for i in range(4)})
    heads = [(layer, head % config.num_kv_heads) for head in range(2) for layer in layers]
    each = max(1, count // len(heads))
    steps = np.unique(np.linspace(1, article // 2, each).astype(int))
    return [keep_keys({head: int(kept)}) for head in heads for kept in steps]


def measure_sweep(
    model: Transformer, article: int, rate: float, tiny: bool, count: int
) -> dict[str, float]:
    config = model.config
    problem = influence_problem(config, article, tiny)
    configurations = spread_configurations(config, article, 16 if tiny else count)
    options = SweepOptions(
        chunk_tokens=96 if tiny else 65536,
        score_tokens=64 if tiny else 8192,
        memory_budget=(1 if tiny else 48) << 30,
    )
    engine = Sweep(model, problem, options)
    seconds, first = _timed(lambda: engine.run(configurations), repeats=1 if tiny else 2)
    plan = engine.plan(configurations)
    batch = problem.batch
    seen = max(1, article // 20) + batch.inputs.shape[1] // 2
    tokens, scored = batch.inputs.size, int(batch.scored.sum())
    blocks = plan.block_evaluations - config.num_layers  # the baseline's are there already
    flops = blocks * estimate.block_flops(config, tokens, seen)
    flops += len(configurations) * estimate.scoring_flops(config, scored)
    per_second = len(configurations) / seconds
    share = flops / seconds / rate
    # All layers are equally often first: half of the blocks, and the unembedding.
    mean = (config.num_layers + 1) / 2 * estimate.block_flops(config, tokens, seen)
    mean += estimate.scoring_flops(config, scored)
    total = MAP_HEADS * MAP_RATIOS * MAP_ARTICLES
    hours = total * mean * seconds / flops / 3600
    say(
        f"sweep       {len(configurations)} configurations, {blocks} block evaluations of "
        f"{tokens} tokens in {seconds:.2f} s ({first - seconds:.1f} s of compiling before)"
    )
    say(f"            {per_second:.4g} configurations/s, {flops / seconds / 1e12:.4g} TFLOP/s: "
        f"{share:.2f} of the matrix rate (bar {BAR})")  # fmt: skip
    say(f"map         {MAP_HEADS} heads x {MAP_RATIOS} ratios x {MAP_ARTICLES} articles: "
        f"{hours:.2f} hours of sweeping at this rate")  # fmt: skip
    return {
        "configurations": len(configurations), "sweep_seconds": seconds,
        "configurations_per_second": per_second, "compile_seconds": first - seconds,
        "tflops": flops / seconds / 1e12, "share_of_matmul": share, "map_hours": hours,
    }  # fmt: skip


def compare(report: dict[str, Any], rival: str | None) -> dict[str, float]:
    """PyTorch's rate beside ours."""
    if rival is None or not Path(rival).is_file():
        say("PyTorch     not measured")
        return {}
    theirs = json.loads(Path(rival).read_text())["configurations_per_second"]
    ratio = report["configurations_per_second"] / theirs
    say(f"PyTorch     {theirs:.4g} configurations/s, batched: ours is {ratio:.2f} times as fast")
    return {"rival_configurations_per_second": theirs, "ratio": ratio}


def _timed(function: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Seconds of the fastest repeat after a warm-up, and of the warm-up."""
    times = []
    for _ in range(1 + repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times[1:]), times[0]


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    main()
