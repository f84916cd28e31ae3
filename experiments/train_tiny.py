"""A small GPT-NeoX (Pythia's architecture) trained on the spot, so that nothing is downloaded.

    python experiments/train_tiny.py --out=out/tiny

Trains 12 layers of width 128 on the Python language reference that ships with Python, holding out
every tenth topic, and prints the held-out loss beside the entropy of single tokens and a bigram
baseline. About 2 minutes on 2 quiet CPU cores. Killed or stopped, the same command goes on from
the last saved state to bitwise the same weights (on the same CPU).

    OUT/hf/step000128/           a Hugging Face directory (GPTNeoXForCausalLM) per saved step
    OUT/checkpoints/step000128/  the same as a jaxablate checkpoint (Orbax)
    OUT/tokenizer/  OUT/heldout.txt  OUT/train.json  OUT/losses.csv  OUT/figures/training.png

Then, for example: python experiments/alpha_profile.py --model=out/tiny/hf/step000512
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from convert import export_hf
from jaxablate import durable, interrupt, ngrams, spectra_figures, training
from jaxablate.checkpoint import is_checkpoint
from jaxablate.checkpoint_writer import save_checkpoint
from jaxablate.config import TransformerConfig
from jaxablate.corpus import Corpus, prepare_corpus
from jaxablate.errors import UserError
from jaxablate.lock import DirectoryLock
from jaxablate.progress import Progress
from jaxablate.training_state import load_state, save_state

STATE_EVERY = 50  # steps between two states to go on from


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that the weights depend on."""

    text: str = "pydoc"
    layers: int = 12
    width: int = 128
    heads: int = 4
    vocab_size: int = 1024
    context: int = 128
    rows: int = 8
    steps: int = 512
    warmup: int = 40
    learning_rate: float = 4e-3
    weight_decay: float = 0.1
    seed: int = 0

    def model_config(self) -> TransformerConfig:
        """GPT-NeoX as Pythia has it: parallel residual, a quarter of each head rotated."""
        if self.heads < 1 or self.width % (8 * self.heads):
            raise UserError(
                f"width {self.width} and {self.heads} heads: the head size must be a multiple "
                "of 8, since a quarter of it is rotated in pairs"
            )
        return TransformerConfig(
            family="gpt_neox",
            num_layers=self.layers,
            model_dim=self.width,
            mlp_dim=4 * self.width,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.width // self.heads,
            vocab_size=self.vocab_size,
            norm="layer",
            norm_eps=1e-5,
            mlp="gelu",
            qkv_bias=True,
            out_bias=True,
            mlp_bias=True,
            parallel_residual=True,
            rotary_dim=self.width // self.heads // 4,
            rope_theta=10000.0,
            tie_embeddings=False,
            max_positions=max(512, self.context),
        )


@dataclasses.dataclass(frozen=True)
class Trained:
    """What a finished run returns."""

    directories: dict[int, Path]
    heldout_nll: float
    unigram_entropy: float
    bigram_nll: float
    losses: np.ndarray


def run(out: Path, settings: Settings, *, stop_after: int | None = None) -> Trained | None:
    """Train, or go on training, into `out`; finished, it only reads what is there.

    Args:
      out: directory of everything that is written.
      settings: of the model, the text and the optimiser.
      stop_after: stop after so many steps as if asked to (None is returned), state saved.

    Raises:
      UserError: `out` holds a run with other settings, or the settings fit no model or text.
    """
    config = settings.model_config()
    if not 0 <= settings.warmup < settings.steps:
        raise UserError(
            f"{settings.steps} steps with {settings.warmup} of warm-up; the warm-up must "
            "be shorter than the training"
        )
    out = durable.prepare_directory(out)
    lock = DirectoryLock(out)
    lock.acquire()
    try:
        corpus = prepare_corpus(
            settings.text, settings.vocab_size, out / "tokenizer", config.max_positions
        )
        _claim(out, settings, corpus)
        with interrupt.guard("finishing this step and writing the state first"):
            found = _train(out, settings, config, corpus, stop_after)
        return None if found is None else _finish(out, config, settings, corpus, *found)
    finally:
        lock.release()


def _claim(out: Path, settings: Settings, corpus: Corpus) -> None:
    """Refuse a directory of a run with other settings, or another text."""
    wanted = {**dataclasses.asdict(settings), "text_digest": corpus.digest}
    path = out / "settings.json"
    if path.is_file():
        found = json.loads(path.read_text())
        changed = [f"{k} {found.get(k)!r} then, {v!r} now" for k, v in wanted.items()
                   if found.get(k) != v]  # fmt: skip
        if changed:
            raise UserError(
                f"{out} holds a run with other settings ({'; '.join(changed)}); "
                "choose another --out"
            )
    durable.write_bytes(path, (json.dumps(wanted, indent=2) + "\n").encode(), "train")
    durable.write_bytes(out / "heldout.txt", corpus.heldout_text.encode(), "train")


