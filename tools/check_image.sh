#!/usr/bin/env bash
# Checks a container image that was built from docker/:  tools/check_image.sh lockstep:cpu [OPTION OF docker run ...]
# Needs a docker daemon. The entry point runs the doctor first, a broken machine stops it, a stopped run is saved and
# resumed, and the files belong to the user who started it.
set -euo pipefail
image=$1
shift
options=(--env LOCKSTEP_DOCTOR_DEVICE=cpu "$@")
volume=$(docker volume create)
name=lockstep-check-$$
log=$(mktemp)
trap 'docker rm --force "$name"; docker volume rm --force "$volume"; rm -f "$log"' EXIT

fail() {
    cat "$log"
    echo "FAILED: $1" >&2
    exit 1
}

# Runs the image; the output goes to $log. The first argument is the expected exit status.
expect() {
    local wanted=$1 got=0
    shift
    docker run --rm "${options[@]}" --volume "$volume:/workspace" "$@" >"$log" 2>&1 || got=$?
    [ "$got" -eq "$wanted" ] || fail "exit status $got instead of $wanted: $*"
}

says() { grep -qE -- "$1" "$log" || fail "the output lacks: $1"; }

expect 0 "$image"
says "nothing broken"
says "Usage"
echo "ok: the doctor, then the help"

expect 0 "$image" quickstart run.steps=2 optim.warmup=1
head -n 1 "$log" | grep -q "^ok " || fail "the doctor was not first"
expect 0 --entrypoint test "$image" -O quickstart
echo "ok: a quickstart in a volume, with files of the image's user"

expect 2 "$image" train nonsense
echo "ok: the exit status of lockstep is the container's"

# A device that is not there breaks the doctor.
expect 1 --env LOCKSTEP_DOCTOR_DEVICE=npu "$image" --version
says "LOCKSTEP_DOCTOR=warn"
expect 0 --env LOCKSTEP_DOCTOR_DEVICE=npu --env LOCKSTEP_DOCTOR=warn "$image" --version
echo "ok: a broken machine stops the container, unless it should only warn"

# `docker stop` is a first Ctrl-C: it finishes the step and saves.
train=(train warmup-arithmetic run.name=stopped)
docker run --detach --name "$name" "${options[@]}" --volume "$volume:/workspace" "$image" \
    "${train[@]}" run.steps=100000 >"$log"
until docker logs "$name" 2>&1 | grep -q "^step  *1/"; do
    sleep 1
    docker logs "$name" >"$log" 2>&1
    [ "$(docker inspect --format '{{.State.Running}}' "$name")" = true ] || fail "the run ended by itself"
done
docker stop --time 300 "$name" >"$log"
status=$(docker wait "$name")
docker logs "$name" >"$log" 2>&1
docker rm "$name" >/dev/null
[ "$status" -eq 130 ] || fail "exit status $status instead of 130 after docker stop"
says "saved a checkpoint; run the same command to resume"
echo "ok: docker stop saves the run"

# A signal while the doctor runs ends the container at once.
docker run --detach --name "$name" "${options[@]}" "$image" "${train[@]}" >"$log"
docker kill --signal TERM "$name" >"$log"
status=$(docker wait "$name")
docker logs "$name" >"$log" 2>&1
[ "$status" -eq 143 ] || fail "exit status $status instead of 143 after SIGTERM"
echo "ok: a signal ends the doctor"
