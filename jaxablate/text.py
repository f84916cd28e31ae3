"""Texts and tokens: the names that experiments and notebooks use, from the modules beneath."""

from jaxablate.documents import Document, make_document, read_documents
from jaxablate.prompts import Case, Continuation, PromptForms, plain_case, quality_case
from jaxablate.quality import Question
from jaxablate.tokenizer import BOS_POLICIES, Tokenizer, check_token_ids, load_tokenizer
from jaxablate.windows import Batch, continuations, windows

__all__ = [
    "BOS_POLICIES",
    "Batch",
    "Case",
    "Continuation",
    "Document",
    "PromptForms",
    "Question",
    "Tokenizer",
    "check_token_ids",
    "continuations",
    "load_tokenizer",
    "make_document",
    "plain_case",
    "quality_case",
    "read_documents",
    "windows",
]