def _train(
    out: Path,
    settings: Settings,
    config: TransformerConfig,
    corpus: Corpus,
    stop_after: int | None,
) -> tuple[training.TrainState, np.ndarray] | None:
    """The state after the last step, and the loss of every step; None where it was stopped."""
    optimizer = training.make_optimizer(
        learning_rate=settings.learning_rate,
        num_steps=settings.steps,
        warmup_steps=settings.warmup,
        weight_decay=settings.weight_decay,
    )
    params = training.init_params(config, settings.seed)
    state = training.TrainState(params, optimizer.init(params))
    losses = np.full(settings.steps, np.nan, np.float32)
    start = 0
    loaded = load_state(out / "state", state)
    if loaded is not None:
        start, state, losses[:start] = loaded
        print(f"going on after step {start} of {settings.steps}", file=sys.stderr)
    step = training.make_step(config, optimizer)
    wanted = set(training.log_spaced_steps(settings.steps))
    progress = Progress(
        settings.steps, settings.steps, done=start, done_items=start, label="train", unit="steps"
    )
    with progress:
        for done in range(start, settings.steps + 1):
            if done in wanted:
                _save_model(out, done, config, state.params, corpus, settings)
            stopping = interrupt.requested() or done == stop_after
            if done > start and (stopping or done % STATE_EVERY == 0 or done == settings.steps):
                save_state(out / "state", done, state, losses[:done])
            interrupt.check()
            if stopping and done < settings.steps:
                return None
            if done < settings.steps:
                tokens = _batch(settings, corpus, done)
                state, loss = step(state, tokens)
                losses[done] = loss
                progress.advance(1, 1)
    return state, losses


def _batch(settings: Settings, corpus: Corpus, step: int) -> jax.Array:
    return jnp.asarray(
        training.draw_batch(
            corpus.train,
            rows=settings.rows,
            length=settings.context,
            seed=settings.seed,
            step=step,
        )
    )


def _save_model(
    out: Path,
    step: int,
    config: TransformerConfig,
    params: training.Params,
    corpus: Corpus,
    settings: Settings,
) -> None:
    """The model after `step` steps in both forms; what is there already is the same, bit by bit."""
    name = f"step{step:06d}"
    arrays = jax.tree.map(np.asarray, params)
    if not is_checkpoint(out / "checkpoints" / name):
        provenance = {
            "source": "train_tiny",
            "step": step,
            "settings": dataclasses.asdict(settings),
        }
        save_checkpoint(
            out / "checkpoints" / name, config, arrays, corpus.tokenizer_dir, provenance
        )
    if not (out / "hf" / name).exists():
        export_hf(config, arrays, out / "hf" / name, corpus.tokenizer_dir)


def _finish(
    out: Path,
    config: TransformerConfig,
    settings: Settings,
    corpus: Corpus,
    state: training.TrainState,
    losses: np.ndarray,
) -> Trained:
    heldout = training.evaluate(
        config, state.params, corpus.heldout, rows=settings.rows, length=settings.context
    )
    trained = Trained(
        directories={
            step: out / "hf" / f"step{step:06d}"
            for step in training.log_spaced_steps(settings.steps)
        },
        heldout_nll=heldout,
        unigram_entropy=ngrams.unigram_entropy(corpus.heldout),
        bigram_nll=ngrams.bigram_nll(corpus.train, corpus.heldout, settings.vocab_size),
        losses=losses,
    )
    summary = {
        "heldout_nll": trained.heldout_nll,
        "unigram_entropy": trained.unigram_entropy,
        "bigram_nll": trained.bigram_nll,
        "last_training_losses": [float(x) for x in losses[-20:]],
        "heldout_documents": corpus.heldout_names,
        "heldout_tokens": len(corpus.heldout),
        "training_tokens": len(corpus.train),
    }
    lines = "".join(f"{step},{loss}\n" for step, loss in enumerate(losses))
    durable.write_bytes(out / "losses.csv", ("step,loss\n" + lines).encode(), "train")
    durable.write_bytes(
        out / "train.json", (json.dumps(summary, indent=2) + "\n").encode(), "train"
    )
    figure = spectra_figures.training_curve(
        losses, trained.heldout_nll, trained.unigram_entropy, trained.bigram_nll
    )
    spectra_figures.save(figure, out / "figures", "training")
    return trained


_HELP = {
    "text": "documents to train on and hold out, as in the other experiments: pydoc, a folder, …",
    "layers": "number of layers",
    "width": "model dimension; the MLP has four times as many",
    "heads": "attention heads",
    "vocab_size": "tokens of the byte-pair vocabulary, made on the training text",
    "context": "tokens in a training sequence",
    "rows": "sequences in a step",
    "steps": "optimiser steps",
    "warmup": "steps of linear warm-up",
    "learning_rate": "peak of the cosine schedule",
    "weight_decay": "AdamW's decay of matrices",
    "seed": "of initial weights and batches",
}


def define_flags() -> None:
    """--out, and a flag per setting with the setting's default; called by the program only."""
    flags.DEFINE_string("out", "out/tiny", "directory of everything that is written")
    for name, default in dataclasses.asdict(Settings()).items():
        if isinstance(default, int):
            flags.DEFINE_integer(name, default, _HELP[name])
        elif isinstance(default, float):
            flags.DEFINE_float(name, default, _HELP[name])
        else:
            flags.DEFINE_string(name, default, _HELP[name])


def main() -> None:
    values: dict[str, Any] = {name: flags.FLAGS[name].value for name in _HELP}
    settings = Settings(**values)
    out = Path(str(flags.FLAGS["out"].value))
    trained = run(out, settings)
    if trained is None:
        return
    print(f"held-out topics, mean NLL in nats per token after {settings.steps} steps:")
    print(f"  this model                        {trained.heldout_nll:.3f}")
    print(f"  bigrams interpolated with unigrams {trained.bigram_nll:.3f}")
    print(f"  entropy of single tokens          {trained.unigram_entropy:.3f}")
    print(f"steps as Hugging Face directories: {out / 'hf'}")
    print(f"figure: {out / 'figures' / 'training.png'}")


if __name__ == "__main__":
    from experiments import command_line

    define_flags()
    command_line.run(main)
