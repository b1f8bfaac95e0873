#!/bin/bash
# A run on two nodes of a SLURM cluster, one task per device:
#
#   sbatch examples/cluster/slurm.sh recipe.yaml run.folder=/shared/runs
#
# Edit the numbers below. The recipe, its data and run.folder must be on a disk that all nodes share.
#SBATCH --job-name=lockstep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=lockstep-%j.log
# Two minutes before the time limit every rank gets SIGINT: the run saves a checkpoint and ends with status 130.
#SBATCH --signal=INT@120
set -u

# One log file per rank. A failed rank ends the others.
srun --kill-on-bad-exit=1 --output="lockstep-%j-rank_%t.log" --open-mode=append lockstep train "$@"
status=$?

# 130: the time limit is near. 75: a rank has stalled or was lost. The run then resumes from its last checkpoint.
if [ "$status" -eq 130 ] || [ "$status" -eq 75 ]; then
    echo "lockstep ended with status $status after start $((${SLURM_RESTART_COUNT:-0} + 1))"
    if [ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_REQUEUES:-10}" ]; then
        scontrol requeue "$SLURM_JOB_ID" && exit 0
    fi
fi
exit "$status"
