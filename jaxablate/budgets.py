"""Head budgets from influence curves: which share of all kept keys each KV head gets.

Shares p_h of the L·K heads sum to 1; at an overall ratio t head h keeps ρ_h = p_h·L·K·t of its
keys, so one set of shares serves every ratio. What a budget costs is taken to be separable:
Σ_h D_h(ρ_h) with D_h the head's influence curve.
"""

import dataclasses
import heapq
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

from jaxablate.errors import UserError
from jaxablate.selection import num_kept

RATIOS = (0.01, 0.02, 0.05, 0.1)  # the overall ratios that a ratio-agnostic budget is made for
STEP = 0.001  # of the whole, moved at a time
_NAME = re.compile(r"L(\d+)H(\d+)")
_SUM_TOLERANCE = 1e-6


@dataclasses.dataclass(frozen=True, eq=False)
class Curves:
    """Influence curves of all KV heads.

    ratios: [P] increasing, of the article's keys that the head keeps.
    deltas: [L, K, P] change of the log-perplexity from the baseline, positive is worse.
    Piecewise linear between the ratios, constant outside them.
    Raises: UserError for ratios that do not increase or values missing or not finite.
    """

    ratios: Float[np.ndarray, "P"]
    deltas: Float[np.ndarray, "L K P"]

    def __post_init__(self):
        if not (np.diff(self.ratios) > 0).all():
            raise UserError(f"ratios {self.ratios.tolist()} of the curves do not increase")
        missing = np.argwhere(~np.isfinite(self.deltas).all(axis=-1))
        if len(missing):
            layer, head = missing[0]
            raise UserError(
                f"{len(missing)} of {self.deltas[..., 0].size} heads lack finite deltas at some "
                f"ratio, the first L{layer}H{head}; a budget needs every head's whole curve"
            )

    @property
    def num_heads(self) -> int:
        return self.deltas.shape[0] * self.deltas.shape[1]

    def at(self, head: int, ratios: Sequence[float] | np.ndarray) -> Float[np.ndarray, "..."]:
        """D of head number layer·K + head at some ratios."""
        return np.interp(ratios, self.ratios, self.deltas.reshape(self.num_heads, -1)[head])


def uniform_shares(num_layers: int, num_kv_heads: int) -> Float[np.ndarray, "L K"]:
    """1/(L·K) for every head."""
    return np.full((num_layers, num_kv_heads), 1 / (num_layers * num_kv_heads))


def pyramid_shares(
    num_layers: int, num_kv_heads: int, beta: float | int = 20
) -> Float[np.ndarray, "L K"]:
    """PyramidKV (arXiv 2406.02069): linear from 2 - 1/β in layer 0 to 1/β in the last, mean 1.

    Raises: UserError for β below 1/2, whose shares would be negative.
    """
    if not beta >= 0.5:
        raise UserError(f"PyramidKV's beta {beta}; allowed are 0.5 and above")
    first, last = 2 - 1 / Fraction(beta), 1 / Fraction(beta)
    # In fractions, so that every share is the float nearest to the true one; the mean is 1.
    slope = (last - first) / max(1, num_layers - 1)
    layers = [
        first + slope * layer if num_layers > 1 else Fraction(1) for layer in range(num_layers)
    ]
    shares = [float(layer / (num_layers * num_kv_heads)) for layer in layers]
    return np.repeat(np.array(shares)[:, None], num_kv_heads, axis=1)


def predicted_delta(curves: Curves, shares: Float[np.ndarray, "L K"], ratio: float | int) -> float:
    """Σ_h D_h(p_h·L·K·ratio): what the curves say of a budget at an overall ratio."""
    kept = shares.ravel() * curves.num_heads * ratio
    return math.fsum(float(curves.at(head, [rho])[0]) for head, rho in enumerate(kept))


