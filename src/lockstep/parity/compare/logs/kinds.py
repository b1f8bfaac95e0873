"""The kinds of logs by name, and what is known of all logs of a kind."""

from __future__ import annotations

from collections.abc import Mapping

RUN, VERL_CONSOLE, VERL_FILE = "lockstep run", "verl console", "verl file logger"
RECORDING = "lockstep recording"
OPENRLHF, DEEPSPEED = "OpenRLHF console", "DeepSpeed console"
MEGATRON, MINDSPEED_RL = "Megatron console", "MindSpeed-RL console"
TRAINER_STATE, LLAMA_FACTORY, SWIFT = "transformers trainer state", "LLaMA-Factory log", "ms-swift log"
TENSORBOARD_CSV = "tensorboard csv"
SWANLAB, MSPROBE = "SwanLab", "msprobe"

OWN_NAMES = (RUN, VERL_CONSOLE, VERL_FILE)
_EVERY_STEP = (RUN, RECORDING, VERL_CONSOLE, VERL_FILE, OPENRLHF, DEEPSPEED, MINDSPEED_RL, MSPROBE)

# Where transformers' Trainer logs every so many steps, values are means since the log before, but for these.
_OF_THE_STEP = {"grad_norm", "learning_rate", "lr", "epoch", "num_tokens", "num_input_tokens_seen", "total_flos"}
_OF_THE_STEP |= {"throughput", "total_tokens", "vram_allocated", "vram_reserved", "memory(GiB)", "MFU"}
_NOT_OF_THE_INTERVAL = ("eval_", "predict_", "train_")
# In a line of Megatron these alone are means.
_TIMED = ("elapsed time per iteration", "throughput per GPU")


def interval_means(kind: str, written: Mapping[str, str]) -> frozenset[str] | None:
    """Which metrics (our names) are means over the steps since the log before; None where the kind does not tell."""
    if kind in _EVERY_STEP:
        return frozenset()
    if kind in (TRAINER_STATE, LLAMA_FACTORY, SWIFT):
        return frozenset(
            ours
            for ours, name in written.items()
            if name not in _OF_THE_STEP and not name.startswith(_NOT_OF_THE_INTERVAL)
        )
    if kind == MEGATRON:
        return frozenset(
            ours
            for ours, name in written.items()
            if name.startswith(_TIMED) or (name.endswith("loss") and not name.startswith(("eval/", "test/")))
        )
    return None
