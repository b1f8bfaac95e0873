"""Loads models and tokenizers with transformers' Auto classes, without running code from the model folder."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.model.text_model import text_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


# Small JSON files that transformers reads. transformers silently ignores errors in the last two of these files.
GENERATION = "generation_config.json"
SETTINGS = ("config.json", "tokenizer_config.json", GENERATION, "special_tokens_map.json")
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
# Config keys that can make transformers download kernels from the hub and run them.
_KERNELS = frozenset({"attn_implementation", "experts_implementation"})
NEWER = "update transformers if the model is newer than the installed version, or copy the model folder again"
NO_CODE = "use a model that transformers supports without remote code, or convert this model to one"


def pretrained(kind: Any, path: str, where: str, what: str, **settings: Any) -> Any:
    """Calls `kind.from_pretrained(path)` without remote code. Error messages begin with `where` (e.g. the recipe key)
    and `what` ('its weights')."""
    refuse_damaged_settings(path, where)
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    try:
        return kind.from_pretrained(path, trust_remote_code=False, **settings)
    except Refusal:
        raise
    except Exception as error:  # transformers raises various errors for damaged files
        if "trust_remote_code" in str(error):
            why = f"{what} cannot be loaded without code from the model's folder, and lockstep never runs such code"
            raise Refusal.at(where, why, NO_CODE, code="untrusted-code") from error
        damage = _damaged_file(Path(path))
        why = damage or (first_line(error) if isinstance(error, OSError | ValueError | RuntimeError) else _named(error))
        remedy = "copy or download the damaged file again" if damage else NEWER
        raise Refusal.at(where, f"{what} cannot be loaded: {why}", remedy, code="unreadable") from error


def whole_model(kind: Any, path: str, where: str, what: str, **settings: Any) -> Any:
    """Loads a model, and raises `Refusal` if its files lack weights. transformers would initialise missing weights
    randomly."""
    model, info = pretrained(kind, path, where, what, output_loading_info=True, **settings)
    refuse_partial(info, where)
    unused_weights(model, info.get("unexpected_keys", ()), where)
    refuse_not_finite(dict(model.named_parameters()), where)
    return model


def refuse_partial(info: Mapping[str, Any], where: str) -> None:
    """Raises `Refusal` if weights are missing in the files or have another shape than in the model."""
    problems = [
        Problem(
            where,
            f"the weights lack {key}, which transformers would initialise randomly",
            "use a causal LM folder",
            code="missing-weight",
        )
        for key in sorted(info.get("missing_keys", ()))
    ]
    problems += [
        Problem(
            where,
            f"the shape of {key[0] if isinstance(key, tuple) else key} does not match config.json",
            code="wrong-shape",
        )
        for key in sorted(info.get("mismatched_keys", ()))
    ]
    refuse_all(problems, "weights")


def unused_weights(model: PreTrainedModel, names: Collection[str], where: str) -> tuple[str, ...]:
    """Returns the tensors of the files that the model does not use, without those that transformers ignores by design.
    Raises `Refusal` if the unused tensors form complete layers, because then the config does not match the weights."""
    info: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(names))
    model._adjust_missing_and_unexpected_keys(info)
    unused = tuple(sorted(info.unexpected_keys))
    blocks = {_block(name) for name in model.state_dict()}
    # Some models have layers for multi-token prediction after the other layers. transformers does not use them.
    ahead = getattr(text_config(model.config), "num_nextn_predict_layers", None) or 0
    beyond = [name for name in unused if _block(name) in blocks]
    if len({name[: match.end()] for name in beyond if (match := _INDEX.search(name))}) > ahead:
        why = f"its files have {beyond[0]} and {len(beyond) - 1} more tensors of layers that are not in its config.json"
        remedy = (
            "correct config.json (num_hidden_layers); or save the smaller model with save_pretrained and use its folder"
        )
        raise Refusal.at(where, why, remedy, code="unknown-weight")
    return unused


_INDEX = re.compile(r"\.\d+\.")


def _block(name: str) -> str:
    """Returns the name of a tensor without its layer number."""
    return _INDEX.sub(".*.", name) if _INDEX.search(name) else ""


def told_unused(unused: Sequence[str], path: str) -> str:
    """Returns the warning that the files have tensors which the model does not use."""
    more = f" and {len(unused) - 1:,} more tensors" if len(unused) > 1 else ""
    return f"{path}: its files have {unused[0]}{more}, which the model does not use: they are ignored"


def refuse_not_finite(weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises `Refusal` if weights contain NaN or infinity."""
    import torch

    refuse_all(
        [
            Problem(where, f"its weight {name} holds NaN or infinity", "copy or download it again", code="not-finite")
            for name, weight in weights.items()
            # The sum of a weight is tested first, because it needs no memory. If the sum is finite, all values are
            # finite.
            if not torch.isfinite(weight.detach().sum(dtype=torch.float32)) and not torch.isfinite(weight).all()
        ],
        "weights",
    )