class _Ladder:
    """Every head's cost on the ladder p = 1/(L·K) + k·step, averaged over the ratios.

    k is an integer, so shares take no rounding from the number of moves.
    """

    def __init__(self, curves: Curves, step: float, ratios: Sequence[float]):
        if not 0 < step < 1:
            raise UserError(f"step {step} of the shares; allowed is more than 0, less than 1")
        if not len(ratios) or not all(0 < ratio <= 1 for ratio in ratios):
            raise UserError(f"overall ratios {list(ratios)}; allowed are some in 0 < ratio <= 1")
        self._curves, self._step, self._ratios = curves, step, np.asarray(ratios, np.float64)
        self.heads = curves.num_heads
        # Only a head with more than a step gives one away.
        self.lowest = -max(0, math.ceil(round(1 / self.heads / step, 9)) - 1)
        self._costs: dict[tuple[int, int], float] = {}

    def share(self, rung: int) -> float:
        return 1 / self.heads + rung * self._step

    def cost(self, head: int, rung: int) -> float:
        if (head, rung) not in self._costs:
            kept = self.share(rung) * self.heads * self._ratios
            self._costs[head, rung] = float(self._curves.at(head, kept).mean())
        return self._costs[head, rung]

    def gain(self, head: int, rung: int) -> float:
        """What one more step is worth to the head."""
        return self.cost(head, rung) - self.cost(head, rung + 1)

    def shares(self, rungs: Sequence[int]) -> Float[np.ndarray, "L K"]:
        shares = np.array([self.share(rung) for rung in rungs])
        return (shares / shares.sum()).reshape(self._curves.deltas.shape[:2])


def swap_shares(
    curves: Curves, step: float = STEP, ratios: Sequence[float | int] = RATIOS
) -> Float[np.ndarray, "L K"]:
    """Ratio-agnostic swaps (arXiv 2602.16284): from uniform, move a step while it pays.

    Each move goes from the head that loses least to another that gains most, on the mean over
    `ratios`, as long as the gain exceeds the loss; a head gives only if it has more than a step.
    Equal gains go by head number. Every move lowers the surrogate, so it ends.
    Raises: UserError for a step or ratios that make no sense.
    """
    ladder = _Ladder(curves, step, ratios)
    rungs = [0] * ladder.heads
    gains = np.array([ladder.gain(head, 0) for head in range(ladder.heads)])
    losses = np.full(ladder.heads, np.inf)
    if ladder.lowest < 0:
        losses[:] = [ladder.gain(head, -1) for head in range(ladder.heads)]
    while ladder.heads > 1:
        to, giver = _best_pair(gains, losses)
        # Beyond rounding, or two heads could exchange a step for ever.
        if not gains[to] > losses[giver] + 1e-12 * (abs(gains[to]) + abs(losses[giver])):
            break
        rungs[to] += 1
        rungs[giver] -= 1
        for head in (to, giver):
            gains[head] = ladder.gain(head, rungs[head])
            can_give = rungs[head] > ladder.lowest
            losses[head] = ladder.gain(head, rungs[head] - 1) if can_give else np.inf
    return ladder.shares(rungs)


def _best_pair(gains: np.ndarray, losses: np.ndarray) -> tuple[int, int]:
    """Two different heads with the largest gain minus loss."""
    to, giver = int(np.argmax(gains)), int(np.argmin(losses))
    if to != giver:
        return to, giver
    others = np.arange(len(gains)) != to
    second_to = int(np.argmax(np.where(others, gains, -np.inf)))
    second_giver = int(np.argmin(np.where(others, losses, np.inf)))
    if gains[second_to] - losses[giver] > gains[to] - losses[second_giver]:
        return second_to, giver
    return to, second_giver


