#!/usr/bin/env bash
# Records on all hosts of a Cloud TPU VM slice, and makes the slice again when it is preempted.
#
#   NAME=ref ZONE=us-east5-a MODEL=/mnt/models/Qwen3.8-27B OUT=gs://bucket/reference launch/tpu_vm.sh
#
# Flags of kernjax.record may follow. DRY_RUN=1 checks flags and files here and starts nothing.
# A verdict, FAIL or not, and an error end the script with their exit code; only a slice that is
# gone is made again, and the same command goes on where it stopped.
set -euo pipefail

NAME=${NAME:-kernjax}                         # of the TPU VM
ZONE=${ZONE:-us-east5-a}
TYPE=${TYPE:-v5p-64}                          # 32 chips: v5p counts cores
VERSION=${VERSION:-v2-alpha-tpuv5}            # of the TPU VM's software
MODEL=${MODEL:-/mnt/models/Qwen3.8-27B}       # on a disk that all hosts mount, or a copy on each
OUT=${OUT:-gs://bucket/reference}             # seen by all hosts
RECIPE=${RECIPE:-configs/recipes/reference_v5p_32.flags}
CHECKOUT=${CHECKOUT:-kernjax}                 # on the hosts, with kernjax[tpu] installed
CACHE=${CACHE:-}                              # compiled programs, e.g. gs://bucket/xla
PYTHON=${PYTHON:-python3}
SETUP=${SETUP:-true}                          # run on a slice made anew: mounts, pip install

record=("$PYTHON" -m kernjax.record "--flagfile=$RECIPE" "--model=$MODEL" "--out=$OUT" "$@")
if [[ -n ${DRY_RUN:-} ]]; then
    exec "${record[@]}" --only_check_args
fi

on_all_hosts() {
    gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all --command="$1"
}

state() {
    gcloud compute tpus tpu-vm describe "$NAME" --zone="$ZONE" --format='value(state)' || echo GONE
}

run="cd $(printf '%q' "$CHECKOUT") && $(printf '%q ' "${record[@]}")"
if [[ -n $CACHE ]]; then
    run="export JAX_COMPILATION_CACHE_DIR=$(printf '%q' "$CACHE"); $run"
fi

while true; do
    case $(state) in
    READY) ;;
    GONE | PREEMPTED | TERMINATED)
        gcloud compute tpus tpu-vm delete "$NAME" --zone="$ZONE" --quiet || true
        gcloud compute tpus tpu-vm create "$NAME" --zone="$ZONE" --accelerator-type="$TYPE" \
            --version="$VERSION" --spot
        on_all_hosts "$SETUP"
        ;;
    *) sleep 30 && continue ;;
    esac
    on_all_hosts "$run" && exit 0
    code=$?
    [[ $(state) == READY ]] && exit "$code"
done
