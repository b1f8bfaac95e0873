#!/bin/sh
# The entry point of the images: runs the doctor, then `lockstep` with the given arguments.
# `engine --model FOLDER ...` starts vLLM with the plugin that lockstep needs (docs/engines.md) instead.
# LOCKSTEP_DOCTOR=warn continues although the doctor found something broken.
set -eu
if [ -n "${CANN_ENV:-}" ]; then
    # CANN's script reads variables that may have no value.
    set +u
    # shellcheck disable=SC1090
    . "$CANN_ENV"
    set -u
fi
# The doctor runs in the background, because a shell that waits for a command in front handles a signal only afterwards.
# The traps are set before: a signal may come as soon as the doctor runs.
trap 'kill ${!:-} || :; exit 130' INT
trap 'kill ${!:-} || :; exit 143' TERM
lockstep doctor --device "${LOCKSTEP_DOCTOR_DEVICE:-cpu}" >&2 &
if ! wait "$!" && [ "${LOCKSTEP_DOCTOR:-stop}" != warn ]; then
    echo "the doctor found a broken part, see above; LOCKSTEP_DOCTOR=warn continues anyway" >&2
    exit 1
fi
trap - INT TERM
if [ "${1:-}" != engine ]; then
    exec lockstep "$@"
fi
shift
: "${LOCKSTEP_SERVER_KEY:?set the same value for the engine and for the trainer}"
plugin=$(python -c 'from lockstep.version import PACKAGE_FOLDER; print(PACKAGE_FOLDER / "rollout/servers/plugin")')
# CANN_ENV sets PYTHONPATH too.
export PYTHONPATH="$plugin${PYTHONPATH:+:$PYTHONPATH}" VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
exec "${ENGINE_PYTHON:-python}" -m vllm.entrypoints.openai.api_server --served-model-name lockstep \
    --logprobs-mode processed_logprobs --generation-config vllm --enable-prefix-caching \
    --worker-extension-cls lockstep_vllm.WeightExtension --middleware lockstep_samples.SampleRoute \
    --scheduler-cls lockstep_scheduler.scheduler "$@"
