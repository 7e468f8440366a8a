#!/usr/bin/env bash
#SBATCH --job-name=kernjax
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
# Records on GPU nodes under Slurm, one process a node.
#
#   MODEL=/shared/models/Qwen3.8-27B OUT=/shared/reference sbatch --nodes=2 launch/slurm.sh
#
# Flags of kernjax.record may follow. DRY_RUN=1 bash launch/slurm.sh checks flags and files here.
# Slurm queues a job again when it was preempted or lost a node (--requeue), not when it failed:
# a verdict and an error keep their exit code. The same command goes on where it stopped.
set -euo pipefail

MODEL=${MODEL:-/shared/models/Qwen3.8-27B}
OUT=${OUT:-/shared/reference}                 # on a file system of all nodes
RECIPE=${RECIPE:-configs/recipes/reference_2x8.flags}
CHECKOUT=${CHECKOUT:-${SLURM_SUBMIT_DIR:-.}}
CACHE=${CACHE:-}                              # compiled programs; default: each user's cache
PORT=${PORT:-8476}
PYTHON=${PYTHON:-python3}

cd "$CHECKOUT"
record=("$PYTHON" -m kernjax.record "--flagfile=$RECIPE" "--model=$MODEL" "--out=$OUT" "$@")
if [[ -n ${DRY_RUN:-} ]]; then
    exec "${record[@]}" --only_check_args
fi
if [[ -n $CACHE ]]; then
    export JAX_COMPILATION_CACHE_DIR=$CACHE
fi

nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
# One process with all GPUs of its node: which one it is, srun says.
export RECORD_ADDRESS=${nodes%%$'\n'*}:$PORT
# shellcheck disable=SC2016  # expanded on the nodes
exec srun --kill-on-bad-exit=1 bash -c \
    'exec "$@" --coordinator_address="$RECORD_ADDRESS" --num_processes="$SLURM_NTASKS" \
        --process_id="$SLURM_PROCID"' record "${record[@]}"
