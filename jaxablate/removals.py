"""From strategies to one sweep: which sets of layers, as configurations, over windows of a text."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float

from jaxablate import edits, pruning
from jaxablate.config import TransformerConfig
from jaxablate.edits import Configuration
from jaxablate.errors import UserError
from jaxablate.estimate import block_flops, scoring_flops
from jaxablate.plan import Plan
from jaxablate.pruning import LayerSet
from jaxablate.text import Batch, Document, Tokenizer, check_token_ids, windows

_REMOVE = {
    "block": edits.remove_blocks,
    "attention": edits.remove_attention,
    "mlp": edits.remove_mlps,
}
COMPONENTS = tuple(_REMOVE)
STRATEGIES = (
    "zone_aware",
    "last_n",
    "last_n_keep_final",
    "random_interior",
    "random_all",
    "worst",
)


@dataclasses.dataclass(frozen=True)
class Removal:
    """One set that a strategy chose; random strategies have several for one k."""

    strategy: str
    k: int
    layers: LayerSet
    draw: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StrategySettings:
    """What the strategies choose by.

    Attributes:
      kmax: sets of 1..kmax layers.
      strategies: from STRATEGIES.
      order: of zone_aware, and reversed of worst; one of `pruning.ORDERS`.
      boundary: layers at either end that zone_aware and random_interior leave in place.
      draws: sets of each random strategy and k.
      seed: of the random draws.
    """

    kmax: int = 4
    strategies: tuple[str, ...] = STRATEGIES
    order: str = "highest_alpha"
    boundary: int = 2
    draws: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.strategies) - set(STRATEGIES))
        if unknown:
            raise UserError(
                f"unknown strategies {', '.join(unknown)}; choose from {', '.join(STRATEGIES)}"
            )
        if self.kmax < 1:
            raise UserError(f"kmax is {self.kmax}; at least 1 layer must be removed")


def strategy_sets(
    settings: StrategySettings,
    num_layers: int,
    alphas: Sequence[float],
    single_deltas: Sequence[float] | None = None,
) -> list[Removal]:
    """The sets of every strategy for k = 1..kmax.

    Args:
      settings: see StrategySettings.
      num_layers: L.
      alphas: α of each layer.
      single_deltas: ΔPPL of each layer removed alone; needed by order "calibrated" only.

    Raises:
      UserError: a strategy has fewer than kmax layers to choose from, with the numbers.
    """
    order, backwards = (
        pruning.removal_order(
            settings.order,
            num_layers,
            alphas=alphas,
            single_deltas=single_deltas,
            reverse=reverse,
        )
        for reverse in (False, True)
    )
    found: list[Removal] = []
    for k in range(1, settings.kmax + 1):
        for strategy in settings.strategies:
            if strategy.startswith("random_"):
                sets = pruning.random_sets(
                    num_layers,
                    k,
                    draws=settings.draws,
                    seed=settings.seed,
                    pool=strategy.removeprefix("random_"),
                    boundary=settings.boundary,
                )
            elif strategy == "zone_aware":
                sets = [pruning.zone_aware(order, k, boundary=settings.boundary)]
            elif strategy == "worst":
                sets = [pruning.worst_spectral(backwards, k)]
            else:
                sets = [getattr(pruning, strategy)(num_layers, k)]
            found += [Removal(strategy, k, layers, draw) for draw, layers in enumerate(sets)]
    return found


def removal(layers: LayerSet, component: str) -> Configuration:
    """The configuration without these layers, their attention, or their MLPs.

    Raises:
      UserError: an unknown component.
    """
    if component not in _REMOVE:
        raise UserError(f"component is {component!r}; choose from {', '.join(COMPONENTS)}")
    return _REMOVE[component](layers)


def sweep_sets(
    num_layers: int, chosen: Sequence[LayerSet], exhaustive_kmax: int | None
) -> list[LayerSet]:
    """Every set to evaluate, each once: the whole model (), single layers, the chosen, all.

    The baseline and the single layers are always there: differences and ranks need them.
    """
    sets: dict[LayerSet, None] = {(): None}
    sets |= dict.fromkeys(pruning.all_sets(num_layers, 1))
    sets |= dict.fromkeys(chosen)
    if exhaustive_kmax is not None:
        sets |= dict.fromkeys(pruning.all_sets(num_layers, exhaustive_kmax))
    return sorted(sets, key=lambda layers: (len(layers), layers))


def sweep_operations(
    config: TransformerConfig, plan: Plan, batches: Sequence["WindowBatch"]
) -> float:
    """Floating-point operations of the planned sweep over all batches."""
    total = 0.0
    for batch in batches:
        shape = batch.batch.inputs.shape
        blocks = block_flops(config, shape[0] * shape[1], shape[1])
        scored = int(batch.batch.scored.sum())
        total += plan.block_evaluations * blocks
        total += plan.configurations * scoring_flops(config, scored)
    return total


@dataclasses.dataclass(frozen=True, eq=False)
class WindowBatch:
    """Some consecutive windows of one document.

    Attributes:
      document: where they come from.
      first: index of the first window in the document.
      batch: rows of the windows; rows beyond the document's last window are padding.
      token_counts: scored tokens of each window that is there.
    """

    document: Document
    first: int
    batch: Batch
    token_counts: tuple[int, ...]

    @property
    def question(self) -> str:
        """The name of these windows in rows."""
        return f"windows {self.first}-{self.first + len(self.token_counts) - 1}"


def window_batches(
    documents: Sequence[Document],
    tokenizer: Tokenizer,
    *,
    max_tokens: int,
    seq_len: int,
    stride: int,
    bos: str,
    windows_per_batch: int,
    vocab_size: int,
) -> list[WindowBatch]:
    """Windows over the first `max_tokens` scored tokens of the documents, in order.

    Args:
      documents: their texts, one after the other until there are enough tokens.
      tokenizer: of the model.
      max_tokens: scored tokens in all.
      seq_len, stride, bos: see `windows` and `Tokenizer.leading_bos`.
      windows_per_batch: rows of a batch.
      vocab_size: of the model.

    Raises:
      UserError: windows that make no sense, fewer than `max_tokens` tokens, foreign token ids.
    """
    if max_tokens < 1 or windows_per_batch < 1:
        raise UserError(f"{max_tokens} tokens in batches of {windows_per_batch}; use 1 or more")
    lead = tokenizer.leading_bos(bos)
    found: list[WindowBatch] = []
    left = max_tokens
    for document in documents:
        ids = tokenizer.encode_start(document.text, left + (lead is None))
        check_token_ids(ids, vocab_size)
        if len(ids) < 1 + (lead is None):
            continue
        whole = windows(ids, seq_len, stride, lead)
        for first in range(0, len(whole.inputs), windows_per_batch):
            found.append(_slice(document, whole, first, windows_per_batch))
        left -= int(whole.scored.sum())
        if left <= 0:
            return found
    raise UserError(
        f"the text has {max_tokens - left} tokens to score and {max_tokens} were asked for; "
        "lower --tokens or give a longer text"
    )


def _slice(document: Document, whole: Batch, first: int, count: int) -> WindowBatch:
    """Rows [first, first + count), padded to `count` with rows that score nothing."""
    rows = min(count, len(whole.inputs) - first)

    def cut(array: np.ndarray) -> np.ndarray:
        part = array[first : first + rows]
        widths = [(0, count - rows)] + [(0, 0)] * (array.ndim - 1)
        return np.pad(part, widths)

    batch = Batch(
        **{field.name: cut(getattr(whole, field.name)) for field in dataclasses.fields(Batch)}
    )
    counts = tuple(int(n) for n in whole.scored[first : first + rows].sum(axis=1))
    return WindowBatch(document, first, batch, counts)


def window_sums(nll: Float[np.ndarray, " scored"], token_counts: Sequence[int]) -> list[float]:
    """NLL of consecutive windows, summed in float64, from the NLL of all scored tokens."""
    bounds = np.concatenate([[0], np.cumsum(token_counts)])
    values = nll.astype(np.float64)
    return [float(values[a:b].sum()) for a, b in itertools.pairwise(bounds)]


def parse_set(text: str, num_layers: int, chosen: Mapping[tuple[str, int], LayerSet]) -> LayerSet:
    """Read "2,5,7", or a strategy with its k such as "zone_aware:4".

    Args:
      text: what the user wrote.
      num_layers: L.
      chosen: (strategy, k) -> set, of strategies with one set for each k.

    Raises:
      UserError: neither of the two, or layers that the model has not.
    """
    name, _, k = text.strip().partition(":")
    if k.isdigit() and (name, int(k)) in chosen:
        return chosen[name, int(k)]
    items = [item.strip() for item in text.split(",")]
    if not all(item.isdigit() for item in items):
        known = ", ".join(f"{name}:{k}" for name, k in chosen)
        raise UserError(f"{text!r} is no set of layers; write 2,5,7 or one of {known}")
    layers = tuple(sorted({int(item) for item in items}))
    if layers[-1] >= num_layers:
        raise UserError(
            f"layer {layers[-1]} is not in this model: layers are 0 to {num_layers - 1}"
        )
    return layers
