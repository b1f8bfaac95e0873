"""What lockstep adds to vLLM's workers (`--worker-extension-cls lockstep_vllm.WeightExtension`): weights from files.

Runs in the server's Python, which need not have lockstep: it imports torch, safetensors and vLLM alone. Each method is
called by `/collective_rpc`, takes one JSON text and answers with a dict; what goes wrong is told under `error`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from safetensors import safe_open

# What vLLM's own name for fresh weights would be taken for another run's.
FRESH = "as started"


def _told(work: Callable[..., dict[str, Any]]) -> Callable[[Any, str], dict[str, Any]]:
    """An exception in a worker would reach the caller as a bare failure, without why."""

    def method(self: Any, told: str = "{}") -> dict[str, Any]:
        try:
            return work(self, **json.loads(told))
        except Exception as error:  # noqa: BLE001 - told to the run, which ends
            return {"error": f"{type(error).__name__}: {error}"[:2000]}

    return method


class WeightExtension:
    """Mixed into the worker class: `self` is a vLLM worker."""

    @_told
    def lockstep_facts(self) -> dict[str, Any]:
        import vllm

        config = self.vllm_config.model_config  # type: ignore[attr-defined]
        return {
            "version": vllm.__version__,
            "vocabulary": config.get_vocab_size(),
            "longest": config.max_model_len,
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "quantization": config.quantization,
        }

    @_told
    def lockstep_version(self, version: str | None = None) -> dict[str, Any]:
        """Set it where one is given."""
        if version is not None:
            self._lockstep_version = version
        return {"version": getattr(self, "_lockstep_version", FRESH)}

    @_told
    def lockstep_load(self, files: list[str], names: list[str]) -> dict[str, Any]:
        """Take all weights of the model from safetensors files in the names of its checkpoint."""
        found = _names_in(files)
        _refuse_other_names(found, names)
        # Half-new weights must not pass for the ones before.
        self._lockstep_version = "incomplete"
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        loaded = _recorded(model, lambda: self.reload_weights(weights_iterator=_tensors(files)))  # type: ignore[attr-defined]
        _refuse_left_out(model, loaded)
        _repack_heads(model)
        return {"loaded": len(found)}


def _names_in(files: list[str]) -> list[str]:
    names = []
    for file in files:
        with safe_open(file, framework="pt") as opened:
            names += list(opened.keys())
    return names


def _tensors(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_tensor(name)


def _refuse_other_names(found: list[str], names: list[str]) -> None:
    missing, extra = sorted(set(names) - set(found)), sorted(set(found) - set(names))
    if missing or extra or len(found) != len(set(found)):
        raise ValueError(f"the files do not hold what was announced: missing {missing[:5]}, too many {extra[:5]}")


def _recorded(model: Any, reload: Callable[[], None]) -> set[str] | None:
    """The names of what `model.load_weights` took while `reload` ran: vLLM only warns of what it did not."""
    taken: list[set[str] | None] = []
    load = model.load_weights

    def recording(weights: Any) -> Any:
        taken.append(load(weights))
        return taken[-1]

    model.load_weights = recording
    try:
        reload()
    finally:
        del model.load_weights
    return None if not taken or taken[0] is None else set(taken[0])


def _refuse_left_out(model: Any, loaded: set[str] | None) -> None:
    if loaded is None:
        return
    left = sorted({name.replace(".base_layer.", ".") for name, _ in model.named_parameters()} - loaded)
    if left:
        raise ValueError(f"{len(left)} parameters of the engine got no new value, such as {left[:5]}")


def _repack_heads(model: Any) -> None:
    """On a CPU vLLM computes logits with a packed copy of the head, which reloading a tied embedding leaves as it was.
    On other devices this does nothing."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
