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

# which machines failed, a line for each fault; the launchers write the one that they blame beside it
faults="$$PWD/$$SLURM_JOB_NAME-$$SLURM_JOB_ID.faults"
export MODERNBERT_TRAIN_BLAMED="$$faults.last"

srun $wait--cpus-per-task=$cpus $start
code=$$?

again() {
    trap '' TERM # which a requeue sends here too, and only a job that waits can be told which machines to leave out
    scontrol requeue "$$SLURM_JOB_ID" || exit "$$code"
    # an update replaces the list, in which --exclude of the job stands too
    told=$$(scontrol show job "$$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')
    without=$$({ echo "$$told"; awk '{ print $$2 }' "$$faults"; } | sed '/^$$/d' | sort -u | paste -sd, -)
    [ -z "$$without" ] || scontrol update JobId="$$SLURM_JOB_ID" ExcNodeList="$$without"
    exit 0
}

# 75: saved before the time limit, by the launcher's own clock: Slurm 22.05 signals a requeued job no second time.
# 70, 124, 137: a process, a GPU or a machine was lost. Starts again without the machine that is blamed, $retries times in a
# row. Any other failure stays: bad data (65) or a wrong configuration (78) would only fail again.
case "$$code" in
75)
    echo 75 >> "$$faults"
    again
    ;;
70 | 124 | 137)
    host=$$(cat "$$MODERNBERT_TRAIN_BLAMED" 2> /dev/null)
    echo "$$code $${host%%.*}" >> "$$faults"
    [ "$$(awk '$$1 == 75 { n = 0; next } { n++ } END { print n + 0 }' "$$faults")" -gt $retries ] || again
    ;;
esac
exit "$$code"
