#!/usr/bin/env bash
# One training run on a GKE cluster that xpk made, as one workload. IMAGE holds this checkout in its
# working directory with everything installed; /runs is a volume that all pods share.
#
#   CLUSTER=my-cluster TYPE=v5litepod-16 IMAGE=region-docker.pkg.dev/project/repo/trm_jax \
#     ./xpk.sh first --mesh 16,1 --prompts 32
#
# The first argument names the run, the rest goes to experiments.train_policy. A run that was stopped
# continues: --resume is always passed. DRY_RUN=1 prints the command only.
set -euo pipefail
: "${CLUSTER:?set CLUSTER to the cluster}" "${TYPE:?set TYPE to the TPU type}"
: "${IMAGE:?set IMAGE to the container image}"
name=${1:?the first argument is a name for the run}
shift

printf -v arguments ' %q' "$@"
# A run that was stopped has ended well for itself; only one that is done has drawn its figure.
command="python -m experiments.train_policy --distributed --directory /runs/$name --resume$arguments"
line=(
  xpk workload create --cluster="$CLUSTER" --workload="$name" --tpu-type="$TYPE" --num-slices=1
  --docker-image="$IMAGE" --max-restarts=20
  --command="$command && test -e /runs/$name/figure.png"
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${line[@]}" && echo
else
  exec "${line[@]}"
fi
