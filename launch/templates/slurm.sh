#!/bin/bash
#SBATCH --job-name=$name
#SBATCH --nodes=$nodes
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=$cpus
#SBATCH --gpus-per-node=$gpus
#SBATCH --mem=${memory_gib}G
#SBATCH --time=$minutes
#SBATCH --partition=$partition
#SBATCH --account=$account
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
$own

cd $folder || exit 74
$setup

srun --cpus-per-task=$cpus $start
code=$$?

# 75: saved before the time limit, by launch/run.py's own clock: Slurm 22.05 signals a requeued job no second time.
# Any other failure stays: bad data (65) or a wrong configuration (78) would only fail again.
if [ "$$code" -eq 75 ]; then
    scontrol requeue "$$SLURM_JOB_ID" && exit 0
fi
exit "$$code"
