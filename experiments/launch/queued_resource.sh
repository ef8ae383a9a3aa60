#!/usr/bin/env bash
# Asks for a TPU VM slice that may come later, and waits until it is there. Then see tpu_vm.sh.
#
#   TPU=my-slice ZONE=us-west4-a TYPE=v5litepod-16 RUNTIME=v2-alpha-tpuv5-lite ./queued_resource.sh
#
# Further arguments go to gcloud, for example --spot. DRY_RUN=1 prints the commands only.
set -euo pipefail
: "${TPU:?set TPU to a name for the slice}" "${ZONE:?set ZONE to a zone}"
: "${TYPE:?set TYPE to an accelerator type}" "${RUNTIME:?set RUNTIME to a runtime version}"

create=(
  gcloud compute tpus queued-resources create "$TPU-request" --node-id="$TPU" --zone="$ZONE"
  --accelerator-type="$TYPE" --runtime-version="$RUNTIME" "$@"
)
describe=(
  gcloud compute tpus queued-resources describe "$TPU-request" --zone="$ZONE"
  --format='value(state.state)'
)
if [[ -n ${DRY_RUN:-} ]]; then
  printf '%q ' "${create[@]}" && echo
  printf '%q ' "${describe[@]}" && echo
  exit
fi
"${create[@]}"
while state=$("${describe[@]}"); [[ $state != ACTIVE ]]; do
  if [[ $state == FAILED || $state == SUSPENDED ]]; then
    echo "error: the request for $TPU is $state" >&2
    exit 1
  fi
  echo "$TPU: $state"
  sleep 30
done
