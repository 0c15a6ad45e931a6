#!/bin/bash
# A run on the nodes of a Slurm job; what stands after the script's name goes to learner.main:
#
#   export RAY_AUTH_MODE=token; ray get-auth-token --generate      # once; the home folder is on every node
#   sbatch examples/clusters/slurm.sh --config my.yaml output_dir=/shared/runs name=my-run
#
# Submitted again, or put back in the queue by Slurm, it goes on from the run's last checkpoint.
#SBATCH --job-name=gleaner
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --time=24:00:00
#SBATCH --requeue
# --exclusive, because `ray symmetric-run` ends every Ray of a node when the command has ended; --mem=0: all of a node's.
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head --lines=1)
export RAY_AUTH_MODE=token
export RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT=600 # seconds; Ray's 30 are short for an environment on a shared disk
srun ray symmetric-run --address "$head:6379" --min-nodes "$SLURM_JOB_NUM_NODES" -- \
    python -m learner.main cluster.address="$head:6379" "$@"
