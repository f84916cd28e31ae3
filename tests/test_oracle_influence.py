"""The influence sweep against an independent PyTorch implementation, from token ids on."""

import dataclasses
import functools
import json

import numpy as np
import pytest

import convert
from jaxablate import influence
from jaxablate.compaction import CompactedHead, num_kept
from jaxablate.prefill import prefill
from jaxablate.prompts import Case, Continuation, quality_case
from jaxablate.reference_answers import read_answers
from jaxablate.sweep import Sweep
from jaxablate.text import load_tokenizer, read_documents

pytestmark = pytest.mark.shared
HEADS = ((0, 0), (3, 1), (7, 2), (13, 0), (16, 1))
T = 1942


@pytest.fixture(scope="module")
def checkpoint():
    try:
        return convert.resolve("smollm2-135m-instruct")
    except ValueError as error:
        pytest.skip(f"the embedded model is not installed: {error}")


@pytest.fixture(scope="module")
def model(checkpoint):
    return checkpoint.restore()


@pytest.fixture(scope="module")
def case(shared_dir) -> Case:
    found = json.loads((shared_dir / "oracle/article0_tokens.json").read_text())
    ids = functools.partial(np.asarray, dtype=np.int32)
    questions = zip(found["question_unique_id"], found["question_ids"], found["answer_ids"])
    return Case(
        document="article 0",
        digest="",
        context_ids=ids(found["context_ids"]),
        article_range=(23, 1965),
        continuations=tuple(
            Continuation(question_id=name, prompt_ids=ids(prompt), answer_ids=ids(answer))
            for name, prompt, answer in questions
        ),
        reference_ids=ids([]),
    )


def kept(arrays, cache, head: int, name: str) -> CompactedHead:
    """What the oracle kept of a head; without a fit, keys and values as they are."""
    chosen = arrays[f"{name}_idx"]
    fitted = f"{name}_C2" in arrays.files
    return CompactedHead(
        indices=chosen,
        keys=cache.k[23 + chosen, head],
        values=arrays[f"{name}_C2"] if fitted else cache.v[23 + chosen, head],
        beta=arrays[f"{name}_beta"] if fitted else np.zeros(len(chosen), np.float32),
    )


def oracle_context(model, case, shared_dir, method: str) -> influence.CompactedContext:
    """The context with the key sets, and the fits, that the oracle chose."""
    keys, values, heads = [], [], {}
    baseline = np.load(shared_dir / f"oracle/article0_{method}_baseline.npz")
    swept = np.load(shared_dir / f"oracle/article0_{method}_heads.npz")
    for layer, cache in enumerate(prefill(model, case.context_ids)):
        keys.append(cache.k)
        values.append(cache.v)
        for head in range(cache.k.shape[1]):
            name = f"L{layer}H{head}"
            found = [kept(baseline, cache, head, name)]
            for entry in swept.files:
                if entry.startswith(f"{name}_r") and entry.endswith("_idx"):
                    found.append(kept(swept, cache, head, entry.removesuffix("_idx")))
            heads |= {(layer, head, len(one.indices)): one for one in found}
    return influence.CompactedContext(keys, values, (23, 1965), heads)


@pytest.fixture(scope="module")
def context(model, case, shared_dir) -> influence.CompactedContext:
    return oracle_context(model, case, shared_dir, "select")


def per_question(nll: np.ndarray, case: Case) -> np.ndarray:
    bounds = np.cumsum([len(c.answer_ids) for c in case.continuations])[:-1]
    return np.stack([part.mean(axis=-1) for part in np.split(nll, bounds, axis=-1)], axis=-1)


def swept_deltas(engine: Sweep, case: Case, oracle: dict) -> tuple[np.ndarray, np.ndarray]:
    """Δ log-perplexity of every head and ratio, ours and the oracle's; 0.05 is the baseline."""
    wanted = [(name, ratio, delta) for name, curve in oracle["curves_ratio_delta"].items()
              for ratio, delta in curve]  # fmt: skip
    t0, configurations = num_kept(0.05, T), []
    for name, ratio, _ in wanted:
        layer, head = map(int, name[1:].split("H"))
        configurations.append(influence.head_configuration((layer, head), num_kept(ratio, T), t0))
    nll = engine.run(configurations)
    baseline = per_question(engine.baseline_nll, case)
    delta = per_question(nll, case).mean(axis=-1) - baseline.mean()
    at_baseline = [i for i, (_, ratio, _) in enumerate(wanted) if ratio == 0.05]
    assert len(at_baseline) == len(HEADS)
    assert (delta[at_baseline] == 0).all()
    expected = np.asarray([delta for _, _, delta in wanted])
    print("largest difference of a delta", np.abs(delta - expected).max())
    return delta, expected


def read_oracle(shared_dir, method: str) -> dict:
    return json.loads((shared_dir / f"oracle/article0_{method}.json").read_text())


@pytest.mark.parametrize(("method", "baseline_atol"), [("select", 5e-5), ("match", 3e-4)])
def test_curves_on_the_oracles_baseline(model, case, context, shared_dir, method, baseline_atol):
    oracle = read_oracle(shared_dir, method)
    if method != "select":
        context = oracle_context(model, case, shared_dir, method)
    engine = Sweep(model, influence.influence_problem(context, case, num_kept(0.05, T)))
    baseline = per_question(engine.baseline_nll, case)
    expected = np.asarray(oracle["baseline_per_question_log_ppl"])
    print("largest difference of the baseline", np.abs(baseline - expected).max())
    np.testing.assert_allclose(baseline, expected, atol=baseline_atol)
    np.testing.assert_allclose(*swept_deltas(engine, case, oracle), atol=5e-6)


def test_match_curves_of_our_own_fits(checkpoint, model, shared_dir):
    """All 90 heads fitted at the baseline and five at every ratio, from the texts on."""
    oracle = read_oracle(shared_dir, "match")
    document = read_documents(str(shared_dir / "data/sherlock_quality.jsonl"), limit=1)[0]
    answers = read_answers(str(shared_dir / "data/reference_answers"), document)
    case = quality_case(document, load_tokenizer(checkpoint.tokenizer_dir), answers)
    assert case.article_tokens == T
    config = model.config
    every = [(i, j) for i in range(config.num_layers) for j in range(config.num_kv_heads)]
    ratios = [ratio for ratio, _ in oracle["curves_ratio_delta"]["L0H0"]]
    t0 = num_kept(0.05, T)
    counts = influence.influence_counts(every, HEADS, t0, [num_kept(r, T) for r in ratios])
    settings = influence.CompactionSettings(method="match", reference_queries="repeat")
    context = influence.compact_context(model, case, counts, settings)
    engine = Sweep(model, influence.influence_problem(context, case, t0))
    baseline = per_question(engine.baseline_nll, case)
    expected = np.asarray(oracle["baseline_per_question_log_ppl"])
    print("largest difference of the baseline", np.abs(baseline - expected).max())
    np.testing.assert_allclose(baseline, expected, atol=3e-4)
    np.testing.assert_allclose(*swept_deltas(engine, case, oracle), atol=1e-4)


def test_full_cache(model, case, context, shared_dir):
    oracle = read_oracle(shared_dir, "select")
    problem = dataclasses.replace(
        influence.influence_problem(context, case, num_kept(0.05, T)), prefix=context.full_prefix()
    )
    full = per_question(Sweep(model, problem).baseline_nll, case)
    print("largest difference", np.abs(full - oracle["fullcache_per_question_log_ppl"]).max())
    np.testing.assert_allclose(full, oracle["fullcache_per_question_log_ppl"], atol=5e-5)
