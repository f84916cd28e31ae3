"""Reference answers: the published file format, resuming, and a real model's published answers."""

import hashlib
import json

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import llama_config, random_model
from tiny_tokenizer import write_tokenizer

from experiments import answers as experiment
from jaxablate.errors import UserError
from jaxablate.generation import GenerationOptions
from jaxablate.reference_answers import (
    answer_questions,
    answers_path,
    read_answers,
    write_answers,
)
from jaxablate.text import (
    PromptForms,
    Question,
    load_tokenizer,
    make_document,
    quality_case,
    read_documents,
)

QUESTIONS = tuple(
    Question(id=f"q{i}", text=text, options=("a", "b", "c", "d"))
    for i, text in enumerate(["Which?", "How many of the keys of a head are kept, and why?"])
)
DOCUMENT = make_document("quality_7", "The keys of a head.", QUESTIONS)
PUBLISHED = {
    "model_name": "theirs",
    "article_id": "quality_7",
    "question_ids": ["q0", "q1"],
    "generations": [
        {"question_id": "q1", "generated_text": "B. Größe"},
        {"question_id": "q0", "generated_text": ""},
    ],
}


def _write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
    return path


def test_published_files_are_read(tmp_path):
    path = _write(tmp_path / "quality_7.json", PUBLISHED)
    expected = {"q0": "", "q1": "B. Größe"}
    assert read_answers(path, DOCUMENT) == expected
    assert read_answers(str(tmp_path), DOCUMENT) == expected


def test_what_is_written_has_the_published_fields_and_is_read_again(tmp_path):
    path = answers_path(tmp_path, "quality_7")
    given_answers = {"q0": "A\nbecause", "q1": "B"}
    write_answers(
        path,
        DOCUMENT,
        given_answers,
        model_name="m",
        settings={"temperature": 0.5},
        owner="test",
    )
    assert read_answers(tmp_path, DOCUMENT) == given_answers
    content = json.loads(path.read_text())
    assert content["article_id"] == "quality_7"
    assert content["question_ids"] == ["q0", "q1"]
    assert content["question_ids_hash"] == hashlib.md5(b"q0_q1").hexdigest()[:16]
    assert content["generations"][1] == {"question_id": "q1", "generated_text": "B"}
    assert content["temperature"] == 0.5
    assert [p.name for p in tmp_path.iterdir()] == ["quality_7.json"]


@pytest.mark.shared
def test_hash_of_the_questions_is_the_published_programs(shared_dir, tmp_path):
    document = read_documents(str(shared_dir / "data/sherlock_quality.jsonl"), limit=1)[0]
    theirs = json.loads((shared_dir / "data/reference_answers/quality_90001.json").read_text())
    generated = read_answers(shared_dir / "data/reference_answers", document)
    path = tmp_path / "x.json"
    write_answers(path, document, generated, model_name="m", settings={}, owner="test")
    ours = json.loads(path.read_text())
    for field in ("article_id", "question_ids", "question_ids_hash", "generations"):
        assert ours[field] == theirs[field]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"article_id": "quality_8"}, "article_id 'quality_8', not for quality_7"),
        ({"article_id": None}, "article_id None"),
        ({"document_digest": "0" * 64}, "another text of quality_7"),
        ({"document_digest": [1]}, "another text"),
        ({"generations": None}, "generations must be a list, got None"),
        ({"generations": [3]}, "generation 1 must hold the strings"),
        ({"generations": [{"question_id": "q0"}]}, "generation 1 must hold the strings"),
        ({"generations": PUBLISHED["generations"][:1]}, "no answer to question q0"),
        (
            {
                "generations": [
                    {"question_id": "q0", "generated_text": "a"},
                    {"question_id": "q0", "generated_text": "b"},
                ]
            },
            "two different answers to question 'q0'",
        ),
    ],
)
def test_wrong_files_are_one_line_errors(tmp_path, change, message):
    path = _write(tmp_path / "x.json", {**PUBLISHED, **change})
    with pytest.raises(UserError, match=message) as caught:
        read_answers(path, DOCUMENT)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\xff", b"{", b"[" * 100_000, b"[]", b"9" * 5000])
def test_damaged_files_are_one_line_errors(tmp_path, content):
    path = tmp_path / "x.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.json") as caught:
        read_answers(path, DOCUMENT)
    assert "\n" not in str(caught.value)


def test_absent_files(tmp_path):
    with pytest.raises(UserError, match=r"answers\.py makes them"):
        read_answers(tmp_path, DOCUMENT)


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=300))
def test_no_name_leads_out_of_the_folder(tmp_path_factory, name):
    folder = tmp_path_factory.getbasetemp()
    try:
        path = answers_path(folder, name)
    except UnicodeEncodeError:  # half a surrogate pair; no document has such a name
        return
    assert path.resolve().parent == folder.resolve()
    assert len(path.name.encode()) <= 255
    assert not path.name.startswith(".")


