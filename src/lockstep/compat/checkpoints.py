"""Converts checkpoints of verl (FSDP shards) and OpenRLHF (DeepSpeed) to Hugging Face folders."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.compat.pickles import read_pickle, read_sharded
from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.model.text_model import FullModel

_SHARD = re.compile(r"^model_world_size_(\d+)_rank_(\d+)\.pt$")
_ZERO3 = re.compile(r"^(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_ZERO3_OPTIM = re.compile(r"^(?:\w+_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_MP = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_COPIED = ("*.json", "*.jinja", "*.txt", "tokenizer.model", "*.py")
# The head of a critic of verl.
HEAD = "score.weight"
_NOT_COPIED = ("fsdp_config.json", "model.safetensors.index.json", "trainer_state.json")

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class PeerCheckpoint:
    """A checkpoint of another trainer: its kind, its read function, and its folder with config and tokenizer."""

    kind: str
    folder: Path
    read: Callable[[Path], Weights]
    model: Path | None


def convert_checkpoint(path: Path, out: Path, model: Path | None = None) -> str:
    """Writes the weights of a checkpoint to `out`, with the config and tokenizer of `model` or of the checkpoint."""
    checkpoint = find_checkpoint(path)
    source = model or checkpoint.model
    if source is None or not (source / "config.json").is_file():
        raise Refusal.at(
            checkpoint.folder,
            "has weights but no config.json",
            "give a folder with the config and tokenizer of the trained model: --model DIR",
            code="missing-file",
        )
    weights = checkpoint.read(checkpoint.folder)
    check_weights(weights, source, checkpoint.folder)
    if out.exists() and any(out.iterdir()):
        raise Refusal.at(out, "is not empty", "give a new folder", code="not-empty")
    out.mkdir(parents=True, exist_ok=True)
    for pattern in _COPIED:
        for file in sorted(source.glob(pattern)):
            if file.name not in _NOT_COPIED:
                shutil.copy(file, out / file.name)
    if HEAD in weights:
        _write_critic_config(source, out)
    dtype = _stored_dtype(source)
    stored = {name: _stored(tensor, dtype) for name, tensor in weights.items()}

    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(stored, out)
    count = sum(tensor.numel() for tensor in weights.values())
    return f"wrote {out}: {count:,} parameters of {checkpoint.kind}, config and tokenizer of {source}"


def find_checkpoint(path: Path) -> PeerCheckpoint:
    """Returns the checkpoint in a folder, or in the subfolders where the trainers save it."""
    for folder in (path, path / "actor", path / "_actor", *_tagged(path), *_tagged(path / "_actor")):
        names = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
        if any(_SHARD.match(name) for name in names):
            inside = folder / "huggingface"
            return PeerCheckpoint("FSDP shards of verl", folder, read_fsdp, inside if inside.is_dir() else folder)
        if any(_ZERO3.match(name) for name in names):
            return PeerCheckpoint("DeepSpeed ZeRO 3", folder, read_zero3, None)
        if any(_MP.match(name) for name in names):
            return PeerCheckpoint("DeepSpeed", folder, read_deepspeed, None)
        if "dist_ckpt" in names or any(name.endswith(".distcp") or name.startswith("iter_") for name in names):
            raise Refusal.at(
                folder,
                "is a checkpoint of Megatron, which lockstep does not read",
                "export the checkpoint with verl's model_merger",
                code="unsupported-format",
            )
    raise Refusal.at(
        path,
        "contains no checkpoint of verl (model_world_size_N_rank_R.pt) or DeepSpeed (mp_rank_00_model_states.pt)",
        "give the folder of one step, such as global_step_100",
        code="no-checkpoint",
    )


def _tagged(path: Path) -> list[Path]:
    """Returns the folder that DeepSpeed's file `latest` names."""
    latest = path / "latest"
    if not latest.is_file():
        return []
    name = latest.read_text(encoding="utf-8", errors="replace").strip()
    if name in ("", "..") or Path(name).name != name:
        raise Refusal.at(
            latest,
            f"names {name[:80]!r}, which is not a subfolder",
            "give the folder of one step",
            code="damaged-checkpoint",
        )
    return [path / name]


