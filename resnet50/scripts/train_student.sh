#!/usr/bin/env bash
# A student of teachers that are served, alone or as a pod: ResNet50_vd on ImageNet by the published
# recipe, or on handwritten digits where there is no ImageNet. Arguments go to train_with_fleet.py.
#   scripts/train_student.sh --distill_teachers=HOST:PORT,HOST:PORT
#   ../scripts/start_job_client.sh --package_sh ./package.sh ./scripts/train_student.sh    elastic
# Without --distill_teachers and the variables PADDLE_DISTILL_*, the teacher of start_local_teacher.sh.
#   PADDLE_EDL_IMAGENET_PATH            the folder with train.txt and val.txt, or train/ and val/
#   PADDLE_EDL_FLEET_CHECKPOINT_PATH    folder or URL of the checkpoints
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

if [ -n "${PADDLE_EDL_IMAGENET_PATH:-}" ]; then
    export EDL_RECIPE=recipes/resnet50_vd_distilled.sh
else
    export EDL_RECIPE=recipes/digits_distilled.sh
fi
teachers=()
case " $* " in
    *" --distill_teachers"* | *" --distill_discovery"*) ;;
    *) [ -n "${PADDLE_DISTILL_BALANCE_SERVER:-}" ] || teachers=(--distill_teachers=127.0.0.1:9898) ;;
esac
# `exec` only where it does so, too: see there.
[ -n "${PADDLE_JOBSERVER:-}" ] || exec "$here/train_pretrain.sh" ${teachers[@]+"${teachers[@]}"} "$@"
"$here/train_pretrain.sh" ${teachers[@]+"${teachers[@]}"} "$@"
exit $?
