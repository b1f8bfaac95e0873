"""Worker extension for vLLM (`--worker-extension-cls lockstep_vllm.WeightExtension`): loads weights from files, by
broadcast in a process group of the run and all workers, or from shared memory.

The extension runs in the server's Python, which may not have lockstep installed, so it may only import torch,
safetensors, vLLM and files of this folder. The route `/collective_rpc` of vLLM calls a method of the extension with its
arguments as one JSON string. Each method of the extension returns a dict, which has the key `error` if the method
failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
from lockstep_group import Arriving, bit_sum, left, met  # type: ignore[import-not-found]
from lockstep_shared import opened  # type: ignore[import-not-found]
from safetensors import safe_open

# The weight version of a server that has just started. The default value of vLLM could be mistaken for a version of
# another run.
FRESH = "as started"


def _returns_routes(config: Any) -> bool:
    """Returns whether answers have the experts of each token. Older versions of vLLM have the flag in another place."""
    places = (getattr(config, "aux_output_config", None), config.model_config)
    return any(getattr(place, "enable_return_routed_experts", False) for place in places)


def _returns_errors(work: Callable[..., dict[str, Any]]) -> Callable[[Any, str], dict[str, Any]]:
    """Makes a method return its exception as `error`, because vLLM drops the text of exceptions."""

    def method(self: Any, arguments: str = "{}") -> dict[str, Any]:
        try:
            return work(self, **json.loads(arguments))
        except Exception as error:  # noqa: BLE001 - the error is sent to the run, which ends
            return {"error": f"{type(error).__name__}: {error}"[:2000]}

    return method


class WeightExtension:
    """Methods that vLLM adds to its worker class, so that `self` is a vLLM worker."""

    @_returns_errors
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
            "routes": _returns_routes(self.vllm_config),  # type: ignore[attr-defined]
            "images": bool(getattr(config, "is_multimodal_model", False)),
        }

    @_returns_errors
    def lockstep_version(self, version: str | None = None) -> dict[str, Any]:
        """Sets the weight version if `version` is given, and returns the current weight version."""
        if version is not None:
            self._lockstep_version = version
        return {"version": getattr(self, "_lockstep_version", FRESH)}

    @_returns_errors
    def lockstep_load(self, files: list[str], names: list[str], sums: list[int]) -> dict[str, Any]:
        """Loads all weights of the model from safetensors files. `names` are the tensor names of the Hugging Face
        checkpoint."""
        found = _names_in(files)
        _refuse_other_names(found, names)
        _load(self, _verified(_tensors(files), dict(zip(names, sums, strict=True))))
        return {"loaded": len(found)}

    @_returns_errors
    def lockstep_take(
        self, names: list[str], shapes: list[list[int]], sums: list[int], dtype: str, places: list[dict[str, Any]]
    ) -> dict[str, Any]:
        """Loads all weights of the model from the run's memory. If the run's memory cannot be mapped, changes nothing
        and returns the reason as `unopened`, so that the run can use files."""
        try:
            tensors = _opened(self, names, shapes, dtype, places)
            # The checksums verify that the right memory was mapped.
            wrong = _wrong_checksums(names, tensors, sums)
            if wrong:
                raise ValueError(f"{len(wrong)} tensors differ from those of the run, such as {wrong[:5]}")
        except Exception as error:  # noqa: BLE001 - the error is sent to the run, which uses files instead
            _close_opened(self)
            return {"unopened": f"{type(error).__name__}: {error}"[:2000]}
        _load(self, iter(zip(names, tensors, strict=True)))
        if self.device.type != "cpu":  # type: ignore[attr-defined]
            # The run may change the tensors after the response.
            torch.accelerator.synchronize(self.device)  # type: ignore[attr-defined]
        return {"loaded": len(names)}

    @_returns_errors
    def lockstep_join(
        self, address: str, port: int, name: str, backend: str, size: int, seconds: float, first: int
    ) -> dict[str, Any]:
        """Joins the process group with the run (rank 0) and the workers of all servers. `first` is the rank of this
        server's first worker."""
        copies = self.vllm_config.parallel_config.data_parallel_size  # type: ignore[attr-defined]
        if copies != 1:
            # Workers of different data-parallel copies have the same ranks, and the process group has ranks for only
            # one copy.
            raise ValueError(
                f"the server has {copies} copies of the weights (data parallelism): set rollout.weight_sync=files"
            )
        _leave(self)
        self._lockstep_group = name, *met(address, port, name, backend, self.rank + first, size, seconds)  # type: ignore[attr-defined]
        return {"rank": self.rank + first}  # type: ignore[attr-defined]

    @_returns_errors
    def lockstep_receive(
        self, group: str, names: list[str], shapes: list[list[int]], counts: list[int], dtype: str
    ) -> dict[str, Any]:
        """Receives all weights of the model from the process group, in the order of `names`, which are names of the
        checkpoint. `counts` is the number of tensors of each bucket."""
        name, joined, _ = getattr(self, "_lockstep_group", (None, None, None))
        if name != group:
            return {"error": f"the worker is not in group {group}: it was restarted", "lost": True}
        arriving = Arriving(joined, names, shapes, counts, dtype, self.device)  # type: ignore[attr-defined]
        try:
            _load(self, arriving)
        finally:
            ignored = arriving.take_rest()
        if ignored or arriving.spoiled:
            raise ValueError(f"corrupt tensors: {arriving.spoiled[:5]}; not loaded: {ignored[:5]}")
        return {"loaded": len(names)}

    @_returns_errors
    def lockstep_leave(self) -> dict[str, Any]:
        _leave(self)
        return {}


