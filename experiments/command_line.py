"""What every experiment shares: flags of the model and the run, and a main that speaks plainly.

A user's mistake ends in one line on standard error and exit code 1. A bare flagfile name is looked
for in the working directory, then in experiments/flags/.
"""

import contextlib
import dataclasses
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from absl import app, flags, logging

from jaxablate.errors import UserError

FLAG_FILES = Path(__file__).resolve().parent / "flags"
DTYPES = ("float32", "bfloat16")
DEFAULT_BUDGET = 4 << 30


def define_model_flags(out: str, model: str = "smollm2-135m-instruct") -> None:
    """Flags of the model, the device and the results' directory."""
    flags.DEFINE_string(
        "model",
        model,
        "Model: a registered name (smollm2-135m-instruct ships in a Python package), a Hugging "
        "Face directory, a hub name such as EleutherAI/pythia-160m, a .gguf file, or a converted "
        "checkpoint. Converted once into $JAXABLATE_CACHE (default ~/.cache/jaxablate).",
    )
    flags.DEFINE_enum(
        "dtype",
        "float32",
        DTYPES,
        "Weights and activations; norms, softmax, logits and losses are float32 always.",
    )
    flags.DEFINE_enum(
        "weights",
        "resident",
        ("resident", "stream"),
        "resident: the whole model in device memory. stream: one block after another, for models "
        "larger than memory.",
    )
    flags.DEFINE_string(
        "memory_budget",
        None,
        "Memory of each device for states, besides the weights, such as 1GiB or 512MiB; less only "
        "takes longer (default: 4GiB on a CPU, what the weights leave free on a GPU).",
    )
    flags.register_validator("memory_budget", _is_size)
    flags.DEFINE_integer(
        "chunk_tokens",
        None,
        "Tokens inside a block at a time (default: 2048 on a CPU, in two calls side by side; 65536 "
        "on a GPU).",
        lower_bound=1,
    )
    flags.DEFINE_string("out", out, "Directory of the results; made if absent.")
    flags.DEFINE_integer("seed", 0, "Seed of everything random.", lower_bound=0)
    flags.DEFINE_string(
        "shard",
        None,
        "Compute share i of n only, such as 0/4; auto reads the array job's environment. "
        "Join shares with experiments/merge.py.",
    )
    flags.DEFINE_string(
        "mesh",
        None,
        "Devices to use, such as config:4,model:2: configurations side by side on 4, each with its "
        "heads and MLP split over 2 (default: the first device; several hosts: all).",
    )
    flags.DEFINE_bool(
        "distributed",
        False,
        "Run as one program on several hosts: start the same command on each. Found out under "
        "SLURM, Open MPI and Kubernetes; else give the three flags below.",
    )
    flags.DEFINE_string("coordinator", None, "--distributed: HOST:PORT of process 0.")
    flags.DEFINE_integer("num_processes", None, "--distributed: how many.", lower_bound=1)
    flags.DEFINE_integer("process_id", None, "--distributed: this one's number.", lower_bound=0)
    flags.DEFINE_bool("require_gpu", False, "Stop where JAX has no GPU instead of using the CPU.")


def define_text_flags(max_tokens: int | None = 2048) -> None:
    """Flags of plain text read by windows."""
    flags.DEFINE_string(
        "text",
        "pydoc",
        "pydoc (the language reference that ships with Python), a .txt file, a folder of them, a "
        ".jsonl file, or a QuALITY file (its articles).",
    )
    flags.DEFINE_integer("documents", 1, "How many documents, from the first on.", lower_bound=1)
    flags.DEFINE_integer("seq_len", 256, "Tokens of a window.", lower_bound=2)
    flags.DEFINE_integer("stride", None, "Tokens between windows (default: seq_len).")
    flags.DEFINE_integer(
        "max_tokens", max_tokens, "Use the first tokens of each document only.", lower_bound=2
    )
    flags.DEFINE_string(
        "bos", "auto", "BOS before each window: auto (as the tokenizer), always, never."
    )


def text_settings() -> dict[str, Any]:
    """The flags of `define_text_flags` that change numbers."""
    return {name: flags.FLAGS[name].value for name in ("seq_len", "stride", "max_tokens", "bos")}


def text_batches(loaded: "LoadedModel") -> list:
    """(document, batch of windows) for every batch of every document.

    Raises:
      UserError: fewer documents than asked for, or too little text.
    """
    from jaxablate.table import text_batches as cut
    from jaxablate.text import check_token_ids, read_documents

    documents = read_documents(flags.FLAGS.text, limit=flags.FLAGS.documents)
    if len(documents) < flags.FLAGS.documents:
        raise UserError(
            f"{flags.FLAGS.text} has {len(documents)} documents, and {flags.FLAGS.documents} were "
            "asked for; lower --documents"
        )
    tokenizer = loaded.tokenizer()
    found = []
    for document in documents:
        for batch in cut(document, tokenizer, **text_settings()):
            check_token_ids(batch.inputs, loaded.config.vocab_size)
            found.append((document, batch))
    return found