class _Loaded:
    """What experiments/answers.py needs of a model, with a count of its uses."""

    name = "tiny"
    digest = "f" * 64

    def __init__(self, directory):
        self.uses = 0
        self._tokenizer = load_tokenizer(write_tokenizer(directory))

    def tokenizer(self):
        return self._tokenizer

    def model(self):
        self.uses += 1
        return random_model(llama_config(vocab_size=320, max_positions=2048), seed=1)


@pytest.fixture
def loaded(tmp_path):
    return _Loaded(tmp_path / "tokenizer")


def _run(out, loaded, documents, **options):
    given_options = GenerationOptions(max_new_tokens=4, **options)
    return experiment.run(out, loaded, documents, given_options, PromptForms(), "float32")


def test_experiment_writes_what_scoring_reads_and_resumes(tmp_path, loaded):
    other = make_document("quality_8", "Another article.", QUESTIONS[:1])
    out = tmp_path / "out"
    (first,) = _run(out, loaded, [DOCUMENT])
    written = first.read_bytes()
    # The second document only is computed; then none, and the model is not even loaded.
    paths = _run(out, loaded, [DOCUMENT, other], seed=9)  # greedy: the seed changes nothing
    assert first.read_bytes() == written
    assert loaded.uses == 2
    assert _run(out, loaded, [DOCUMENT, other]) == paths
    assert loaded.uses == 2
    read = read_answers(out, DOCUMENT)
    assert read == answer_questions(
        loaded.model(), loaded.tokenizer(), DOCUMENT, GenerationOptions(max_new_tokens=4)
    )
    case = quality_case(DOCUMENT, loaded.tokenizer(), read)
    assert case.batch().scored.any()


def test_experiment_refuses_to_mix(tmp_path, loaded):
    out = tmp_path / "out"
    _run(out, loaded, [DOCUMENT])
    with pytest.raises(UserError, match=r"temperature 0.0 then, 1.0 now"):
        _run(out, loaded, [DOCUMENT], temperature=1.0)
    changed = make_document("quality_7", "Another text.", QUESTIONS)
    with pytest.raises(UserError, match="another text of quality_7"):
        _run(out, loaded, [changed])
    _write(out / "quality_7.json", PUBLISHED)
    with pytest.raises(UserError, match="model_digest unknown"):
        _run(out, loaded, [DOCUMENT])
    with pytest.raises(UserError, match="no questions"):
        _run(out, loaded, [make_document("doc", "text")])


def test_too_long_an_article_is_named(loaded):
    long = make_document("quality_9", "All" + " keys" * 5000 + ".", QUESTIONS)
    with pytest.raises(UserError, match=r"quality_9: .* positions; the model has 2048"):
        answer_questions(loaded.model(), loaded.tokenizer(), long, GenerationOptions())


@pytest.mark.shared
def test_greedy_answers_of_a_real_model_equal_pytorchs(shared_dir):
    import convert

    try:
        checkpoint = convert.resolve("smollm2-135m-instruct")
    except UserError as error:
        pytest.skip(str(error))
    model = checkpoint.restore(dtype=jnp.float32)
    tokenizer = load_tokenizer(checkpoint.tokenizer_dir)
    document = read_documents(str(shared_dir / "data/sherlock_quality.jsonl"), limit=1)[0]
    oracle = json.loads((shared_dir / "oracle/article0_tokens.json").read_text())
    theirs = read_answers(shared_dir / "data/reference_answers", document)
    ours = answer_questions(model, tokenizer, document, GenerationOptions(max_new_tokens=64))
    assert ours == theirs
    for text, ids in zip(ours.values(), oracle["answer_ids"]):
        np.testing.assert_array_equal(tokenizer.encode(text), ids)