def kept_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Returns a function that says by name which tensors transformers keeps in fp32 in a model of this dtype."""
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(dtype)
    if not plan:
        return lambda name: False
    pattern, *_ = build_glob_alternation(list(plan))
    return lambda name: pattern.search(name) is not None


def rounded(
    model: PreTrainedModel, dtype: torch.dtype, kept_parameters: Collection[torch.Tensor] = ()
) -> PreTrainedModel:
    """Converts the model to a dtype, except `kept_parameters`. Unlike `Module.to`, keeps the tensors in fp32 that
    transformers keeps in fp32."""
    import torch

    kept = kept_in_fp32(model, dtype)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_floating_point() and tensor not in kept_parameters:
            tensor.data = tensor.data.to(torch.float32 if kept(name) else dtype)
    return model


def save_model(model: Any, folder: Path) -> None:
    """Calls `model.save_pretrained`, but writes the generation config itself. Many models have a temperature together
    with `do_sample: false`. transformers loads such a config but refuses to save it."""
    settings = model.generation_config
    if settings is None:
        model.save_pretrained(folder)
        return
    model.generation_config = type(settings)()
    try:
        model.save_pretrained(folder)
    finally:
        model.generation_config = settings
    save_generation(model, folder)


def save_generation(model: Any, folder: Path) -> None:
    """Writes the generation config of the model."""
    model.generation_config.to_json_file(folder / GENERATION)


def refuse_damaged_settings(path: str, where: str) -> None:
    """Raises `Refusal` if a settings file of the folder is not a JSON object, or if config.json names a hub kernel."""
    for name in SETTINGS:
        file = Path(path) / name
        if file.is_file() and (damage := _damage_of_json(file)):
            raise Refusal.at(where, f"{file} {damage}", "copy or download the file again", code="damaged-file")
    file = Path(path) / SETTINGS[0]
    if file.is_file() and (kernel := _hub_kernel(json.loads(file.read_text(encoding="utf-8")))):
        why = f"{file} requests the hub kernel {kernel!r:.80}, and lockstep runs no code from the hub"
        raise Refusal.at(where, why, "remove that key from the file", code="untrusted-code")


def _hub_kernel(config: Any) -> str:
    """Returns the hub kernel (OWNER/NAME) that a config or a nested config names, or an empty string."""
    for key, value in config.items() if isinstance(config, dict) else ():
        if isinstance(value, dict) and (found := _hub_kernel(value)):
            return found
        if str(key).lstrip("_").removesuffix("_internal") in _KERNELS and "/" in str(value):
            return str(value)
    return ""


def refuse_no_weights(path: str, where: str) -> None:
    """Raises `Refusal` if the folder lacks the weight files that transformers expects. Does not read the weights."""
    folder = Path(path)
    for name in WEIGHTS:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return
        if index.is_file():
            if damage := _damage_of_json(index):
                raise Refusal.at(where, f"{index} {damage}", "copy or download the file again", code="damaged-file")
            named = sorted(set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values()))
            missing = [one for one in named if not (folder / one).is_file()]
            if missing:
                raise Refusal.at(
                    where,
                    f"lacks {len(missing)} of the {len(named)} files that {index.name} names: {', '.join(missing[:3])}",
                    "copy or download them",
                    code="missing-shard",
                )
            return
    odd = next((name for name in WEIGHTS if (folder / name).is_dir()), "")
    why = f"{folder / odd} is a folder, not a file" if odd else f"holds no weights: there is no {WEIGHTS[0]}"
    raise Refusal.at(where, why, "copy or download the model again", code="missing-weight")


def refuse_quantized(config: Any, where: str) -> None:
    """Raises `Refusal` for quantized weights that transformers cannot load on this machine, or that cannot be
    trained."""
    settings = getattr(config, "quantization_config", None)
    if settings is None:
        return
    from transformers.quantizers import AutoHfQuantizer

    method = settings.get("quant_method") if isinstance(settings, dict) else settings.quant_method
    remedy = "use the folder of the model without quantization, in bf16 or fp32"
    try:
        quantizer = AutoHfQuantizer.from_config(settings, pre_quantized=True)
        quantizer.validate_environment(device_map=None, weights_only=True)
    except Exception as error:  # quantizers raise various errors
        raise Refusal.at(
            where,
            f"its weights are quantized ({method}) and cannot be loaded: {first_line(error)}",
            remedy,
            code="quantized-weights",
        ) from error
    if not getattr(quantizer.quantization_config, "dequantize", False) and not quantizer.is_trainable:
        raise Refusal.at(
            where, f"its weights are quantized ({method}) and cannot be trained", remedy, code="quantized-weights"
        )


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def _damaged_file(folder: Path) -> str:
    """Returns the first damaged file of a folder and what is wrong with it, or an empty string."""
    for file in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        if damage := _damage_of_json(file):
            return f"{file} {damage}"
    for file in sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        try:
            with safe_open(file, "pt"):
                pass
        except (OSError, SafetensorError) as error:
            return f"{file} is damaged: {first_line(error)}"
    for file in sorted(folder.glob("*.bin")) if folder.is_dir() else []:
        if damage := _damage_of_pickle(file):
            return f"{file} {damage}"
    return ""


def _damage_of_pickle(file: Path) -> str:
    """Loads the file with torch's restricted unpickler, which runs no code. Returns the error text, or an empty string
    if the file is valid."""
    import torch

    try:
        torch.load(file, map_location="meta", weights_only=True)
    except Exception as error:  # noqa: BLE001 - a crafted file can raise anything
        return f"contains more than weights, or is damaged: {why_not_unpickled(error)}"
    return ""


def why_not_unpickled(error: Exception) -> str:
    """Returns the error text of torch's restricted unpickler, without torch's advice to disable the restriction."""
    _, found, why = str(error).partition("WeightsUnpickler error: ")
    return why.splitlines()[0].partition(" was not an allowed global")[0] if found else first_line(error)


def _damage_of_json(file: Path) -> str:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        return f"is not JSON: {first_line(error)}"
    return "" if isinstance(content, dict) else f"holds {type(content).__name__}, not a JSON object"


# Files of tokenizers.
FILES = ("tokenizer*", "vocab*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
WHERE_FROM = "copy the tokenizer's files from the model it was trained with: tokenizer.json, tokenizer_config.json"


def tokenizer_of(path: str, where: str) -> PreTrainedTokenizerBase:
    """Returns the tokenizer of the folder or hub model `path`. Error messages begin with `where`."""
    folder = Path(path)
    if folder.is_dir() and not has_tokenizer(folder):
        raise Refusal.at(where, f"the folder {path} has no tokenizer", WHERE_FROM, code="no-tokenizer")
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = pretrained(AutoTokenizer, path, where, "its tokenizer")
    # If the vocabulary file is missing, transformers builds a tokenizer that gives no tokens.
    if set(tokenizer.get_vocab()) <= set(tokenizer.all_special_tokens):
        why = f"the tokenizer in {path} has no vocabulary, only special tokens"
        raise Refusal.at(where, why, WHERE_FROM, code="no-tokenizer")
    return tokenizer


def has_tokenizer(folder: Path) -> bool:
    return any(file for pattern in FILES for file in folder.glob(pattern))
