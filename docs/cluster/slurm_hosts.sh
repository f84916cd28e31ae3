#!/usr/bin/env bash
# Several hosts as one JAX program: one task per GPU, states spread over all of them.
#   sbatch docs/cluster/slurm_hosts.sh experiments/influence.py --flagfile=llama.flags --out=/shared/llama
# For a model that no single host holds, add --mesh=config:2,model:8 (here: 16 GPUs).
#SBATCH --job-name=jaxablate
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --mem=0
#SBATCH --time=08:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
# To every task: process 0 writes its part and stops, and the others with it.
#SBATCH --signal=TERM@120
set -euo pipefail

if [[ $# -eq 0 ]]; then
  echo "usage: sbatch $0 experiments/NAME.py --flag=value ..." >&2
  exit 2
fi
cd "${SLURM_SUBMIT_DIR:?run this with sbatch}"
export JAXABLATE_CACHE="${JAXABLATE_CACHE:-$PWD/out/cache}"
# JAX's coordinator must be reached directly.
unset http_proxy https_proxy HTTP_PROXY HTTPS_PROXY

# JAX finds the coordinator, the number of processes and each one's GPU from srun's environment.
exec srun --kill-on-bad-exit=1 .venv/bin/python "$@" --distributed --require_gpu
