#!/usr/bin/env bash
# A sweep cut into shares, one array task each: no communication, any order, preemption welcome.
#   sbatch docs/cluster/slurm_array.sh experiments/influence.py --flagfile=llama.flags --out=/shared/llama
# Submit the same line again to compute what is missing; the last task to finish writes rows.parquet.
#SBATCH --job-name=jaxablate
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gpus-per-task=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%A_%a.log
# Two minutes before the end of its time a task is told: it writes its part and stops.
#SBATCH --signal=B:TERM@120
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch $0 experiments/NAME.py --flag=value ..." >&2
  exit 2
fi
# Submit from the checkout: SLURM runs a copy of this script from elsewhere.
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
# One cache on the shared file system: the first task converts the model, the others wait for it.
export JAXABLATE_CACHE="${JAXABLATE_CACHE:-$PWD/out/cache}"

# exec: signals reach Python itself. --shard=auto reads SLURM_ARRAY_TASK_ID and its bounds.
exec .venv/bin/python "$@" --shard=auto --require_gpu
