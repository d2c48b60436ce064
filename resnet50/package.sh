#!/usr/bin/env bash
# Make a pod's folder: ./package.sh -pod_id ID. The job client calls it so, with EDL_POD_FOLDER, the
# folder that it wants; by hand that is $pod_path/ID, or ./resnet50_pod/ID. The pod then runs
# train_pretrain.sh in it, from code that no later edit of this folder touches.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

usage() {
    echo "package.sh: $1; usage: package.sh -pod_id ID" >&2
    exit 2
}

pod_id=""
while [ $# -gt 0 ]; do
    case "$1" in
        -pod_id | --pod_id)
            [ $# -ge 2 ] || usage "$1: its value is missing"
            pod_id="$2"
            shift 2
            ;;
        *) usage "$1: unknown argument" ;;
    esac
done
case "$pod_id" in
    "") usage "-pod_id: missing" ;;
    */* | . | ..) usage "-pod_id: '$pod_id' is no name of a folder" ;;
esac

folder="${EDL_POD_FOLDER:-${pod_path:-resnet50_pod}/$pod_id}"
mkdir -p "$folder"
# By name: what a training has left here (logs, checkpoints, pods) stays where it is.
cp -r "$here"/*.py "$here"/*.sh "$here/recipes" "$here/scripts" "$folder/"
