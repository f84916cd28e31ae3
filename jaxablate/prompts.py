"""From documents to what a sweep over prefix keys consumes: a context, an article range in it, and
continuations whose tokens are scored.

Two ways lead there. QuALITY: the context is a chat prompt that holds the article, a continuation
is a question's prompt and the model's own answer to it. Plain text: the document's first tokens
are the article, the next ones are scored. Prompts as published with arXiv 2602.16284.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
from jaxtyping import Int

from jaxablate import windows
from jaxablate.documents import Document
from jaxablate.errors import UserError
from jaxablate.quality import Question
from jaxablate.tokenizer import Message, Tokenizer

SYSTEM_PROMPT = "You are a helpful assistant. Answer a question based on the provided context."
INSTRUCTION = (
    "Please think step by step briefly and then, on a new line, respond with **only** the letter "
    "(A, B, C, or D) of the correct option. If you are not sure, still make a guess."
)
REPEAT_PROMPT = "Repeat the previous context verbatim."
LETTERS = "ABCD"

# How the article is presented. `chat`, as published: system message and a user turn with the
# article. `chat_no_system`: the system text stands in the user turn, for templates that refuse a
# system role. `raw`: BOS and the article, for models without a template.
CONTEXT_FORMS = ("chat", "chat_no_system", "raw")
# How a question follows. `new_chat`, as published: a chat of its own, so that the template's
# leading tokens (a second BOS, a default system block) stand in the middle of the sequence.
# `same_chat`: the next user turn of the context's chat. `raw`: text alone.
QUESTION_FORMS = ("new_chat", "same_chat", "raw")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptForms:
    """Which forms of the prompts are used; a setting to record with every result."""

    context: str = "chat"
    question: str = "new_chat"

    def __post_init__(self) -> None:
        for name, got, allowed in (
            ("context", self.context, CONTEXT_FORMS),
            ("question", self.question, QUESTION_FORMS),
        ):
            if got not in allowed:
                raise UserError(f"the {name} prompt form must be one of {allowed}, got {got!a}")
        if self.question == "same_chat" and self.context == "raw":
            raise UserError("question form same_chat needs a context in a chat form, got raw")


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Continuation:
    """What follows the context: `prompt_ids` are read, `answer_ids` are scored.

    The first answer token is predicted from the last prompt token. `question_id` names the row.
    """

    question_id: str
    prompt_ids: Int[np.ndarray, " P"]
    answer_ids: Int[np.ndarray, " A"]


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Case:
    """One document, ready to be scored.

    Attributes:
      document, digest: its name and the sha256 of its text.
      context_ids: what is prefilled once.
      article_range: [start, end) of the context positions whose keys may be compacted. Everything
        else (BOS, template, protected sink tokens) is kept.
      continuations: one per question; the first position of each is len(context_ids).
      reference_ids: tokens after the context whose queries serve as reference queries of the
        `repeat` kind: a request to repeat the context, and the article again.
      skipped: ids of questions left out because their answer has no tokens.
    """

    document: str
    digest: str
    context_ids: Int[np.ndarray, " S"]
    article_range: tuple[int, int]
    continuations: tuple[Continuation, ...]
    reference_ids: Int[np.ndarray, " R"]
    skipped: tuple[str, ...] = ()

    @property
    def article_tokens(self) -> int:
        """T, the number of compactable tokens: a head's ratio is a fraction of these."""
        return self.article_range[1] - self.article_range[0]

    def batch(self, length: int | None = None) -> windows.Batch:
        """All continuations as rows padded to the longest, or to `length`."""
        return windows.continuations(
            [c.prompt_ids for c in self.continuations],
            [c.answer_ids for c in self.continuations],
            start=len(self.context_ids),
            length=length,
        )


def plain_case(
    document: Document,
    tokenizer: Tokenizer,
    *,
    article_tokens: int,
    scored_tokens: int,
    protect: int = 4,
    bos: str = "auto",
) -> Case:
    """A document's first `article_tokens` tokens are the article, the next `scored_tokens` are
    scored.

    The first scored token is predicted from the last article token; that token is therefore read
    as the continuation's prompt (its own key is always kept), and the context ends before it. The
    first `protect` positions of the context, a BOS included, are never compacted.

    Raises:
      UserError: counts out of range, or a document that is too short (with both counts).
    """
    if article_tokens < 1 or scored_tokens < 1 or protect < 0:
        raise UserError(
            f"article_tokens and scored_tokens must be at least 1 and protect at least 0, got "
            f"{article_tokens}, {scored_tokens} and {protect}"
        )
    lead = tokenizer.leading_bos(bos)
    needed = article_tokens + scored_tokens
    ids = tokenizer.encode_start(document.text, needed + 1)
    if lead is not None and ids[:1].tolist() == [lead]:
        ids = ids[1:]  # the text spells its BOS itself; exactly one is kept
    if len(ids) < needed:
        raise UserError(
            f"{document.name}: the text has {len(ids)} tokens, but {needed} are needed "
            f"({article_tokens} of article and {scored_tokens} scored); take a longer text, or "
            f"lower article_tokens or scored_tokens"
        )
    context = ids[: article_tokens - 1]
    if lead is not None:
        context = np.concatenate([[lead], context]).astype(np.int32)
    if len(context) <= protect:
        raise UserError(
            f"{article_tokens} article tokens leave nothing to compact: {protect} positions are "
            f"protected and the last token is read anew; at least {protect + 2} are needed"
        )
    continuation = Continuation(
        question_id="",
        prompt_ids=ids[article_tokens - 1 : article_tokens],
        answer_ids=ids[article_tokens:needed],
    )
    request = tokenizer.encode(f"\n\n{REPEAT_PROMPT}\n\n")
    return Case(
        document=document.name,
        digest=document.digest,
        context_ids=context,
        article_range=(protect, len(context)),
        continuations=(continuation,),
        reference_ids=np.concatenate([request, context[protect:]]),
    )


