#!/bin/sh
# The entry point of the images: runs the doctor, then `lockstep` with the given arguments.
# `engine --model FOLDER ...` starts vLLM with the plugin that lockstep needs (docs/engines.md) instead.
# LOCKSTEP_DOCTOR=warn continues although the doctor found something broken.
set -eu
if [ -n "${CANN_ENV:-}" ]; then
    # shellcheck disable=SC1090
    . "$CANN_ENV"
fi
if ! lockstep doctor --device "${LOCKSTEP_DOCTOR_DEVICE:-cpu}" >&2; then
    if [ "${LOCKSTEP_DOCTOR:-stop}" != warn ]; then
        echo "the doctor found a broken part, see above; LOCKSTEP_DOCTOR=warn continues anyway" >&2
        exit 1
    fi
fi
if [ "${1:-}" != engine ]; then
    exec lockstep "$@"
fi
shift
: "${LOCKSTEP_SERVER_KEY:?set the same value for the engine and for the trainer}"
plugin=$(python -c 'from lockstep.version import PACKAGE_FOLDER; print(PACKAGE_FOLDER / "rollout/servers/plugin")')
export PYTHONPATH="$plugin" VLLM_SERVER_DEV_MODE=1 VLLM_ALLOW_RUNTIME_LORA_UPDATING=1
exec "${ENGINE_PYTHON:-python}" -m vllm.entrypoints.openai.api_server --served-model-name lockstep \
    --logprobs-mode processed_logprobs --generation-config vllm --enable-prefix-caching \
    --worker-extension-cls lockstep_vllm.WeightExtension --middleware lockstep_samples.SampleRoute \
    --scheduler-cls lockstep_scheduler.scheduler "$@"