def batch_digest(batch) -> str:
    """Digest of the tokens of a batch and of which are scored."""
    import hashlib

    digest = hashlib.sha256(repr(batch.inputs.shape).encode())
    for array in (batch.inputs, batch.targets, batch.scored):
        digest.update(array.astype("<i4").tobytes())
    return digest.hexdigest()


def shard():
    """The share of --shard, or None."""
    from jaxablate import results

    return results.parse_shard(flags.FLAGS.shard, os.environ)


def open_run(
    experiment: str,
    loaded: "LoadedModel",
    device: "Device",
    settings: dict[str, Any],
    columns: dict[str, type],
    *constants: str,
    unit: str = "configurations",
):
    """`hosts.open_run` in --out; the values of the flags named `constants` stand in every row."""
    from jaxablate import hosts

    found = flags.FLAGS
    return hosts.open_run(
        found.out,
        experiment=experiment,
        settings=settings,
        flags=resolved_flags(),
        model_digest=loaded.digest,
        columns=columns,
        constants={name: found[name].value for name in ("dtype", "seed", *constants)},
        device=device.description,
        shard=shard(),
        unit=unit,
    )


def announce_plan(config, configurations: Sequence[Any], batches: Sequence[Any]) -> None:
    """Print a sweep's plan over batches without a prefix, and how long it should take now."""
    from jaxablate import estimate
    from jaxablate.plan import plan_sweep

    plan = plan_sweep(configurations, config.num_layers, 10**9)
    flops = sum(
        estimate.sweep_flops(
            config, plan, batch.inputs.size, batch.inputs.shape[1] // 2, int(batch.scored.sum())
        )
        for batch in batches
    )
    seconds = flops / (0.6 * estimate.matmul_rate(flags.FLAGS.dtype))
    say(
        f"plan        {len(configurations)} configurations x {len(batches)} batches of windows "
        f"({sum(int(b.scored.sum()) for b in batches)} scored tokens); "
        f"{plan.block_evaluations * len(batches)} block evaluations "
        f"({plan.naive_block_evaluations * len(batches)} if each ran alone); "
        f"about {estimate.duration(seconds)}"
    )


def run(main: Callable[[], None]) -> None:
    """Parse flags and call `main`; see the module's docstring for how errors end."""
    sys.argv = resolve_flagfiles(sys.argv)

    def guarded(argv: Sequence[str]) -> int:
        if len(argv) > 1:
            return fail(f"{argv[1]!r} is no flag; flags are written --name=value (see --help)")
        logging.set_verbosity(logging.ERROR)  # Orbax reports every read at INFO
        try:
            main()
        except KeyboardInterrupt:
            print("stopped before anything was computed", file=sys.stderr)
            return 130
        except BrokenPipeError:  # the reader of our output went away, as with | head
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (UserError, OSError, ArithmeticError) as error:
            return fail(str(error))
        return 0

    app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    # --help shows the flags of the main module alone: ours come from several.
    for name, ours in flags.FLAGS.flags_by_module_dict().items():
        if name.startswith("experiments."):
            for flag in ours:
                flags.FLAGS.register_key_flag_for_module(sys.argv[0], flag)
    try:
        return flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(fail(f"{error}; --help shows every flag"))


