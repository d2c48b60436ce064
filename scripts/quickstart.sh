#!/usr/bin/env bash
# Watch a training go on while pods leave, join and are killed. Installs into .venv on the first run.
# Options go to quickstart.py: --framework torch, --model resnet50, --pods N, --epochs N, --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
framework=paddle
case " $* " in *" --framework torch "* | *" --framework=torch "*) framework=torch ;; esac
ensure_venv examples "$framework"
exec "$python" "$root/scripts/quickstart.py" "$@"
