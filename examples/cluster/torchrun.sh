#!/bin/bash
# A run on two nodes with torchrun. Start it on every node, with the name or address of the first node as HEAD:
#
#   HEAD=node0 NODES=2 DEVICES=8 examples/cluster/torchrun.sh recipe.yaml run.folder=/shared/runs
#
# Every node needs the recipe, its data and run.folder at the same path, for example on a shared disk.
set -eu
: "${HEAD:?set HEAD to the name or address of the first node}"
name=${NAME:-lockstep}

# One log file per rank, in LOGS/<id>/attempt_<n>/<local rank>/; rank 0 of each node is also shown here.
# torchrun restarts all ranks after a failure, up to MAX_RESTARTS times; the run resumes from its last checkpoint.
exec torchrun --nnodes "${NODES:-2}" --nproc-per-node "${DEVICES:-8}" \
    --rdzv-id "$name" --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" \
    --max-restarts "${MAX_RESTARTS:-3}" --log-dir "${LOGS:-logs}" --redirects 3 --tee 0:3 \
    -m lockstep train "$@"
