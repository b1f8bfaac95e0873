#!/bin/bash
# A run on a Ray cluster, submitted as a job. RAY_ADDRESS is the address of the dashboard:
#
#   RAY_ADDRESS=http://head:8265 DEVICES=16 examples/cluster/ray-job.sh recipe.yaml run.folder=/shared/runs
#
# Ray copies the current folder to the nodes (at most 500 MB, without the files that .gitignore names), so paths of the
# recipe may be relative to it. run.folder must be absolute and on a disk that all nodes share.
# If the job is lost with its node, submit it again: the run resumes from its last checkpoint.
set -eu
: "${RAY_ADDRESS:?set RAY_ADDRESS to the address of the dashboard, http://HOST:8265}"
exec ray job submit --address "$RAY_ADDRESS" --working-dir "${FOLDER:-.}" -- \
    lockstep train "$@" parallel.launcher=ray "parallel.devices=${DEVICES:-8}" \
    "parallel.max_restarts=${MAX_RESTARTS:-3}"
