"""A byte-pair tokenizer made from a text, in Hugging Face's files."""

import json
from collections.abc import Iterable
from pathlib import Path

from jaxablate.errors import UserError

END_OF_TEXT = "<|endoftext|>"  # id 0: begin, end and unknown, as in GPT-NeoX
_SMALLEST = 257  # one token per byte, and the end of a text


def train_tokenizer(texts: Iterable[str], vocab_size: int, dest: Path, max_length: int) -> None:
    """Learn byte-level pairs and write tokenizer.json and tokenizer_config.json into `dest`.

    The same texts give the same tokenizer. No token is put before a text.

    Raises:
      UserError: `vocab_size` is below 257, or the texts have too few pairs for it.
    """
    # Imported here: reading results needs no tokenizers.
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < _SMALLEST:
        raise UserError(f"vocab_size is {vocab_size}; byte pairs need at least {_SMALLEST}")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise UserError(
            f"the text has only {tokenizer.get_vocab_size()} byte pairs; "
            f"use a smaller vocabulary than {vocab_size}"
        )
    dest.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(dest / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "unk_token": END_OF_TEXT,
        "add_bos_token": False,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (dest / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