def quality_case(
    document: Document,
    tokenizer: Tokenizer,
    answers: Mapping[str, str],
    forms: PromptForms | None = None,
) -> Case:
    """The article in a chat, and each of its questions with the answer in `answers`.

    Args:
      document: from a QuALITY file.
      answers: generated text by question id. A question whose answer has no tokens is skipped.

    Raises:
      UserError: a question without an answer, or no answer with tokens.
    """
    forms = forms or PromptForms()
    context, article_range = context_ids(document.text, tokenizer, forms)
    absent = [question.id for question in document.questions if question.id not in answers]
    if absent or not document.questions:
        what = f"no answer to {absent[0]}" if absent else "the document has no questions"
        raise UserError(f"{document.name}: {what}; experiments/answers.py makes the answers")
    found, skipped = [], []
    for question in document.questions:
        answer_ids = tokenizer.encode(answers[question.id])
        if len(answer_ids) == 0:
            skipped.append(question.id)
            continue
        prompt_ids = question_ids(question, document.text, tokenizer, forms)
        found.append(
            Continuation(question_id=question.id, prompt_ids=prompt_ids, answer_ids=answer_ids)
        )
    if not found:
        raise UserError(f"{document.name}: none of its {len(skipped)} answers has any token")
    article = context[article_range[0] : article_range[1]]
    return Case(
        document=document.name,
        digest=document.digest,
        context_ids=context,
        article_range=article_range,
        continuations=tuple(found),
        reference_ids=np.concatenate([repeat_ids(tokenizer, forms), article]),
        skipped=tuple(skipped),
    )


def context_ids(
    article: str, tokenizer: Tokenizer, forms: PromptForms | None = None
) -> tuple[Int[np.ndarray, " S"], tuple[int, int]]:
    """The context prompt's tokens, and [start, end) of those that lie wholly in the article.

    Raises:
      UserError: the template changes the article, or nothing of it is left.
    """
    forms = forms or PromptForms()
    # The same prompt around a text that no template contains shows where the article stands.
    marker = "@@the-article-stands-here@@"
    before, _, after = _render_context(marker, tokenizer, forms).partition(marker)
    text = before + article + after
    if _render_context(article, tokenizer, forms) != text:
        raise UserError("the chat template changes the article's text (is it stripped?)")
    ids, offsets = tokenizer.encode_with_offsets(text)
    first, last = len(before), len(before) + len(article)
    inside = [i for i, (a, b) in enumerate(offsets) if first <= a < b <= last]
    if not inside:
        raise UserError("the article has no token of its own")
    lead = tokenizer.leading_bos() if forms.context == "raw" else None
    if lead is not None and ids[0] != lead:
        ids, inside = [lead, *ids], [i + 1 for i in inside]
    return np.asarray(ids, np.int32), (inside[0], inside[-1] + 1)


def question_text(question: Question) -> str:
    """The question, its options and the instruction, as published."""
    options = "\n".join(f"{letter}. {o}" for letter, o in zip(LETTERS, question.options))
    return f"{question.text}\n\n{options}\n\n{INSTRUCTION}"


def question_ids(
    question: Question, article: str, tokenizer: Tokenizer, forms: PromptForms | None = None
) -> Int[np.ndarray, " P"]:
    """Tokens of the question's turn, up to where the answer starts."""
    forms = forms or PromptForms()
    return tokenizer.encode(_user_turn(question_text(question), article, tokenizer, forms))


def repeat_ids(tokenizer: Tokenizer, forms: PromptForms | None = None) -> Int[np.ndarray, " P"]:
    """Tokens of the request to repeat the context, up to where the article follows."""
    forms = forms or PromptForms()
    return tokenizer.encode(_user_turn(REPEAT_PROMPT, "article", tokenizer, forms))


def _context_messages(article: str, forms: PromptForms) -> list[Message]:
    if forms.context == "chat":
        return [
            {"role": "system", "content": SYSTEM_PROMPT},
            {"role": "user", "content": article},
        ]
    return [{"role": "user", "content": f"{SYSTEM_PROMPT}\n\n{article}"}]


def _render_context(article: str, tokenizer: Tokenizer, forms: PromptForms) -> str:
    if forms.context == "raw":
        return article
    return tokenizer.render_chat(_context_messages(article, forms))


def _user_turn(text: str, article: str, tokenizer: Tokenizer, forms: PromptForms) -> str:
    if forms.question == "raw":
        return f"\n\n{text}\n\n"
    turn: Message = {"role": "user", "content": text}
    if forms.question == "new_chat":
        return tokenizer.render_chat([turn], add_generation_prompt=True)
    messages = _context_messages(article, forms)
    before = tokenizer.render_chat(messages)
    whole = tokenizer.render_chat([*messages, turn], add_generation_prompt=True)
    if not whole.startswith(before):
        raise UserError("question form same_chat: the chat template rewrites earlier turns")
    return whole[len(before) :]
