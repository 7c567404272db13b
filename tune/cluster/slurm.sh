#!/bin/bash
# A sweep on several nodes of a SLURM cluster:
#
#   sbatch tune/cluster/slurm.sh sweep=rho data=fashion_mnist sweep.resources.gpu=0.5 tracking.uri=http://HOST:5000
#   sbatch tune/cluster/slurm.sh --resume SWEEP_ID --uri http://HOST:5000
#
# Submit it from a folder that all nodes see: relative paths count from there. FL_VENV names the virtual environment with
# fl-lightning, in a folder that all nodes see as well; without it the one that was active at `sbatch` is used.
#
#SBATCH --job-name=fl-sweep
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=1
#SBATCH --time=08:00:00
#SBATCH --output=fl-sweep-%j.log
# A node that fails does not end the job: its trials go on elsewhere.
#SBATCH --no-kill
# Two minutes before the time is up the sweep is told to stop; --resume then goes on in another job.
#SBATCH --signal=B:TERM@120

set -euo pipefail

START_SECONDS=${START_SECONDS:-300} # how long the nodes may take to come up

if [ -n "${FL_VENV:-}" ]; then
  . "$FL_VENV/bin/activate"
fi
command -v fl-lightning >/dev/null || {
  echo "fl-lightning is not on the PATH of $(hostname): set FL_VENV to its virtual environment" >&2
  exit 2
}

# Other users share the network: only who has this job's token may use its Ray.
export RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN
unset RAY_ADDRESS

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]} # this script runs there
ip=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
port=$((20000 + SLURM_JOB_ID % 20000)) # two jobs on one node must not meet
address=$ip:$port

steps=()
cleanup() {
  trap - EXIT
  if [ ${#steps[@]} -gt 0 ]; then
    kill -TERM "${steps[@]}" 2>/dev/null || true # srun passes it on, and Ray ends all that it started
    wait "${steps[@]}" 2>/dev/null || true
  fi
  rm -rf "/tmp/fl-ray-$SLURM_JOB_ID"
}
trap cleanup EXIT

# One step per node, so that the end of one does not end the others. The number of GPUs is that of each node.
on_node() {
  local node=$1
  shift
  srun --nodes=1 --ntasks=1 --nodelist="$node" bash -c \
    'exec ray start --block --disable-usage-stats --num-cpus="${SLURM_CPUS_PER_TASK:-1}" \
      --num-gpus="${SLURM_GPUS_ON_NODE:-0}" "$@"' ray "$@" >"$logs/$node.log" 2>&1 &
  steps+=($!)
}

logs=fl-sweep-$SLURM_JOB_ID.nodes
mkdir -p "$logs"

# A socket's path may have 107 characters, and Ray puts 70 behind this folder.
on_node "$head" --head --node-ip-address="$ip" --port="$port" --include-dashboard=false \
  --temp-dir="/tmp/fl-ray-$SLURM_JOB_ID"

deadline=$((SECONDS + START_SECONDS))
until (: >"/dev/tcp/$ip/$port") 2>/dev/null; do
  if [ $SECONDS -gt $deadline ]; then
    echo "Ray's head did not come up on $head in $START_SECONDS s; see $logs/$head.log" >&2
    exit 1
  fi
  sleep 1
done
for node in "${nodes[@]:1}"; do
  on_node "$node" --address="$address"
done

echo "waiting for ${#nodes[@]} nodes at $address"
python - "$address" "${#nodes[@]}" $((deadline - SECONDS)) <<'PY'
import logging, sys, time

import ray

address, wanted, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
ray.init(address=address, log_to_driver=False, logging_level=logging.CRITICAL)
deadline = time.monotonic() + seconds
while (there := sum(node["Alive"] for node in ray.nodes())) < wanted:
    if time.monotonic() > deadline:
        sys.exit(f"only {there} of {wanted} nodes came up; see the logs of the others")
    time.sleep(1)
PY

# In the background, for bash runs a trap only between commands: SLURM's signal must reach the sweep at once.
fl-lightning sweep "$@" ray.address="$address" &
sweep=$!
trap 'kill -TERM $sweep 2>/dev/null || true' TERM INT
code=0
wait $sweep || code=$?
while kill -0 $sweep 2>/dev/null; do # the signal ended the waiting, not the sweep
  code=0
  wait $sweep || code=$?
done
exit $code
