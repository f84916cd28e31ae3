"""What happens at import: nothing on a device, no PyTorch, and not for long."""

import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import jaxablate

ROOT = Path(__file__).resolve().parents[1]
MODULES = sorted(f"jaxablate.{module.name}" for module in pkgutil.iter_modules(jaxablate.__path__))


def python(program: str, *arguments: str) -> dict:
    """What a fresh interpreter prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_no_module_touches_a_device_or_torch():
    program = """
import importlib, json, sys, time
started = time.perf_counter()
for name in sys.argv[1:]:
    importlib.import_module(name)
seconds = time.perf_counter() - started
from jax._src import xla_bridge
found = {"seconds": seconds, "torch": "torch" in sys.modules,
         "backends": xla_bridge.backends_are_initialized()}
print(json.dumps(found))
"""
    found = python(program, *MODULES, "experiments.influence")
    print(f"{len(MODULES)} modules in {found['seconds']:.1f} s")
    assert not found["backends"]
    assert not found["torch"]


def test_importing_the_package_alone_loads_nothing_heavy():
    program = """
import json, sys
import jaxablate
heavy = ("jax", "flax", "orbax", "transformers", "torch", "pandas", "pyarrow", "matplotlib")
print(json.dumps([name for name in heavy if name in sys.modules]))
"""
    assert python(program) == []


def test_the_engine_loads_nothing_that_tables_and_figures_need():
    """Beyond JAX, Flax and NumPy: what takes longer to import than the engine itself."""
    program = """
import json, sys
import jax, flax.nnx
before = set(sys.modules)
import jaxablate.sweep, jaxablate.influence
heavy = ("orbax", "transformers", "torch", "pandas", "pyarrow", "matplotlib", "scipy.stats",
         "scipy.linalg", "scipy.special")
print(json.dumps([name for name in heavy if name in set(sys.modules) - before]))
"""
    assert python(program) == []


def test_every_name_of_the_package_is_there():
    names = [name for name in dir(jaxablate) if not name.startswith("_")]
    assert {"sweep_table", "Sweep", "remove_blocks"} <= set(names)
    for name in names:
        getattr(jaxablate, name)
