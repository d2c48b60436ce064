# Shared by the scripts of this folder, which source it; `root` is the repository.
# shellcheck shell=bash
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

say() { printf '%s\n' "$*" >&2; }
die() { say "$@"; exit 1; }
usage_error() { say "$@"; exit 2; }

# Prints the first Python that this project runs on: $PYTHON, else one from PATH.
find_python() {
    local candidate
    for candidate in ${PYTHON:+"$PYTHON"} python3 python3.11 python3.12 python3.13; do
        if "$candidate" -c 'import sys; raise SystemExit(not (3, 11) <= sys.version_info < (3, 14))' \
            >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    die "No Python 3.11 to 3.13 found; install one (Debian: sudo apt-get install python3 python3-venv)," \
        "or name it: PYTHON=/path/to/python3.11 $0"
}

# Prints how many NVIDIA GPUs the driver shows; 0 without a driver. Ends where the driver fails: what is
# started would use the CPU in place of the GPUs.
gpu_count() {
    local listed="" status=0
    if [ -z "${EDL_NO_GPU:-}" ] && command -v nvidia-smi >/dev/null 2>&1; then
        listed="$(nvidia-smi --list-gpus 2>&1)" || status=$?
    fi
    case "$status" in
        0) grep -c '^GPU' <<<"$listed" || true ;;
        9 | 12) echo 0 ;; # its codes for no driver, and no library of one
        *) die "nvidia-smi fails: $listed; see to the driver (after an update of it a reboot helps), or use the" \
            "CPU: EDL_NO_GPU=1 $0" ;;
    esac
}

# Runs a command, its output in a log that is shown only if it fails. On a terminal, one line
# tells what it is at.
quietly() {
    local what="$1" log="$2" pid status=0 start=$SECONDS
    shift 2
    "$@" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM
    if [ -t 2 ]; then
        while kill -0 "$pid" 2>/dev/null; do
            printf '\r\033[K  %s  %ds  %s' "$what" "$((SECONDS - start))" \
                "$(tail -n 1 "$log" 2>/dev/null | tr -d '\r' | cut -c 1-50)" >&2
            sleep 0.3
        done
        printf '\r\033[K' >&2
    else
        say "  $what"
    fi
    wait "$pid" || status=$?
    trap - INT TERM
    if [ "$status" -ne 0 ]; then
        tail -n 25 "$log" >&2
        say "$what: failed with exit code $status; all of it is in $log"
    fi
    return "$status"
}

# Prints the line for a .pth file that lends the packages of another Python ($1) to ours.
borrow_line() {
    "$1" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))'
}

# Whether .venv is as ensure_venv, whose variables it uses, would make it.
venv_fits() {
    local stamp made_from place
    for stamp in "${stamps[@]}"; do
        { read -r made_from && read -r place; } 2>/dev/null <"$stamp" || continue
        # The place counts: in a folder that was copied with its .venv, that runs the code of the first one.
        if [ -x "$python" ] && [ "$made_from" = "$digest" ] && [ "$place" -ef "$root" ]; then
            return 0
        fi
    done
    return 1
}

# Makes $root/.venv with these extras of pyproject.toml ($1) and a framework ($2: paddle, unless told
# torch), once: a stamp holds the digest of what it was made from, and where. "dev" contains all that
# "examples" needs, and both frameworks. What is in .venv already and fits is left there.
# Leaves the interpreter in $python.
ensure_venv() {
    local extras="$1" framework="${2:-paddle}" venv="$root/.venv" digest made stamps log base="" size="about 250 MB"
    local waits=0 site=""
    python="$venv/bin/python"
    made="$venv/.made-for-$extras"
    if [ "$framework" = torch ]; then
        made="$made-torch" size="with PyTorch as pip finds it: for CUDA some GB"
    fi
    digest="$(cat "$root/pyproject.toml" "$root/setup.py" "${BASH_SOURCE[0]}" | sha256sum | cut -d ' ' -f 1)"
    log="$venv/install.log"
    stamps=("$venv/.made-for-dev" "$made")
    if venv_fits; then
        return
    fi

    base="$(find_python)"
    "$base" -c 'import ensurepip, venv' >/dev/null 2>&1 || die \
        "$base cannot make virtual environments; on Debian or Ubuntu: sudo apt-get install python3-venv"
    # Of two at once one would delete what the other installs, or write over it.
    if { exec 8>>"$venv.lock"; } 2>/dev/null; then
        flock -n 8 2>/dev/null || waits=$?
        if [ "$waits" -eq 1 ]; then # else the file system has no locks
            say "  Another one installs into .venv; waiting for it."
            flock 8
        fi
        if venv_fits; then
            exec 8>&-
            return
        fi
    fi
    if [ ! -x "$python" ] || ! "$python" -c '' 2>/dev/null; then
        rm -rf "$venv"
        "$base" -m venv "$venv" || die "$venv could not be made; is the disk full or read-only?"
    fi
    : >"$log" || die "$venv is not made for this version of EDL, and user $(id -un 2>/dev/null || id -u) cannot" \
        "write it: have its owner call $0 once, or use a copy of $root of your own"
    # As a whole word: what was taken back from a copy of the disk has /backup$venv.
    if [ -e "$venv/bin/activate" ] && ! grep -qwF "$venv" "$venv/bin/activate"; then # it was moved
        if grep -q 'site-packages = true' "$venv/pyvenv.cfg"; then site=--system-site-packages; fi
        "$python" -m venv ${site:+"$site"} "$venv" || die "$venv is that of another folder, and cannot be" \
            "mended; remove it"
    fi
    rm -f "$made"
    # It is not there where the making of .venv was cut off, or where uv has made it.
    "$python" -c 'import pip' 2>/dev/null || "$python" -m ensurepip >>"$log" 2>&1 || true
    if [ "$framework" = paddle ] && [ "$( (gpu_count) 2>/dev/null || echo 0)" -gt 0 ]; then
        if "$python" "$root/scripts/gpu_check.py" paddle >/dev/null 2>&1; then
            framework=gpu
        elif "$base" "$root/scripts/gpu_check.py" paddle >/dev/null 2>&1; then
            say "  $base has a Paddle that runs on this GPU: it is used."
            borrow_line "$base" >"$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/borrowed.pth"
            framework=gpu
        fi
    fi
    quietly "Installing EDL and what it needs into .venv, once ($size, a minute or two)" "$log" \
        "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off \
        --editable "${root}[$framework,$extras]" || exit 1
    printf '%s\n%s\n' "$digest" "$root" >"$made"
    exec 8>&-
}

# For programs that need EDL but no test tools: $EDL_PYTHON, else .venv, else the caller's Python
# where EDL is installed in it, else .venv made now. Leaves the interpreter in $python.
ensure_python() {
    python="${EDL_PYTHON:-}"
    if [ -n "$python" ]; then
        return
    fi
    if [ ! -d "$root/.venv" ] && python="$(command -v python3)" &&
        (cd / && "$python" -c 'import job_server.server.app, job_client, pod_runtime' 2>/dev/null); then
        return
    fi
    ensure_venv examples
}
