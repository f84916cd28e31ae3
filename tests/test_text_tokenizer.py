"""The tokenizer's BOS policy, chat templates and errors; transformers is the oracle."""

import json

import numpy as np
import pytest
from tiny_tokenizer import STRICT_TEMPLATE, write_tokenizer

from jaxablate.errors import UserError
from jaxablate.text import check_token_ids, load_tokenizer

TEXT = "The keys of a head, kept.\n\n  Größe 42 and 日本語.\n"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def theirs(directory):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(str(directory))


def test_ids_and_text_equal_transformers(directory, theirs):
    ours = load_tokenizer(directory)
    ids = ours.encode(TEXT)
    assert ids.dtype == np.int32
    assert ids.tolist() == theirs(TEXT, add_special_tokens=False).input_ids
    assert ours.encode(TEXT, bos="auto").tolist() == theirs(TEXT).input_ids
    assert ours.decode(ids) == TEXT
    assert (ours.bos_id, ours.eos_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert ours.vocab_size == len(theirs)


def test_rendered_chats_equal_transformers(directory, theirs):
    ours = load_tokenizer(directory)
    for messages in (
        [{"role": "user", "content": " one "}],
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "two\n"}],
    ):
        for prompted in (False, True):
            rendered = theirs.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=prompted
            )
            # The day of the test goes into theirs; ours has one fixed date.
            before, _, after = rendered.partition("Date: ")
            expected = before + "Date: 26 Jul 2024" + after[after.index("\n\n") :]
            assert ours.render_chat(messages, add_generation_prompt=prompted) == expected


def test_whitespace_around_blocks_is_as_in_transformers(tmp_path):
    import transformers

    directory = write_tokenizer(tmp_path, template=STRICT_TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(str(directory))
    messages = [{"role": "user", "content": "one\n"}, {"role": "model", "content": "two"}]
    expected = theirs.apply_chat_template(messages, tokenize=False)
    assert load_tokenizer(directory).render_chat(messages) == expected


def test_auto_follows_the_tokenizer_and_never_doubles_bos(tmp_path):
    adding = load_tokenizer(write_tokenizer(tmp_path / "adding"))
    silent = load_tokenizer(write_tokenizer(tmp_path / "silent", adds_bos=False))
    without = load_tokenizer(write_tokenizer(tmp_path / "without", bos=None))
    bos = adding.bos_id
    for tokenizer, policy, count in (
        (adding, "auto", 1),
        (adding, "always", 1),
        (adding, "never", 0),
        (silent, "auto", 0),
        (silent, "always", 1),
        (without, "auto", 0),
        (without, "never", 0),
    ):
        assert tokenizer.encode("keys", bos=policy).tolist().count(bos) == count
        # A text that spells the token out itself, as rendered chats do.
        doubled = tokenizer.encode("<|begin|>keys", bos=policy).tolist()
        assert doubled.count(bos) == 1
    with pytest.raises(UserError, match="no BOS token"):
        without.encode("keys", bos="always")
    with pytest.raises(UserError, match="auto, always, never"):
        adding.encode("keys", bos="sometimes")


def test_explicit_add_bos_token_wins(tmp_path):
    directory = write_tokenizer(tmp_path)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "add_bos_token": False}))
    assert load_tokenizer(directory).leading_bos() is None


def test_stop_tokens_include_those_of_the_generation_config(tmp_path):
    directory = write_tokenizer(tmp_path)
    assert load_tokenizer(directory).stop_ids == (4,)
    (directory / "generation_config.json").write_text('{"eos_token_id": [1, 4]}')
    assert load_tokenizer(directory).stop_ids == (1, 4)


def test_start_of_a_long_text_equals_that_of_all_of_it(directory):
    tokenizer = load_tokenizer(directory)
    text = TEXT * 2000
    whole = tokenizer.encode(text)
    for count in (1, 7, 500, 4001, len(whole), len(whole) + 5):
        np.testing.assert_array_equal(tokenizer.encode_start(text, count), whole[:count])


def test_the_cut_behind_the_start_falls_into_no_wanted_word(tmp_path):
    tokenizer = load_tokenizer(write_tokenizer(tmp_path, vocab_size=600))
    # Words of six characters behind one of nine: a cut after 6 n characters splits the n-th token.
    text = " previous" + " right" * 3000
    whole = tokenizer.encode(text)
    assert len(whole) == 3001
    for count in (2, 3, 50, 1000):
        np.testing.assert_array_equal(tokenizer.encode_start(text, count), whole[:count])


def test_token_ids_beyond_the_vocabulary_are_refused():
    ids = np.array([[0, 5], [7, 3]], np.int32)
    check_token_ids(ids, vocab_size=8)
    with pytest.raises(UserError, match=r"token id 7 .* vocabulary of 7"):
        check_token_ids(ids, vocab_size=7)
    with pytest.raises(UserError, match="-1"):
        check_token_ids(-ids[:1, :1] - 1, vocab_size=7)


@pytest.mark.parametrize("name", ["chat_template.jinja", "list", "special_tokens_map.json"])
def test_older_and_newer_spellings(tmp_path, name):
    directory = write_tokenizer(tmp_path)
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    expected = load_tokenizer(directory)
    if name == "list":
        named = [
            {"name": "tools", "template": "x"},
            {"name": "default", "template": config["chat_template"]},
        ]
        config["chat_template"] = named
    elif name == "chat_template.jinja":
        (directory / name).write_text(config.pop("chat_template"))
    else:
        moved = {key: config.pop(key) for key in ("bos_token", "eos_token")}
        (directory / name).write_text(json.dumps(moved))
    path.write_text(json.dumps(config))
    ours = load_tokenizer(directory)
    assert ours.chat_template == expected.chat_template
    assert (ours.bos_id, ours.eos_id, ours.adds_bos) == (0, 4, True)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("tokenizer.json", "{}", "not a tokenizer"),
        ("tokenizer.json", "[" * 100_000, "not a tokenizer"),
        ("tokenizer_config.json", "{", "not a JSON file"),
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", '{"a":' * 100_000, "not a JSON file"),
        ("generation_config.json", "nonsense", "not a JSON file"),
    ],
)
def test_damaged_files_are_one_line_errors(tmp_path, name, content, message):
    directory = write_tokenizer(tmp_path)
    (directory / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_tokenizer(directory)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_tokenizer(tmp_path):
    with pytest.raises(UserError, match="no such folder"):
        load_tokenizer(tmp_path / "absent")
    with pytest.raises(UserError, match=r"no tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_templates_that_are_absent_refuse_or_fail(tmp_path):
    user = [{"role": "user", "content": "x"}]
    for template, message in (
        (None, "no chat template"),
        (STRICT_TEMPLATE, "refuses these messages: roles must alternate, starting"),
        ("{% for %}", "template fails"),
        ("{{ 1 / 0 }}", "template fails"),
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "template fails"),
        ("{{ messages[0]['content'].format(messages) }}{{ undefined.attribute }}", "fails"),
    ):
        tokenizer = load_tokenizer(write_tokenizer(tmp_path, template=template))
        with pytest.raises(UserError, match=message) as caught:
            tokenizer.render_chat(user + user)
        assert "\n" not in str(caught.value)
