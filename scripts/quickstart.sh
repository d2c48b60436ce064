#!/usr/bin/env bash
# Watch a training go on while pods leave, join and are killed. Installs into .venv on the first run.
# Options go to quickstart.py: --model resnet50, --pods N, --epochs N, --device cpu, --help.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
ensure_venv examples
exec "$python" "$root/scripts/quickstart.py" "$@"
