"""The influence sweep against an independent PyTorch implementation, from token ids on."""

import dataclasses
import functools
import json

import numpy as np
import pytest

from jaxablate import influence
from jaxablate.compaction import CompactedHead, num_kept
from jaxablate.prefill import prefill
from jaxablate.prompts import Case, Continuation
from jaxablate.sweep import Sweep

pytestmark = pytest.mark.shared
HEADS = ((0, 0), (3, 1), (7, 2), (13, 0), (16, 1))
T = 1942


@pytest.fixture(scope="module")
def model():
    convert = pytest.importorskip("convert")
    try:
        return convert.resolve("smollm2-135m-instruct").restore()
    except ValueError as error:
        pytest.skip(f"the embedded model is not installed: {error}")


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


@pytest.fixture(scope="module")
def context(model, case, shared_dir) -> influence.CompactedContext:
    """The context with the key sets that the oracle chose."""
    keys, values, heads = [], [], {}
    baseline = np.load(shared_dir / "oracle/article0_select_baseline.npz")
    swept = np.load(shared_dir / "oracle/article0_select_heads.npz")
    for layer, cache in enumerate(prefill(model, case.context_ids)):
        keys.append(cache.k)
        values.append(cache.v)
        for head in range(cache.k.shape[1]):
            name = f"L{layer}H{head}"
            chosen = [swept[key] for key in swept.files if key.startswith(f"{name}_r")
                      and key.endswith("_idx")]  # fmt: skip
            for kept in [baseline[f"{name}_idx"], *chosen]:
                heads[layer, head, len(kept)] = CompactedHead(
                    indices=kept,
                    keys=cache.k[23 + kept, head],
                    values=cache.v[23 + kept, head],
                    beta=np.zeros(len(kept), np.float32),
                )
    return influence.CompactedContext(keys, values, (23, 1965), heads)


def per_question(nll: np.ndarray, case: Case) -> np.ndarray:
    bounds = np.cumsum([len(c.answer_ids) for c in case.continuations])[:-1]
    return np.stack([part.mean(axis=-1) for part in np.split(nll, bounds, axis=-1)], axis=-1)


def test_select_curves(model, case, context, shared_dir):
    oracle = json.loads((shared_dir / "oracle/article0_select.json").read_text())
    t0 = num_kept(0.05, T)
    engine = Sweep(model, influence.influence_problem(context, case, t0))
    baseline = per_question(engine.baseline_nll, case)
    np.testing.assert_allclose(baseline, oracle["baseline_per_question_log_ppl"], atol=5e-5)

    wanted = [(name, ratio, delta) for name, curve in oracle["curves_ratio_delta"].items()
              for ratio, delta in curve]  # fmt: skip
    configurations = []
    for name, ratio, _ in wanted:
        layer, head = map(int, name[1:].split("H"))
        configurations.append(influence.head_configuration((layer, head), num_kept(ratio, T), t0))
    nll = engine.run(configurations)
    delta = per_question(nll, case).mean(axis=-1) - baseline.mean()
    expected = np.asarray([delta for _, _, delta in wanted])
    print("largest difference of a delta", np.abs(delta - expected).max())
    np.testing.assert_allclose(delta, expected, atol=5e-6)
    at_baseline = [i for i, (_, ratio, _) in enumerate(wanted) if ratio == 0.05]
    assert (delta[at_baseline] == 0).all()


def test_full_cache(model, case, context, shared_dir):
    oracle = json.loads((shared_dir / "oracle/article0_select.json").read_text())
    problem = dataclasses.replace(
        influence.influence_problem(context, case, num_kept(0.05, T)), prefix=context.full_prefix()
    )
    full = per_question(Sweep(model, problem).baseline_nll, case)
    print("largest difference", np.abs(full - oracle["fullcache_per_question_log_ppl"]).max())
    np.testing.assert_allclose(full, oracle["fullcache_per_question_log_ppl"], atol=5e-5)
