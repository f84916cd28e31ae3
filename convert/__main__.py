"""Command line of the converter; see `python -m convert --help`."""

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax

from convert import REGISTERED, convert, open_source, parity, resolve
from convert.export import export_hf
from jaxablate.checkpoint import Checkpoint, is_checkpoint, open_checkpoint
from jaxablate.errors import UserError
from jaxablate.stored_arrays import DTYPES

DESCRIPTION = f"""\
Convert a language model into a jaxablate checkpoint, compare it with PyTorch, or write it back.

  python -m convert SOURCE DEST [--dtype DTYPE] [--verify]
  python -m convert export CKPT DIR
  python -m convert verify SOURCE_OR_CKPT

SOURCE is one of
  - the directory of a Hugging Face model: config.json, and *.safetensors or pytorch_model*.bin
  - a .gguf file (architectures llama, qwen2, qwen3; F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K)
  - a name on the Hugging Face hub, fetched where there is a network
  - {", ".join(REGISTERED)}: ships in a package, nothing is fetched
Families: Llama 1 to 3.3, TinyLlama, SmolLM2, Mistral without sliding window, Qwen2, Qwen2.5, Qwen3,
Pythia, GPT-NeoX-20B. Whatever is not known is refused by its name.
"""
EXAMPLES = """\
examples:
  python -m convert smollm2-135m-instruct checkpoints/smollm2 --verify
  python -m convert ~/models/Llama-3.1-8B-Instruct checkpoints/llama-3.1-8b
  python -m convert EleutherAI/pythia-70m checkpoints/pythia-70m --dtype float32
  python -m convert verify checkpoints/smollm2 --tokens 1024
  python -m convert export checkpoints/smollm2 exported/smollm2
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Errors of the user are one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    commands = {"export": _export, "verify": _verify}
    run = commands.get(arguments[0] if arguments else "", _convert)
    if run is not _convert:
        arguments = arguments[1:]
    try:
        return run(arguments)
    except (UserError, OSError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing unfinished was left behind", file=sys.stderr)
        return 130


def _parser(usage: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog="python -m convert",
        usage=f"python -m convert {usage}",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _convert(arguments: list[str]) -> int:
    parser = _parser("SOURCE DEST [--dtype DTYPE] [--verify]")
    parser.add_argument("source", metavar="SOURCE", help="the model; see above")
    parser.add_argument("dest", metavar="DEST", type=Path, help="directory to make")
    parser.add_argument(
        "--dtype",
        choices=list(DTYPES),
        help="cast every weight; the default keeps each as it is stored (quantised ones become "
        "float32). Prints the largest change",
    )
    parser.add_argument(
        "--reuse", action="store_true", help="accept a finished checkpoint at DEST as it is"
    )
    parser.add_argument(
        "--verify",
        action="store_true",
        help="then read the checkpoint back, and compare logits with PyTorch's",
    )
    _add_limits(parser)
    options = parser.parse_args(arguments)
    begin = time.monotonic()
    source = open_source(options.source)
    checkpoint = convert(source, options.dest, options.dtype, reuse=options.reuse)
    _describe(checkpoint)
    print(f"{time.monotonic() - begin:.1f} s")
    if not options.verify:
        return 0
    checkpoint.verify()
    return _compare(checkpoint, source.path, options)


def _verify(arguments: list[str]) -> int:
    parser = _parser("verify SOURCE_OR_CKPT [--tokens N]")
    parser.add_argument("model", metavar="SOURCE_OR_CKPT", help="a checkpoint, or a source")
    _add_limits(parser)
    options = parser.parse_args(arguments)
    if is_checkpoint(options.model):
        checkpoint, source = open_checkpoint(options.model), None
    else:
        source = open_source(options.model).path
        checkpoint = resolve(options.model)
    checkpoint.verify()
    _describe(checkpoint)
    return _compare(checkpoint, source, options)


def _export(arguments: list[str]) -> int:
    parser = _parser("export CKPT DIR")
    parser.add_argument("checkpoint", metavar="CKPT", help="a converted checkpoint")
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory to make")
    options = parser.parse_args(arguments)
    checkpoint = open_checkpoint(options.checkpoint)
    path = export_hf(
        checkpoint.config,
        checkpoint,
        options.directory,
        checkpoint.tokenizer_dir,
        checkpoint.provenance.get("source_config"),
    )
    print(f"{path}: {len(checkpoint.leaves)} parameters, {checkpoint.num_bytes / 1e9:.2f} GB")
    return 0


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("comparison with PyTorch")
    group.add_argument("--tokens", type=int, default=512, help="how many (default 512)")
    group.add_argument(
        "--max_error", type=float, default=parity.MAX_ERROR, help="limit (default 1e-3)"
    )
    group.add_argument(
        "--mean_error", type=float, default=parity.MEAN_ERROR, help="limit (default 1e-4)"
    )


def _describe(checkpoint: Checkpoint) -> None:
    config = checkpoint.config
    print(
        f"{checkpoint.path}: {config.family}, {config.num_layers} layers, {config.num_heads} query "
        f"and {config.num_kv_heads} KV heads, {checkpoint.num_bytes / 1e9:.2f} GB in "
        f"{checkpoint.dtype.name}, digest {checkpoint.digest[:16]}"
    )


def _compare(checkpoint: Checkpoint, source: Path | None, options: argparse.Namespace) -> int:
    if options.tokens < 2:
        raise UserError(f"--tokens is {options.tokens}; at least 2 are compared")
    found = parity.measure(checkpoint, source, options.tokens)
    print(found.table(options.max_error, options.mean_error))
    if found.within(options.max_error, options.mean_error):
        return 0
    print("error: the difference from PyTorch is over the limit", file=sys.stderr)
    return 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    # Conversion is work for the host; an accelerator would only be taken from others.
    jax.config.update("jax_platforms", "cpu")
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
