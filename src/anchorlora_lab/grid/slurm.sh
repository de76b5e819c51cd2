#!/bin/bash
#SBATCH --requeue --open-mode=append --output=/dev/null --signal=B:USR1@180
# Written by anchorlora: each task of an array carries out a run, by its number.
#
# It passes signals on to the run and waits for it; 180 seconds before the time limit Slurm sends USR1. A signal that comes before the
# run can handle it, while Python starts, counts as an interruption as well. What the run printed, and why it failed, is written where
# grid/folder.py says.
#
#     0     the run is finished                75    it was interrupted, and requeues its task
#     1     it failed                          2     this node does not see the folder

runs=@RUNS@
take() {
  case $1 in
@CASES@
  *) return 1 ;;
  esac
}

asked= child=
stop() { asked=yes; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null; }
trap stop TERM INT USR1

carry_out() {
  take "$1" || { echo "error: there is no run number $1" >&2; return 1; }
  [ ! -e "$folder/record.json" ] || return 0
  here=$runs/$name
  rm -f "$here.failed"
  "${words[@]}" > "$here.txt" 2>&1 &
  child=$!
  [ -z "$asked" ] || stop
  while wait "$child"; status=$?; kill -0 "$child" 2>/dev/null; do :; done  # a trap ends `wait` early
  wait "$child"; status=$?
  child=
  [ "$status" -ne 0 ] || return 0
  [ "$status" -ne 75 ] || return 75
  if [ "$status" -gt 128 ]; then  # a signal ended it: ours, before Python could handle it, or somebody's
    [ -z "$asked" ] || return 75
    [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || return 75
  fi
  reason=$(grep -v '^[[:space:]]*$' "$here.txt" | tail -n 1)
  printf 'exit status %s: %s\n' "$status" "${reason#error: }" > "$here.failed"
  return 1
}

cd @HERE@ 2>/dev/null
job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_ON_NODE:-1}}
for _ in 1 2 3 4 5 6 7 8 9 10; do [ -e "$runs/@ARRAY@.json" ] || sleep 1; done  # shared storage may take a moment
if [ ! -e "$runs/@ARRAY@.json" ]; then  # say so where the submitter can see it
  scontrol requeuehold State=SpecialExit "$job"
  exit 2
fi
carry_out "$SLURM_ARRAY_TASK_ID"
status=$?
if [ $status = 75 ] && [ "$(squeue -h -j "$job" -o %T)" = RUNNING ]; then  # and not cancelled
  scontrol requeue "$job"
fi
exit $status
