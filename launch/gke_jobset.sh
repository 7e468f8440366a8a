#!/usr/bin/env bash
# Records on a TPU slice of GKE, as a JobSet; prints it with DRY_RUN=1, once flags and files are
# checked here.
#
#   IMAGE=... MODEL=/models/Qwen3.8-27B OUT=gs://bucket/reference launch/gke_jobset.sh
#
# Flags of kernjax.record may follow. Verdicts (1, 2) and bad input (3) are not started again. A host
# that is preempted or dies ends the others; then all start again and go on where they stopped.
set -euo pipefail

NAME=${NAME:-kernjax}
IMAGE=${IMAGE:-kernjax:latest}                # with kernjax[tpu] and this checkout as its workdir
CLAIM=${CLAIM:-models}                        # volume claim with the models, mounted at /models
ACCELERATOR=${ACCELERATOR:-tpu-v5p-slice}
TOPOLOGY=${TOPOLOGY:-2x4x4}                   # in chips
HOSTS=${HOSTS:-8}                             # of four chips each
MODEL=${MODEL:-/models/Qwen3.8-27B}
OUT=${OUT:-gs://bucket/reference}
RECIPE=${RECIPE:-configs/recipes/reference_v5p_32.flags}
CACHE=${CACHE:-gs://bucket/xla}               # compiled programs
PYTHON=${PYTHON:-python3}
RESTARTS=${RESTARTS:-20}

record=("$PYTHON" -m kernjax.record "--flagfile=$RECIPE" "--model=$MODEL" "--out=$OUT" "$@")
command=$("$PYTHON" -c 'import json, sys; print(json.dumps(sys.argv[1:]))' \
    bash launch/host_lost.sh "${record[@]}")
manifest="
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata: {name: $NAME}
spec:
  failurePolicy:
    maxRestarts: $RESTARTS
    rules: [{action: FailJobSet, onJobFailureReasons: [PodFailurePolicy]}]
  replicatedJobs:
  - name: hosts
    template:
      spec:
        parallelism: $HOSTS
        completions: $HOSTS
        backoffLimit: 0
        podFailurePolicy:
          rules: [{action: FailJob, onExitCodes: {operator: In, values: [1, 2, 3]}}]
        template:
          spec:
            restartPolicy: Never
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: $ACCELERATOR
              cloud.google.com/gke-tpu-topology: $TOPOLOGY
            containers:
            - {name: kernjax, image: '$IMAGE', command: $command,
               resources: {limits: {google.com/tpu: 4}},
               env: [{name: JAX_COMPILATION_CACHE_DIR, value: '$CACHE'}],
               volumeMounts: [{name: models, mountPath: /models, readOnly: true}]}
            volumes: [{name: models, persistentVolumeClaim: {claimName: $CLAIM}}]"
if [[ -n ${DRY_RUN:-} ]]; then
    echo "$manifest"
    exec "${record[@]}" --only_check_args
fi
kubectl apply -f - <<<"$manifest"
