"""The README's ten lines of Python are real: taken from it and run."""

import re
from pathlib import Path

import numpy as np

README = Path(__file__).parents[1] / "README.md"


def test_readme_snippet_runs():
    text = README.read_text()
    snippets = re.findall(r"```python\n(.*?)```", text, flags=re.S)
    assert len(snippets) == 1
    namespace: dict = {}
    exec(compile(snippets[0], "README.md", "exec"), namespace)
    table = namespace["table"]
    assert table.configuration[0] == ""
    assert len(table) == 1 + len(namespace["configurations"])
    assert table.delta_log_ppl[0] == 0
    assert np.isfinite(table.log_ppl).all()
    assert (table.delta_log_ppl[1:] != 0).all()