def greedy_shares(
    curves: Curves, step: float = STEP, ratios: Sequence[float | int] = RATIOS
) -> Float[np.ndarray, "L K"]:
    """From the least that the swaps leave a head, hand out step by step where it gains most.

    The best on this ladder if every curve is convex; where a curve is flat before it falls, swaps
    may do better. Raises: UserError for a step or ratios that make no sense.
    """
    ladder = _Ladder(curves, step, ratios)
    rungs = [ladder.lowest] * ladder.heads
    queue = [(-ladder.gain(head, ladder.lowest), head) for head in range(ladder.heads)]
    heapq.heapify(queue)
    for _ in range(-ladder.lowest * ladder.heads):
        head = queue[0][1]
        rungs[head] += 1
        heapq.heapreplace(queue, (-ladder.gain(head, rungs[head]), head))
    return ladder.shares(rungs)


def keys_per_head(
    shares: Float[np.ndarray, "L K"], ratio: float | int, num_keys: int
) -> Int[np.ndarray, "L K"]:
    """Keys that each head keeps at an overall ratio: num_kept(p·L·K·ratio), ρ clamped to 1.

    What a clamped head cannot use is not handed to others: the published budgets do not either.
    Compare kept_ratio with the nominal one.
    """
    kept = np.clip(shares * shares.size * ratio, 0, 1)
    counts = [num_kept(float(rho), num_keys) for rho in kept.ravel()]
    return np.array(counts, np.int64).reshape(shares.shape)


def kept_ratio(counts: Int[np.ndarray, "L K"], num_keys: int) -> float:
    """Keys really kept of all heads' keys, to be told beside the nominal ratio."""
    return float(counts.sum()) / (counts.size * num_keys)


def write_shares(path: str | os.PathLike, shares: Float[np.ndarray, "L K"]) -> None:
    """The published format: flat JSON {"L0H0": share, …}, written whole or not at all."""
    named = {
        f"L{layer}H{head}": float(share)
        for layer, row in enumerate(shares)
        for head, share in enumerate(row)
    }
    path = Path(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(named, indent=2) + "\n", encoding="utf-8")
    os.replace(partial, path)


def read_shares(
    path: str | os.PathLike, num_layers: int | None = None, num_kv_heads: int | None = None
) -> Float[np.ndarray, "L K"]:
    """Shares from flat JSON {"L0H0": share, …}; sizes as in the file where not given.

    Raises: UserError, one line, for a file that cannot be read, is no such JSON, names heads twice,
    wrongly, too few or too many, has shares below 0, or whose sum is not 1 to 1e-6.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        found = json.loads(text, object_pairs_hook=_unique)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: no head budget: {error}") from None
    if not isinstance(found, Mapping) or not found:
        raise UserError(f'{path}: no head budget; expected JSON {{"L0H0": share, …}}')
    shares: dict[tuple[int, int], float] = {}
    for name, share in found.items():
        match = _NAME.fullmatch(name)
        if match is None:
            raise UserError(f"{path}: {name!r} names no KV head; expected names like L3H1")
        number = isinstance(share, int | float) and not isinstance(share, bool)
        if not number or not math.isfinite(share) or share < 0:
            raise UserError(f"{path}: share {share!r} of {name}; allowed are numbers from 0 to 1")
        shares[int(match[1]), int(match[2])] = float(share)
    return _table(path, shares, num_layers, num_kv_heads)


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    names = [name for name, _ in pairs]
    twice = (
        [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    )
    if twice:
        raise ValueError(f"{twice[0]} is there twice")
    return dict(pairs)


def _table(path, shares, num_layers, num_kv_heads) -> np.ndarray:
    """The dictionary as an array, complete and summing to 1."""
    layers = num_layers or 1 + max(layer for layer, _ in shares)
    heads = num_kv_heads or 1 + max(head for _, head in shares)
    if len(shares) != layers * heads:
        raise UserError(f"{path}: {len(shares)} heads; expected {layers} layers x {heads}")
    for layer, head in shares:
        if layer >= layers or head >= heads:
            raise UserError(f"{path}: L{layer}H{head} is outside {layers} layers x {heads} heads")
    total = math.fsum(shares.values())
    if abs(total - 1) > _SUM_TOLERANCE:
        raise UserError(f"{path}: shares sum to {total}; expected 1")
    return np.array([[shares[layer, head] for head in range(heads)] for layer in range(layers)])
