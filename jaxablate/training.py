"""Training a small language model from scratch: initial weights, batches, one optimiser step.

Everything that is random is a function of (seed, step), so a run that was stopped goes on from
any saved state exactly as if it had not been.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int

from jaxablate.config import TransformerConfig, param_shapes
from jaxablate.errors import UserError
from jaxablate.model import Transformer

Params = dict[str, Any]
_INIT_STREAM, _BATCH_STREAM = 0, 1


class TrainState(NamedTuple):
    """What a step changes: the parameters' nested dict and the optimiser's state."""

    params: Params
    opt_state: Any


def init_params(config: TransformerConfig, seed: int) -> Params:
    """Random float32 parameters as GPT-NeoX initialises them.

    Kernels have standard deviation sqrt(2 / (5 D)) (arXiv 1910.05895), those that write to the
    residual stream 2 / (L sqrt(D)) (GPT-J); biases are 0 and norms' scales 1.
    """
    small = math.sqrt(2 / (5 * config.model_dim))
    residual = 2 / config.num_layers / math.sqrt(config.model_dim)
    rng = np.random.default_rng([seed, _INIT_STREAM])
    params: Params = {}
    for path, shape in param_shapes(config).items():
        *parents, leaf = path.split("/")
        if leaf in ("kernel", "embedding"):
            scale = residual if parents[-1] in ("o", "down") else small
            value = scale * rng.standard_normal(shape)
        else:
            value = np.full(shape, 1.0 if leaf == "scale" else 0.0)
        node = params
        for name in parents:
            node = node.setdefault(name, {})
        node[leaf] = jnp.asarray(value, jnp.float32)
    return params


def make_optimizer(
    *,
    learning_rate: float,
    num_steps: int,
    warmup_steps: int,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """AdamW with gradient clipping; linear warm-up, then a cosine to a tenth of the peak."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=warmup_steps,
        decay_steps=num_steps,
        end_value=0.1 * learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(
            schedule, b1=0.9, b2=0.95, eps=1e-8, weight_decay=weight_decay, mask=_is_matrix
        ),
    )


def mean_nll(
    config: TransformerConfig, params: Mapping[str, Any], tokens: Int[Array, "B T"]
) -> Float[Array, ""]:
    """Mean NLL in nats of every token but the first of each row, given those before it."""
    logits = Transformer.from_params(config, params)(tokens[:, :-1])
    targets = jnp.expand_dims(tokens[:, 1:], -1)
    chosen = jnp.squeeze(jnp.take_along_axis(logits, targets, axis=-1), -1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def apply_gradients(
    optimizer: optax.GradientTransformation, state: TrainState, gradients: Params
) -> TrainState:
    """The state after one update."""
    # optax multiplies its integer step count with floats.
    with jax.numpy_dtype_promotion("standard"):
        updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state)


def make_step(
    config: TransformerConfig, optimizer: optax.GradientTransformation
) -> Callable[[TrainState, Int[Array, "B T"]], tuple[TrainState, Float[Array, ""]]]:
    """The compiled step: (state, tokens) -> (state after it, loss before it).

    The state's buffers are reused: the one given must not be used again.
    """

    def step(state: TrainState, tokens: Array) -> tuple[TrainState, Array]:
        loss, gradients = jax.value_and_grad(lambda p: mean_nll(config, p, tokens))(state.params)
        return apply_gradients(optimizer, state, gradients), loss

    return jax.jit(step, donate_argnums=0)


def draw_batch(
    stream: Int[np.ndarray, " M"], *, rows: int, length: int, seed: int, step: int
) -> Int[np.ndarray, "B T"]:
    """`rows` random stretches of length + 1 tokens, the same for the same seed and step.

    Raises:
      UserError: the text is shorter than one stretch.
    """
    last = len(stream) - (length + 1)
    if last < 0:
        raise UserError(f"the training text has {len(stream)} tokens; {length + 1} are needed")
    starts = np.random.default_rng([seed, _BATCH_STREAM, step]).integers(0, last + 1, rows)
    return stream[starts[:, None] + np.arange(length + 1)]


def evaluate(
    config: TransformerConfig,
    params: Mapping[str, Any],
    stream: Int[np.ndarray, " M"],
    *,
    rows: int,
    length: int,
) -> float:
    """Mean NLL in nats over the stream in stretches of length + 1 that overlap by one token.

    Every token is predicted once; the last incomplete batch of stretches is left out.
    """
    usable = (len(stream) - 1) // (rows * length) * rows * length
    if usable == 0:
        raise UserError(
            f"the held-out text has {len(stream)} tokens; {rows * length + 1} are needed"
        )
    starts = np.arange(0, usable, length).reshape(-1, rows)
    losses = []
    for batch in starts:
        tokens = jnp.asarray(stream[batch[:, None] + np.arange(length + 1)])
        losses.append(float(_jitted_nll(config, params, tokens)))
    return float(np.mean(losses))


_jitted_nll = jax.jit(mean_nll, static_argnums=0)


def log_spaced_steps(num_steps: int) -> list[int]:
    """0, 1, 2, 4, 8, ... and the last step: early training changes fastest."""
    steps = [0] + [2**power for power in range(num_steps.bit_length())]
    return sorted({step for step in steps if step < num_steps} | {num_steps})


def _is_matrix(params: Any) -> Any:
    """Weight decay is for kernels and embeddings, not for biases and scales."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in ("kernel", "embedding"), params
    )