def _load(worker: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
    # The version is reset first, so that a partly loaded model does not report the previous version.
    worker._lockstep_version = "incomplete"
    model = worker.model_runner.get_model()
    try:
        loaded = _loaded_names(model, lambda: worker.reload_weights(weights_iterator=weights))
    except BaseException:
        _close_reload(worker, model)
        raise
    _refuse_missing(model, loaded)
    _repack_heads(model)


def _close_reload(worker: Any, model: Any) -> None:
    """Closes a reload that raised an exception. If the reload stayed open, vLLM would count its tensors together with
    the tensors of the next reload. Layers that are not complete drop their new tensors and keep the previous
    tensors."""
    try:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
        from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
    except ImportError:  # another vLLM version
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
    """Maps the tensors of the run. A tensor whose location is unchanged stays mapped, because the run updates its
    weights in place."""
    before = getattr(worker, "_lockstep_opened", {})
    now = {}
    for name, shape, place in zip(names, shapes, places, strict=True):
        key = json.dumps([name, shape, dtype, place])
        now[key] = before[key] if key in before else opened(place, getattr(torch, dtype), shape)
    # Mappings of files are not kept, because files are removed after each push.
    worker._lockstep_opened = {} if any("file" in place for place in places) else now
    return list(now.values())


def _close_opened(worker: Any) -> None:
    worker._lockstep_opened = {}


def _wrong_checksums(names: list[str], tensors: list[torch.Tensor], sums: list[int]) -> list[str]:
    found = torch.stack([bit_sum(tensor) for tensor in tensors]).tolist()
    return [name for name, one, other in zip(names, found, sums, strict=True) if one != other]


def _leave(worker: Any) -> None:
    """Leaves the process group, if the worker has joined one."""
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
            for name in opened.keys():  # noqa: SIM118 - `opened` is not a dict
                yield name, opened.get_tensor(name)


def _verified(tensors: Iterator[tuple[str, torch.Tensor]], sums: dict[str, int]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields each tensor after verifying its checksum; raises ValueError if the checksum differs."""
    for name, tensor in tensors:
        if int(bit_sum(tensor)) != sums[name]:
            raise ValueError(f"{name} in the files differs from what the run wrote")
        yield name, tensor


def _refuse_other_names(found: list[str], names: list[str]) -> None:
    missing, extra = sorted(set(names) - set(found)), sorted(set(found) - set(names))
    if missing or extra or len(found) != len(set(found)):
        raise ValueError(f"the files do not match the announced names: missing {missing[:5]}, too many {extra[:5]}")


def _loaded_names(model: Any, reload: Callable[[], None]) -> set[str] | None:
    """Returns the names that `model.load_weights` loaded during `reload`, because vLLM only warns about missing
    names."""
    loaded: list[set[str] | None] = []
    load = model.load_weights

    def load_and_record(weights: Any) -> Any:
        loaded.append(load(weights))
        return loaded[-1]

    model.load_weights = load_and_record
    try:
        reload()
    finally:
        del model.load_weights
    return None if not loaded or loaded[0] is None else set(loaded[0])


def _refuse_missing(model: Any, loaded: set[str] | None) -> None:
    if loaded is None:
        return
    names = {name.replace(".base_layer.", ".") for name, _ in model.named_parameters()}
    left = sorted(name for name in names - loaded if not _is_scale_of(name, loaded))
    if left:
        raise ValueError(f"{len(left)} parameters of the engine got no new value, such as {left[:5]}")


def _is_scale_of(name: str, loaded: set[str]) -> bool:
    """Returns whether a parameter is the scale of a loaded weight. vLLM computes the scales of online quantisation when
    it has loaded all parts of the weight, so the checkpoint has no such tensor."""
    return name.endswith("weight_scale") and name.removesuffix("_scale") in loaded


def _repack_heads(model: Any) -> None:
    """Updates the packed copy of the output head with which vLLM computes logits on a CPU, because a reload of a tied
    embedding does not update this copy. The function has no effect on devices other than a CPU."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)
