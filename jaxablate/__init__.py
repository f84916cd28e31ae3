"""Which parts of a language model matter: very many exact ablations at once, in JAX.

Names below are imported when they are first used, so that importing the package costs nothing and
touches no device.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxablate.checkpoint import open_checkpoint as open_checkpoint
    from jaxablate.config import TransformerConfig as TransformerConfig
    from jaxablate.documents import read_documents as read_documents
    from jaxablate.edits import Configuration as Configuration
    from jaxablate.edits import baseline as baseline
    from jaxablate.edits import head_mask as head_mask
    from jaxablate.edits import keep_keys as keep_keys
    from jaxablate.edits import remove_attention as remove_attention
    from jaxablate.edits import remove_blocks as remove_blocks
    from jaxablate.edits import remove_mlps as remove_mlps
    from jaxablate.edits import silence_heads as silence_heads
    from jaxablate.errors import UserError as UserError
    from jaxablate.influence import compact_context as compact_context
    from jaxablate.influence import influence_problem as influence_problem
    from jaxablate.model import Transformer as Transformer
    from jaxablate.problem import Problem as Problem
    from jaxablate.prompts import plain_case as plain_case
    from jaxablate.sweep import Sweep as Sweep
    from jaxablate.sweep import SweepOptions as SweepOptions
    from jaxablate.table import sweep_table as sweep_table
    from jaxablate.table import text_batches as text_batches
    from jaxablate.tokenizer import load_tokenizer as load_tokenizer

_HOMES = {
    "checkpoint": ["open_checkpoint"],
    "config": ["TransformerConfig"],
    "documents": ["read_documents"],
    "edits": [
        "Configuration",
        "baseline",
        "head_mask",
        "keep_keys",
        "remove_attention",
        "remove_blocks",
        "remove_mlps",
        "silence_heads",
    ],
    "errors": ["UserError"],
    "influence": ["compact_context", "influence_problem"],
    "model": ["Transformer"],
    "problem": ["Problem"],
    "prompts": ["plain_case"],
    "sweep": ["Sweep", "SweepOptions"],
    "table": ["sweep_table", "text_batches"],
    "tokenizer": ["load_tokenizer"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME_OF])
