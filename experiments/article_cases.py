"""Documents behind a compacted article: flags, reading, and what of them changes numbers."""

import hashlib

import numpy as np
from absl import flags

from experiments.command_line import say
from jaxablate.curves import BLOCK_TOKENS
from jaxablate.errors import UserError

FLAGS = flags.FLAGS


def define_flags() -> None:
    """Flags of the text, the prompts, the baseline and the compaction."""
    flags.DEFINE_string(
        "text",
        "pydoc",
        "pydoc (the language reference that ships with Python), a .txt file, a folder of them, a "
        ".jsonl file, or a QuALITY file.",
    )
    flags.DEFINE_integer("documents", 1, "How many documents, from the first on.", lower_bound=1)
    flags.DEFINE_list("articles", None, "Documents by index instead, such as 0,3,7.")
    flags.DEFINE_string(
        "answers",
        None,
        "Score these generated answers to QuALITY's questions (a file or folder that "
        "experiments/answers.py or the published code wrote) instead of the text that follows.",
    )
    flags.DEFINE_string("context_form", "chat", "Prompt of the article, with --answers.")
    flags.DEFINE_string("question_form", "new_chat", "Prompt of a question, with --answers.")
    flags.DEFINE_string(
        "bos", "auto", "BOS before plain text: auto (the tokenizer's), always, never."
    )
    flags.DEFINE_integer(
        "article_tokens", 1024, "Plain text: tokens of the article.", lower_bound=2
    )
    flags.DEFINE_integer("scored_tokens", 256, "Plain text: tokens scored after it.", lower_bound=1)
    flags.DEFINE_integer("protect", 4, "Plain text: first tokens never compacted.", lower_bound=0)
    flags.DEFINE_float("baseline", 0.05, "Share of keys that every head keeps in the baseline.")
    flags.DEFINE_string("method", "select", "select, select+beta, select+values, or match.")
    flags.DEFINE_string("selection", "rms", "Key order: rms, mean, max, random, first_last, omp.")
    flags.DEFINE_string("queries", "context", "Reference queries: context, repeat, or random.")
    flags.DEFINE_integer("max_queries", None, "Thin reference queries to this many.", lower_bound=1)


def settings() -> dict:
    """What changes numbers besides model, documents and configurations.

    Raises:
      UserError: one of these flags has a value that there is not.
    """
    compaction_settings()  # refuses here what would fail when a document is read already
    names = ["baseline", "method", "selection", "queries", "max_queries", "seed", "dtype"]
    if FLAGS.answers:
        found = {"answers": "generated"}  # their text is in each part's inputs
        names += ["context_form", "question_form"]
    else:
        found = {}
        names += ["article_tokens", "scored_tokens", "protect", "bos"]
    shared = {name: FLAGS[name].value for name in names}
    return found | shared | {"block_tokens": BLOCK_TOKENS}


def compaction_settings():
    """`influence.CompactionSettings` of the flags."""
    from jaxablate.influence import CompactionSettings

    return CompactionSettings(
        method=FLAGS.method,
        selection=FLAGS.selection,
        reference_queries=FLAGS.queries,
        max_queries=FLAGS.max_queries,
        seed=FLAGS.seed,
    )


def note_few_queries(config, most_keys: int) -> None:
    """Say so where thinned queries cannot determine the values of the largest fit."""
    rows = None if FLAGS.max_queries is None else FLAGS.max_queries * config.group_size
    fitted = FLAGS.method in ("match", "select+values")
    if rows is not None and fitted and rows < most_keys:
        say(
            f"note        values of up to {most_keys} keys are fitted to {rows} reference queries: "
            "they are not determined, and can be far off elsewhere; raise --max_queries"
        )


def read(loaded) -> list:
    """One prompts.Case per document.

    Raises:
      UserError: fewer or shorter documents than asked for, answers that do not belong to them, or
        token ids that the model has not.
    """
    from jaxablate.text import check_token_ids

    cases = _read(loaded.tokenizer())
    for case in cases:
        for ids in token_ids(case):
            check_token_ids(ids, loaded.config.vocab_size)
    return cases


def _read(tokenizer) -> list:
    from jaxablate.text import PromptForms, plain_case, quality_case, read_documents

    indices = None
    if FLAGS.articles:
        try:
            indices = [int(item) for item in FLAGS.articles]
        except ValueError:
            raise UserError(f"--articles is {FLAGS.articles}; write indices, as 0,3,7") from None
    wanted = max(indices) + 1 if indices else FLAGS.documents
    documents = read_documents(FLAGS.text, limit=wanted)
    if len(documents) < wanted or (indices and min(indices) < 0):
        raise UserError(
            f"{FLAGS.text} has {len(documents)} documents, and {wanted} were asked for; "
            "lower --documents or --articles"
        )
    documents = tuple(documents[i] for i in indices) if indices else documents
    if FLAGS.answers:
        from jaxablate.reference_answers import read_answers

        forms = PromptForms(context=FLAGS.context_form, question=FLAGS.question_form)
        cases = [
            quality_case(d, tokenizer, read_answers(FLAGS.answers, d), forms) for d in documents
        ]
        for case in cases:
            if case.skipped:
                say(f"note        {case.document}: no tokens in answers to {case.skipped}")
        return cases
    return [
        plain_case(
            document,
            tokenizer,
            article_tokens=FLAGS.article_tokens,
            scored_tokens=FLAGS.scored_tokens,
            protect=FLAGS.protect,
            bos=FLAGS.bos,
        )
        for document in documents
    ]


def token_ids(case) -> list[np.ndarray]:
    """Every array of token ids of a case."""
    arrays = [case.context_ids, case.reference_ids]
    for continuation in case.continuations:
        arrays += [continuation.prompt_ids, continuation.answer_ids]
    return arrays


def digest(case) -> str:
    """Digest of every token id of a case: the tokenizer and the answers are in it."""
    found = hashlib.sha256(repr(case.article_range).encode())
    for array in token_ids(case):
        found.update(np.asarray(array, "<i4").tobytes() + b"|")
    return found.hexdigest()


def question_rows(case, nll: np.ndarray, about: dict) -> list[dict]:
    """One row per question from the NLL of all scored tokens, in the case's order."""
    from jaxablate.curves import block_sums

    found, start = [], 0
    for continuation in case.continuations:
        part = nll[start : start + len(continuation.answer_ids)]
        start += len(part)
        blocks = block_sums(part)
        found.append(
            about
            | {
                "question": continuation.question_id,
                "article_tokens": case.article_tokens,
                "scored_tokens": len(part),
                "nll_sum": sum(blocks),
                "block_nll": blocks,
            }
        )
    return found
