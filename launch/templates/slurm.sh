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

# one line per fault with the machine that failed; the launchers write the machine that they blame to FAULTS.last
faults="$$PWD/$$SLURM_JOB_NAME-$$SLURM_JOB_ID.faults"
export MODERNBERT_TRAIN_BLAMED="$$faults.last"

srun $wait--cpus-per-task=$cpus $start
code=$$?

again() {
    trap '' TERM # scontrol requeue sends it here too; only a pending job accepts a list of excluded machines
    scontrol requeue "$$SLURM_JOB_ID" || exit "$$code"
    # an update replaces the whole list, which includes the job's --exclude
    excluded=$$(scontrol show job "$$SLURM_JOB_ID" | sed -n 's/.*ExcNodeList=\([^ (]*\).*/\1/p')
    without=$$({ echo "$$excluded"; awk '{ print $$2 }' "$$faults"; } | sed '/^$$/d' | sort -u | paste -sd, -)
    [ -z "$$without" ] || scontrol update JobId="$$SLURM_JOB_ID" ExcNodeList="$$without"
    exit 0
}

# 75: saved before the time limit, by the launcher's clock, since Slurm 22.05 does not signal a requeued job again.
# 70, 124, 137: a process, a GPU or a machine was lost. Requeue without the blamed machine, at most $retries times in a
# row. Other failures are final: bad data (65) or a wrong configuration (78) would fail again.
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