def read_fsdp(folder: Path) -> Weights:
    shard_files = [(match, file) for file in folder.iterdir() if (match := _SHARD.match(file.name))]
    files = {int(match[2]): file for match, file in shard_files}
    world = {int(match[1]) for match, _ in shard_files}
    if len(world) != 1 or set(files) != set(range(next(iter(world)))):
        have = ", ".join(file.name for file in files.values())
        raise Refusal.at(
            folder,
            f"does not contain every shard of one run: {have}",
            "copy the missing shards into the folder",
            code="missing-shard",
        )
    shards = [read_sharded(files[rank]) for rank in sorted(files)]
    names = list(shards[0])
    refuse_all(
        [
            Problem(str(folder), f"rank {i} has other weight names than rank 0", code="missing-shard")
            for i, s in enumerate(shards)
            if list(s) != names
        ]
    )
    try:
        return {name: _joined([shard[name] for shard in shards], name, folder) for name in names}
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:
        raise Refusal.at(
            folder,
            f"its shards cannot be joined: {first_line(error)}",
            "copy the shards again",
            code="damaged-checkpoint",
        ) from error


def _joined(parts: list[Any], name: str, folder: Path) -> torch.Tensor:
    """Joins the shards of all ranks to one tensor."""
    first = parts[0]
    placements = getattr(first, "placements", None)
    if placements is None:
        return torch.as_tensor(first)
    if len(placements) == 2 and placements[0].is_replicate():
        # All replicas of the shards are equal, so the first replica is used.
        parts, placements = parts[: first.device_mesh.shape[1]], placements[1:]
    if len(placements) != 1:
        raise Refusal.at(
            folder,
            f"{name} is sharded over {len(placements)} device mesh axes",
            "export the checkpoint with verl",
            code="unsupported-format",
        )
    if placements[0].is_replicate():
        return first._local_tensor
    joined = torch.cat([part._local_tensor for part in parts], dim=placements[0].dim)
    if joined.shape != first.shape:
        raise Refusal.at(
            folder,
            f"{name}: the joined shards have shape {tuple(joined.shape)}, not {tuple(first.shape)}",
            code="wrong-shape",
        )
    return joined


def read_deepspeed(folder: Path) -> Weights:
    """Reads a checkpoint of DeepSpeed ZeRO 0, 1 or 2, where one file has all weights."""
    files = [file for file in folder.iterdir() if _MP.match(file.name)]
    if len(files) != 1:
        raise Refusal.at(
            folder,
            f"the model is split over {len(files)} devices (tensor parallel)",
            "merge the shards first",
            code="unsupported-format",
        )
    return _module(read_pickle(files[0]), files[0])


def _module(state: Any, file: Path) -> Weights:
    module = state.get("module") if isinstance(state, dict) else None
    if not isinstance(module, dict):
        raise Refusal.at(file, "contains no module", "check that DeepSpeed wrote the file", code="damaged-checkpoint")
    return {name: tensor for name, tensor in module.items() if _is_weight(name, tensor)}


def _is_weight(name: Any, value: Any) -> bool:
    return isinstance(name, str) and isinstance(value, torch.Tensor)


