#!/usr/bin/env bash
# Speed on one GPU, in six minutes at most, with nothing to download:
#   bench/gpu.sh [OUT]           JSON files into OUT (default out/gpu)
#   bench/gpu.sh --tiny [OUT]    small models, on the CPU too
# PYTHON names the interpreter (default: .venv/bin/python where there is one, else python3); it needs
# what pyproject.toml lists, with jax[cuda13]. PyTorch is measured where it is installed.
set -euo pipefail
cd "$(dirname "$0")/.."

tiny=()
if [[ ${1:-} == --tiny ]]; then
  tiny=(--tiny)
  shift
fi
out=${1:-out/gpu}
python=${PYTHON:-python3}
if [[ -z ${PYTHON:-} && -x .venv/bin/python ]]; then
  python=.venv/bin/python
fi
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
# The weights, the states and the workspace of a chunk of 65,536 tokens.
export XLA_PYTHON_CLIENT_MEM_FRACTION=${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.9}
mkdir -p "$out"
rm -f "$out/rival.json"

# One after the other, each in a process of its own: neither keeps memory from the other.
if "$python" -c 'import torch, transformers' 2>/dev/null; then
  timeout 120 "$python" bench/gpu_rival.py "${tiny[@]}" --out="$out/rival.json" ||
    echo "PyTorch     failed or took more than two minutes; skipped"
else
  echo "PyTorch     not installed; skipped"
fi
timeout 240 "$python" bench/gpu.py "${tiny[@]}" --rival="$out/rival.json" --out="$out/gpu.json"
