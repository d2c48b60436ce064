# For scripts that train, and serve teachers meanwhile: all of these processes end with the script,
# however it ends. Sourced, after lib.sh; uses $python, and $gpus, the number of GPUs to use.
# shellcheck shell=bash disable=SC2154
running=()
grace_s=20 # from SIGTERM to SIGKILL; teachers answer first what they were asked

is_alive() { kill -0 "$1" 2>/dev/null; }

end_all() {
    local pid deadline
    trap '' INT TERM HUP # a second Ctrl-C must not leave a teacher behind
    for pid in ${running[@]+"${running[@]}"}; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    deadline=$((SECONDS + grace_s))
    for pid in ${running[@]+"${running[@]}"}; do
        while is_alive "$pid" && [ "$SECONDS" -lt "$deadline" ]; do
            sleep 0.1
        done
        kill -KILL "$pid" 2>/dev/null || true
    done
    running=()
}
trap end_all EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
trap 'exit 129' HUP

# only_one FOLDER: ends where another run has the folder, until that ends: each would show the other's
# teacher and results as its own. What a killed run leaves behind does not hold it.
only_one() {
    : >>"$1/lock" || die "$1/lock cannot be made; name another folder: EDL_STATE_DIR=DIR $0"
    exec 9>>"$1/lock"
    local status=0
    flock -n 9 || status=$?
    case "$status" in
        0) ;;
        1) die "$1 is another run's: wait until that is over, or name another folder: EDL_STATE_DIR=DIR $0" ;;
        *) die "$1/lock cannot be locked; name a folder on a local disk: EDL_STATE_DIR=DIR $0" ;;
    esac
}

# train PROGRAM OPTIONS...: one training to its end. In the background, as a trap waits for what is in
# front.
train() {
    local status=0
    "$python" "$@" 9>&- &
    running+=("$!")
    wait "$!" || status=$?
    unset 'running[-1]'
    [ "$status" -eq 0 ] || exit "$status"
}

# serve MODEL NUMBER FOLDER: starts a teacher and waits until it is ready; its logs are in FOLDER. Leaves
# its address in $address.
serve() {
    local said="$3/teacher$2.out" log="$3/teacher$2.log" pid device=(--thread 1)
    [ "$gpus" -eq 0 ] || device=(--gpu_ids "$((($2 - 1) % gpus))")
    : >"$said" # the line below reads it at once, perhaps before the teacher's shell has made it
    "$python" -m distill_reader.serve --model "$1" --port 0 "${device[@]}" >"$said" 2>"$log" 9>&- &
    pid=$!
    running+=("$pid")
    address=""
    while [ -z "$address" ]; do
        is_alive "$pid" || { tail -n 15 "$log" >&2; die "the teacher has ended; its log is $log"; }
        sleep 0.1
        address="$(sed -n 's/^teacher ready on \([^ ]*\):.*/\1/p' "$said")"
    done
}

# usable_gpus USE_GPU: prints how many GPUs to use; USE_GPU: what --use_gpu says, perhaps nothing.
usable_gpus() {
    local found
    found="$(gpu_count)" || return
    case "${1,,}" in
        n | no | f | false | off | 0) found=0 ;;
        *) [ "$found" -eq 0 ] || found="$("$python" -c \
            'import paddle; print(paddle.is_compiled_with_cuda() and paddle.device.cuda.device_count() or 0)')" ;;
    esac
    echo "$found"
}

# need_teacher_packages EXTRAS: ends with the remedy where packages of a teacher are missing.
need_teacher_packages() {
    "$python" -c 'import aiohappyeyeballs, aiohttp, google.protobuf, grpc, prometheus_client' 2>/dev/null || die \
        "$python lacks what a teacher needs; in $root: $python -m pip install -e '.[$1]'"
}