def read_zero3(folder: Path) -> Weights:
    """Reads a DeepSpeed ZeRO 3 checkpoint: each rank has an equal slice of every weight; the last slice is padded."""
    models = {int(m[1]): file for file in folder.iterdir() if (m := _ZERO3.match(file.name))}
    optims = {int(m[1]): file for file in folder.iterdir() if (m := _ZERO3_OPTIM.match(file.name))}
    if set(models) != set(range(len(models))) or set(optims) != set(models):
        raise Refusal.at(
            folder,
            f"{len(models)} ranks have a model file, and {len(optims)} ranks have an optimizer file",
            "copy all files",
            code="missing-shard",
        )
    state = read_pickle(models[0])
    try:
        shapes = {name: tuple(map(int, shape)) for group in state["param_shapes"] for name, shape in group.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise Refusal.at(
            models[0], "contains no param_shapes", "check that it is a ZeRO 3 checkpoint", code="damaged-checkpoint"
        ) from error
    flat = [_flat(read_pickle(optims[rank]), optims[rank]) for rank in sorted(optims)]
    weights: Weights = {}
    at = 0
    for name, shape in shapes.items():
        count = math.prod(shape)
        run = -(-count // len(flat))
        if at + run > len(flat[0]):
            raise Refusal.at(
                folder,
                f"{name}: the slices of all ranks have fewer values than param_shapes requires",
                "check that the checkpoint is complete",
                code="damaged-checkpoint",
            )
        weights[name] = torch.cat([part.narrow(0, at, run) for part in flat])[:count].clone().view(shape)
        at += run
    try:
        module = state.get("module", {})
        named = {name: module[name] for name in state.get("buffer_names", ()) if name in module}
        buffers = {name: value for name, value in named.items() if _is_weight(name, value)}
        shared = {pair[0]: weights[pair[1]] for pair in state.get("shared_params") or () if pair[1] in weights}
    except (KeyError, TypeError) as error:
        raise Refusal.at(
            models[0], "refers to buffers or shared weights that it does not contain", code="damaged-checkpoint"
        ) from error
    return {**weights, **buffers, **shared}


def _flat(state: Any, file: Path) -> torch.Tensor:
    try:
        return torch.cat([group.flatten() for group in state["optimizer_state_dict"]["fp32_flat_groups"]])
    except (KeyError, TypeError, AttributeError, RuntimeError) as error:
        raise Refusal.at(
            file, "contains no fp32_flat_groups", "check that it is a ZeRO 3 checkpoint", code="damaged-checkpoint"
        ) from error


def check_weights(weights: Weights, model: Path, where: Path) -> None:
    """Raises a `Refusal` that lists all weights whose names or shapes differ from those of the model."""
    from transformers import AutoConfig, AutoModelForTokenClassification

    if any("lora_" in name for name in weights):
        raise Refusal.at(
            where, "contains an adapter", "merge the adapter, then convert the merged model", code="wrong-model-kind"
        )
    kind, labels = (AutoModelForTokenClassification, {"num_labels": 1}) if HEAD in weights else (FullModel, {})
    config = AutoConfig.from_pretrained(model, trust_remote_code=False, **labels)
    with torch.device("meta"):
        expected = kind.from_config(config, trust_remote_code=False).state_dict()
    problems = [
        Problem(str(where), f"lacks {name}", code="missing-weight")
        for name in expected
        if name not in weights and not name.endswith("lm_head.weight")
    ]
    problems += [
        Problem(str(where), f"{name} is not a weight of {model}", code="unknown-weight")
        for name in weights
        if name not in expected
    ]
    problems += [
        Problem(
            str(where), f"{name} has shape {tuple(tensor.shape)}, not {tuple(expected[name].shape)}", code="wrong-shape"
        )
        for name, tensor in weights.items()
        if name in expected and tensor.shape != expected[name].shape
    ]
    refuse_all(problems, "weights")


def _write_critic_config(source: Path, out: Path) -> None:
    """Writes the config of verl's critic, a token classification model. verl stores the config of the language model
    that the critic started from."""
    from transformers import MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING, AutoConfig

    config = AutoConfig.from_pretrained(source, trust_remote_code=False, num_labels=1, classifier_dropout=0.0)
    config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING[type(config)].__name__]
    config.save_pretrained(out)


def _stored(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _stored_dtype(model: Path) -> torch.dtype | None:
    """Returns the dtype that the model's config names; the converted weights are stored in it."""
    config = json.loads((model / "config.json").read_text())
    dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or ""), None)
    return dtype if isinstance(dtype, torch.dtype) else None
