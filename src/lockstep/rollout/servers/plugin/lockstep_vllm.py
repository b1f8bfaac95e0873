"""What lockstep adds to vLLM's workers (`--worker-extension-cls lockstep_vllm.WeightExtension`): weights from files, by
a collective of the run and all workers, or from the memory that they are in.

Runs in the server's Python, which need not have lockstep: it imports torch, safetensors, vLLM and the files beside it
alone. Each method is called by `/collective_rpc`, takes one JSON text and answers with a dict; what goes wrong is told
under `error`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lockstep_group import Arriving, bit_sum, left, met  # type: ignore[import-not-found]
from lockstep_shared import opened  # type: ignore[import-not-found]
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
        adapters = self.vllm_config.lora_config  # type: ignore[attr-defined]
        return {
            "version": vllm.__version__,
            "vocabulary": config.get_vocab_size(),
            "longest": config.max_model_len,
            "dtype": str(config.dtype).removeprefix("torch."),
            "logprobs_mode": str(getattr(config.logprobs_mode, "value", config.logprobs_mode)),
            "quantization": config.quantization,
            "device": self.device.type,  # type: ignore[attr-defined]
            "sleep": config.enable_sleep_mode,
            "lora_rank": None if adapters is None else adapters.max_lora_rank,
        }

    @_told
    def lockstep_version(self, version: str | None = None) -> dict[str, Any]:
        """Set it where one is given."""
        if version is not None:
            self._lockstep_version = version
        return {"version": getattr(self, "_lockstep_version", FRESH)}

    @_told
    def lockstep_load(self, files: list[str], names: list[str], sums: list[int]) -> dict[str, Any]:
        """Take all weights of the model from safetensors files in the names of its checkpoint."""
        found = _names_in(files)
        _refuse_other_names(found, names)
        _load(self, _as_written(_tensors(files), dict(zip(names, sums, strict=True))))
        return {"loaded": len(found)}

    @_told
    def lockstep_take(
        self, names: list[str], shapes: list[list[int]], sums: list[int], dtype: str, places: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Take all weights of the model from where the run has them. `unopened`, with why, where nothing was touched:
        they can come by another way."""
        try:
            tensors = _opened(self, names, shapes, dtype, places)
            # On this machine's memory nothing is lost on the way; the sums tell that it is the memory that was meant.
            wrong = _other_sums(names, tensors, sums)
            if wrong:
                raise ValueError(f"{len(wrong)} tensors are not what the run has, such as {wrong[:5]}")
        except Exception as error:  # noqa: BLE001 - told to the run, which takes another way
            _close(self)
            return {"unopened": f"{type(error).__name__}: {error}"[:2000]}
        _load(self, iter(zip(names, tensors, strict=True)))
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            # The run may change them when it has the answer.
            torch.accelerator.synchronize(self.device)  # type: ignore[attr-defined]
        return {"loaded": len(names)}

    @_told
    def lockstep_join(
        self, address: str, port: int, name: str, backend: str, size: int, seconds: float
    ) -> dict[str, Any]:
        """Meet the run, which is rank 0, and the other workers in a group."""
        copies = self.vllm_config.parallel_config.data_parallel_size  # type: ignore[attr-defined]
        if copies != 1:
            # The workers of each copy have the same ranks, and only those of one are counted.
            raise ValueError(f"it has {copies} copies of the weights (data parallelism): set rollout.hand_over=files")
        _leave(self)
        self._lockstep_group = name, *met(address, port, name, backend, self.rank + 1, size, seconds)  # type: ignore[attr-defined]
        return {"rank": self.rank + 1}  # type: ignore[attr-defined]

    @_told
    def lockstep_receive(
        self, group: str, names: list[str], shapes: list[list[int]], sums: list[int], dtype: str
    ) -> dict[str, Any]:
        """Take all weights of the model from the group, in the names of its checkpoint and in this order."""
        name, joined, _ = getattr(self, "_lockstep_group", (None, None, None))
        if name != group:
            return {"error": f"it is in no group {group}: it was started again", "lost": True}
        arriving = Arriving(joined, names, shapes, sums, dtype, self.device)  # type: ignore[attr-defined]
        try:
            _load(self, arriving)
        finally:
            ignored = arriving.take_rest()
        if ignored or arriving.spoiled:
            raise ValueError(f"did not come as they were sent: {arriving.spoiled[:5]}; not taken: {ignored[:5]}")
        return {"loaded": len(names)}

    @_told
    def lockstep_leave(self) -> dict[str, Any]:
        _leave(self)
        return {}


def _load(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    # Half-new weights must not pass for the ones before.
    worker._lockstep_version = "incomplete"
    model = worker.model_runner.get_model()
    try:
        loaded = _recorded(model, lambda: worker.reload_weights(weights_iterator=weights))
    except BaseException:
        _close_reload(worker, model)
        raise
    _refuse_left_out(model, loaded)
    _repack_heads(model)


def _close_reload(worker: Any, model: Any) -> None:
    """vLLM leaves a reload that raised open: its layers keep the weights that came, and count them together with those
    of the next reload. Here each layer that is not complete drops them and gets its earlier tensors back."""
    try:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # a version that reloads in another way
        return
    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    finalize_layerwise_reload(model, worker.model_runner.model_config)


def _opened(
    worker: Any, names: list[str], shapes: list[list[int]], dtype: str, places: list[dict[str, Any]]
) -> list[torch.Tensor]:
    """A tensor that stays where it was is opened once: the run trains the same memory from push to push."""
    before = getattr(worker, "_lockstep_opened", {})
    now = {}
    for name, shape, place in zip(names, shapes, places, strict=True):
        key = json.dumps([name, shape, dtype, place])
        now[key] = before[key] if key in before else opened(place, getattr(torch, dtype), shape)
    # A file of one push is gone after it.
    worker._lockstep_opened = {} if any("file" in place for place in places) else now
    return list(now.values())


def _close(worker: Any) -> None:
    worker._lockstep_opened = {}


def _other_sums(names: list[str], tensors: list[torch.Tensor], sums: list[int]) -> list[str]:
    found = torch.stack([bit_sum(tensor) for tensor in tensors]).tolist()
    return [name for name, one, other in zip(names, found, sums, strict=True) if one != other]


def _leave(worker: Any) -> None:
    """Nothing where it is in no group."""
    _, group, _ = getattr(worker, "_lockstep_group", (None, None, None))
    worker._lockstep_group = None, None, None
    if group is not None:
        left(group)


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


def _as_written(
    tensors: Iterator[tuple[str, torch.Tensor]], sums: dict[str, int]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each is held against its announced sum before it is taken: one that is not what was written ends the load."""
    for name, tensor in tensors:
        if int(bit_sum(tensor)) != sums[name]:
            raise ValueError(f"{name} in the files is not what the run has written")
        yield name, tensor


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
