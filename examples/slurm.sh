#!/bin/sh
# One server and eight workers on as many nodes as Slurm finds: sbatch examples/slurm.sh --model cnn --epochs 6
# Task 0 serves, the others are workers; nothing more is to be said. With --strategy allreduce all nine are workers.
#SBATCH --job-name=paceline
#SBATCH --ntasks=9
#SBATCH --cpus-per-task=4
#SBATCH --time=02:00:00
#SBATCH --signal=TERM@120
# runs/ must be on a file system that all nodes share. A task that dies does not end the others (--kill-on-bad-exit=0);
# two minutes before the time is over the server is told to save (--signal), and 'paceline resume' goes on from there.
set -eu
exec srun --kill-on-bad-exit=0 paceline train --strategy async --runs "${RUNS:-runs}" "$@"
