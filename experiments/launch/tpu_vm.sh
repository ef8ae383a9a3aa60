#!/usr/bin/env bash
# One training run on all hosts of a TPU VM slice. Needs gcloud and a checkout with its environment
# on every host (README.md). Everything after the script's name goes to experiments.train_policy:
#
#   TPU=my-slice ZONE=us-west4-a ./tpu_vm.sh --directory /mnt/runs/first --mesh 16,1 --prompts 32
#
# CHECKOUT (trm_jax) is the checkout on the hosts; DRY_RUN=1 prints the command only.
set -euo pipefail
: "${TPU:?set TPU to the name of the slice}" "${ZONE:?set ZONE to its zone}"

printf -v arguments ' %q' "$@"
line=(
  gcloud compute tpus tpu-vm ssh "$TPU" --zone="$ZONE" --worker=all
  --command="cd ${CHECKOUT:-trm_jax} && .venv/bin/python -m experiments.train_policy --distributed$arguments"
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${line[@]}" && echo
else
  exec "${line[@]}"
fi