def fail(message: str) -> int:
    """Say what is wrong in one line; returns the exit code."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    return 1


def resolve_flagfiles(argv: Sequence[str]) -> list[str]:
    """Give every --flagfile its full path: as it is, else in experiments/flags/."""
    resolved, following = [], False
    for argument in argv:
        name, value = argument, ""
        if following:
            name, value = "", argument
        elif argument.lstrip("-").startswith("flagfile=") and argument.startswith("-"):
            name, value = argument.split("=", 1)
        following = not following and argument in ("-flagfile", "--flagfile")
        if value:
            argument = (name + "=" if name else "") + _find_flagfile(value)
        resolved.append(argument)
    return resolved


def _find_flagfile(value: str) -> str:
    path = Path(value).expanduser()
    if path.is_file():
        return str(path)
    if path.parent == Path() and (FLAG_FILES / path).is_file():
        return str(FLAG_FILES / path)
    known = ", ".join(sorted(file.name for file in FLAG_FILES.glob("*.flags")))
    sys.exit(fail(f"flagfile {value!r} is neither here nor one of {known}"))


def parse_bytes(text: str) -> int:
    """Read "4GiB", "512MiB", "2e9" or "1073741824".

    Raises:
      UserError: no size, or one that is not positive.
    """
    units = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 1e3, "mb": 1e6,
             "gb": 1e9, "tb": 1e12, "b": 1}  # fmt: skip
    lowered = text.strip().lower()
    unit = next((unit for unit in units if lowered.endswith(unit)), "")
    try:
        size = float(lowered.removesuffix(unit)) * units.get(unit, 1)
    except ValueError:
        size = 0
    if not 0 < size < 2**60:
        raise UserError(f"--memory_budget is {text!r}; write a size such as 4GiB or 512MiB")
    return int(size)


def _is_size(text: str | None) -> bool:
    if text is None:
        return True
    try:
        parse_bytes(text)
    except UserError as error:
        raise flags.ValidationError(str(error)) from None
    return True


def parse_ratios(text: str, name: str) -> list[float]:
    """Read "0,0.05,0.1" or "0:0.5:0.01" (first:last:step, both ends in); rising, each once.

    Raises:
      UserError: not a number, or outside 0 to 1.
    """
    ratios: set[float] = set()
    for item in filter(None, (item.strip() for item in text.split(","))):
        try:
            bounds = [float(part) for part in item.split(":")]
        except ValueError:
            raise UserError(f"--{name}: {item!r} is no ratio; write 0.05 or 0:0.5:0.01") from None
        if len(bounds) == 3 and bounds[2] > 0 and 0 <= bounds[1] - bounds[0] < 10_000 * bounds[2]:
            steps = round((bounds[1] - bounds[0]) / bounds[2])
            ratios.update(round(bounds[0] + i * bounds[2], 9) for i in range(steps + 1))
        elif len(bounds) == 1:
            ratios.add(bounds[0])
        else:
            raise UserError(f"--{name}: {item!r} is no range; write first:last:step, as 0:0.5:0.01")
    for ratio in ratios:
        if not 0 <= ratio <= 1:
            raise UserError(f"--{name}: {ratio:g} is out of range; ratios are 0 to 1")
    return sorted({float(f"{ratio:g}") for ratio in ratios})  # six digits, as rows name them


@dataclasses.dataclass(frozen=True)
class Device:
    """Where JAX runs."""

    kind: str
    description: str


def find_device() -> Device:
    """The device, printed so that a silent fall-back to the CPU is seen.

    Raises:
      UserError: --require_gpu and no GPU.
    """
    import jax

    _keep_compilations()
    if flags.FLAGS.distributed:
        from jaxablate import hosts

        hosts.start(flags.FLAGS.coordinator, flags.FLAGS.num_processes, flags.FLAGS.process_id)
        _silence_all_but_process_0()
    devices = jax.devices()
    kind = devices[0].platform
    description = f"{len(devices)} x {devices[0].device_kind} ({kind})"
    if kind == "cpu":
        description = f"CPU, {os.cpu_count()} cores ({platform.machine()})"
        if len(devices) > 1:
            description += f", {len(devices)} JAX devices"
    if jax.process_count() > 1:
        description += f", {jax.process_count()} processes"
    if flags.FLAGS.require_gpu and kind not in ("gpu", "cuda", "rocm"):
        raise UserError(
            f"--require_gpu, but JAX runs on {description}; install jaxablate[cuda] and check "
            "that nvidia-smi sees the GPU"
        )
    if kind != "cpu" and flags.FLAGS.dtype == "float32":
        # Otherwise a GPU multiplies with 10 bits (TF32), and float32 would be no more than a name.
        jax.config.update("jax_default_matmul_precision", "highest")
    say(f"device      {description}, JAX {jax.__version__}")
    return Device(kind, description)


def _keep_compilations() -> None:
    """Let JAX keep compiled code in the cache directory: the next run starts seconds earlier.

    A directory per processor, since compiled code of one may not run on another. What the
    environment says about JAX's cache goes first.
    """
    import hashlib

    import jax

    import convert

    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return
    with contextlib.suppress(OSError):
        about = platform.processor() + platform.machine()
        about += "".join(
            line for line in Path("/proc/cpuinfo").read_text().splitlines()[:30] if "flags" in line
        )
        name = f"xla-{jax.__version__}-{hashlib.sha256(about.encode()).hexdigest()[:12]}"
        directory = convert.cache_directory() / name
        directory.mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(directory))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


class LoadedModel:
    """A checkpoint, its tokenizer, and its weights once they are asked for."""

    def __init__(self, source: str):
        import convert
        from jaxablate import hosts

        self.checkpoint = hosts.leader_first(lambda: convert.resolve(source))
        self.config = self.checkpoint.config
        self.mesh = _mesh(self.config)
        self.name = source
        self._model: Any = None
        say(
            f"model       {source}: {self.config.num_layers} layers, {self.config.num_heads} "
            f"query heads, {self.config.num_kv_heads} KV heads, weights {self.digest[:12]}"
        )

    @property
    def digest(self) -> str:
        return self.checkpoint.digest

    def tokenizer(self):
        from jaxablate.text import load_tokenizer

        if self.checkpoint.tokenizer_dir is None:
            raise UserError(
                f"{self.name} came without a tokenizer; put tokenizer.json beside its weights "
                "and convert it again"
            )
        return load_tokenizer(self.checkpoint.tokenizer_dir)

    def model(self):
        """The weights as --dtype and --weights say; loaded once."""
        if self._model is None:
            from jaxablate.mesh import param_sharding

            dtype = flags.FLAGS.dtype
            sharding = param_sharding(self.mesh) if self.mesh else None
            if flags.FLAGS.weights == "stream":
                self._model = self.checkpoint.stream(dtype, sharding)
            else:
                self._model = self.checkpoint.restore(dtype, sharding, progress=not _silent)
        return self._model

    def sweep_options(self, kind: str, **changes: Any):
        """`sweep.SweepOptions` from the flags, for this model.

        Args:
          kind: `Device.kind`.
        """
        from jaxablate.sweep import SweepOptions

        budget = flags.FLAGS.memory_budget
        if budget is not None:
            budget = parse_bytes(budget)
        else:
            budget = DEFAULT_BUDGET if kind == "cpu" else _free_memory(self._weight_bytes())
        return SweepOptions(
            chunk_tokens=flags.FLAGS.chunk_tokens or (2048 if kind == "cpu" else 65536),
            score_tokens=512 if kind == "cpu" else 8192,
            memory_budget=budget,
            mesh=self.mesh,
            **changes,
        )

    def _weight_bytes(self) -> int:
        """What the weights take of each device."""
        from jaxablate.config import block_param_shapes, param_shapes
        from jaxablate.mesh import MODEL

        size = sum(math.prod(shape) for shape in param_shapes(self.config).values())
        if flags.FLAGS.weights == "stream":  # the block in use, the next one, and its reading
            block = sum(math.prod(shape) for shape in block_param_shapes(self.config).values())
            size -= (self.config.num_layers - 3) * block
        each = 2 if flags.FLAGS.dtype == "bfloat16" else 4
        return size * each // (self.mesh.shape[MODEL] if self.mesh else 1)


def _mesh(config):
    """The devices of --mesh; without it all of several hosts, and None (the first) of one."""
    import jax

    from jaxablate.mesh import MeshShape, make_mesh, parse_mesh

    if flags.FLAGS.mesh is not None:
        return make_mesh(parse_mesh(flags.FLAGS.mesh), config)
    if jax.process_count() > 1:
        return make_mesh(MeshShape(config=jax.device_count()), config)
    return None


def _free_memory(weights: int) -> int:
    """Bytes of an accelerator that the weights leave, less a tenth for what nobody plans."""
    import jax

    stats = jax.local_devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit", 0)
    return max(int(0.9 * limit) - weights, DEFAULT_BUDGET)


class PartProgress:
    """Moves a run's progress line within the part that is being computed.

    Pass it to `LoadedModel.sweep_options` as on_progress, and `start` each part before its sweep.
    """

    def __init__(self, run):
        self._run = run
        self._cost, self._done, self._items = 0.0, 0.0, 0

    def start(self, part) -> None:
        line = self._run.progress
        self._cost, self._done, self._items = part.cost, line.done, line.done_items

    def __call__(self, done: int, total: int) -> None:
        share = done / max(total, 1)
        self._run.progress.reach(self._done + share * self._cost, self._items)


def resolved_flags() -> dict[str, Any]:
    """Every flag that an experiment or this module defined, for run.json."""
    modules = flags.FLAGS.flags_by_module_dict()
    ours = [name for name in modules if name == sys.argv[0] or "experiments" in name]
    found = {flag.name: flag.value for name in ours for flag in modules[name]}
    return json.loads(json.dumps(found, default=str))


_silent = False


def _silence_all_but_process_0() -> None:
    from jaxablate import hosts

    global _silent
    _silent = not hosts.is_leader()


def say(line: str) -> None:
    """Print a line of the report; of several processes, the first one only."""
    if not _silent:
        print(line, flush=True)
