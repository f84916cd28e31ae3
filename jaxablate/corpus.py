"""A text to train on: its tokenizer, its token stream, and topics held out."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Int

from jaxablate import byte_pairs, text
from jaxablate.errors import UserError

HOLD_OUT_EVERY, HOLD_OUT_FIRST = 10, 4


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Token streams of training and held-out documents, each document after an end-of-text.

    Attributes:
      train, heldout: token ids.
      heldout_names, heldout_text: the documents held out, and their text.
      tokenizer_dir: the tokenizer's files.
      digest: of all documents.
    """

    train: Int[np.ndarray, " M"]
    heldout: Int[np.ndarray, " H"]
    heldout_names: tuple[str, ...]
    heldout_text: str
    tokenizer_dir: Path
    digest: str


def prepare_corpus(spec: str, vocab_size: int, tokenizer_dir: Path, max_length: int) -> Corpus:
    """Hold out every tenth document, make the tokenizer on the others, encode both.

    Args:
      spec: documents, as `text.read_documents` takes them.
      vocab_size: of the byte-pair vocabulary.
      tokenizer_dir: where the tokenizer's files go.
      max_length: positions of the model, for the tokenizer's files.

    Raises:
      UserError: too few documents to hold any out.
    """
    documents = text.read_documents(spec)
    heldout = documents[HOLD_OUT_FIRST::HOLD_OUT_EVERY]
    if not heldout:
        raise UserError(
            f"{spec} has {len(documents)} documents; at least {HOLD_OUT_FIRST + 1} are needed, "
            "since some are held out"
        )
    names = {document.name for document in heldout}
    train = [document for document in documents if document.name not in names]
    byte_pairs.train_tokenizer(
        (document.text for document in train), vocab_size, tokenizer_dir, max_length
    )
    tokenizer = text.load_tokenizer(tokenizer_dir)

    def stream(chosen: Sequence[text.Document]) -> np.ndarray:
        pieces = [[tokenizer.bos_id, *tokenizer.encode(one.text)] for one in chosen]
        return np.concatenate([np.asarray(piece, np.int32) for piece in pieces])

    return Corpus(
        train=stream(train),
        heldout=stream(heldout),
        heldout_names=tuple(document.name for document in heldout),
        heldout_text="\n\n".join(document.text.strip() for document in heldout) + "\n",
        tokenizer_dir=tokenizer_dir,
        digest=hashlib.sha256("".join(d.digest for d in documents).encode()).hexdigest(),
    )
