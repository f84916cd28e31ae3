"""Runs command lines of one experiment one after another in this process, for the tests.

    python tests/experiment_child.py experiments.influence

Importing JAX costs seconds and so does compiling; a process of its own keeps an experiment's flags
apart from other experiments'. Reads lines of JSON: {"cwd": DIR, "arguments": [...]}; answers each
with {"code": ..., "out": ..., "err": ...}.
"""

import contextlib
import importlib
import io
import json
import os
import sys
import traceback
import warnings

from absl.testing import flagsaver

from experiments import command_line


def main() -> None:
    module = importlib.import_module(sys.argv[1])
    getattr(module, "define_flags", lambda: None)()
    warnings.simplefilter("error")
    answers = sys.stdout
    for line in sys.stdin:
        command = json.loads(line)
        os.chdir(command["cwd"])
        sys.argv = [str(module.__file__), *command["arguments"]]
        out, err = io.StringIO(), io.StringIO()
        with (
            flagsaver.flagsaver(),
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
        ):
            code = run(module)
        answer = {"code": code, "out": out.getvalue(), "err": err.getvalue()}
        print(json.dumps(answer), file=answers, flush=True)


def run(module) -> int:
    try:
        command_line.run(module.main)
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    return 70


if __name__ == "__main__":
    main()
