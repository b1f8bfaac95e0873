"""LoRA adapters: creates a new adapter from the recipe, or loads one from a PEFT folder."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import Problem, Refusal, first_line, refuse_all, shortened
from lockstep.model.quantized.quantize import adapted_stacks
from lockstep.model.streamed import adapters_on_host
from lockstep.recipe.schema import Lora

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# The values of plain LoRA in a PEFT config. Config keys that are neither listed here nor in `_ANY` must be unset,
# because they may select variants of LoRA that lockstep would train wrongly.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # Other initialisations (such as PiSSA) change the base model.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal"),
}
_ANY = {"r", "lora_alpha", "lora_dropout", "target_modules", "exclude_modules", "task_type", "auto_mapping"}
_ANY |= {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config", "eva_config"}
_ANY |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}


def lora_config(settings: Lora, task: str | None, stored: str | None) -> Any:
    """Returns the PEFT configuration of the adapter. Rank, scale and layers come from the folder `stored`, if given,
    else from the recipe."""
    from peft import LoraConfig

    keys: dict[str, Any] = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": settings.targets,
        "exclude_modules": settings.exclude,
    }
    if stored is not None:
        keys = _stored_config(settings, stored)
    return LoraConfig(**keys, bias="none", task_type=task)


def with_adapter(model: Any, settings: Lora | None, seed: int, stored: str | None) -> Any:
    """Returns a PEFT model around `model`, with a new adapter (initialised from `seed`) or the adapter of the folder
    `stored`. Without LoRA settings returns `model`."""
    if settings is None:
        return model
    adapted = put_adapter(model, settings, seed, "CAUSAL_LM", stored)
    if stored is not None:
        with adapters_on_host():
            start_from(adapted, stored, settings.adapter)
    return adapted


def put_adapter(model: Any, settings: Lora, seed: int, task: str | None, stored: str | None) -> Any:
    """Returns a PEFT model around `model`. If `task` is None, inserts the adapters into the layers of `model` and
    returns `model` itself."""
    from peft import get_peft_model, inject_adapter_in_model

    if task is None:
        settings = _of_decoder(settings, getattr(model, "base_model_prefix", "model"))
    config = lora_config(settings, task, stored)
    refuse_all(list(_unmatched_exclude(model, settings)))
    modules = [name for name, _ in model.named_modules() if name]
    holders: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name)
    # The random state is forked and seeded, so that the initial adapter does not depend on earlier random numbers.
    with torch.random.fork_rng(devices=[]), adapters_on_host():
        torch.default_generator.manual_seed(seed)  # only the CPU generator is forked, so only it may be seeded
        try:
            if task is None:
                adapted = inject_adapter_in_model(config, model)
            else:
                adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except ValueError as error:
            raise Refusal(_refused(str(error), settings, modules)) from error
    # transformers stores all experts of a layer in one parameter. If a target names single experts, PEFT adapts this
    # parameter instead, so the target matches no module.
    refuse_all(list(adapted_stacks(model, config.target_parameters or ())))
    replaced = set(settings.targets) - set(config.target_modules or ()) if config.target_parameters else set()
    refuse_all([*_unmatched_targets(settings.targets, modules, replaced), *_unfit_layers(model, settings, holders)])
    return adapted


def _of_decoder(settings: Lora, prefix: str) -> Lora:
    """Converts module names of a language model to module names of its decoder. A value model has its adapters in the
    decoder."""
    named = {
        key: [entry.removeprefix(f"{prefix}.") for entry in entries if (key, entry) != ("exclude", "lm_head")]
        for key, entries in (("targets", settings.targets), ("exclude", settings.exclude))
        if isinstance(entries, list)
    }
    return settings.model_copy(update=named)


def _refused(message: str, settings: Lora, modules: Sequence[str]) -> list[Problem]:
    """Converts an error message of PEFT to problems. For a name that matches no module, the problem suggests a similar
    name, which PEFT does not do."""
    problems = list(_unmatched_targets(settings.targets, modules, ()))
    if problems and "not found" in message:
        return problems
    kind = re.match(r"Target module (\w+)\(", message)
    if kind:
        why = f"PEFT has no LoRA adapter for layers of class {kind[1]}"
        return [Problem("model.lora.targets", why, "name linear layers, or use all-linear", code="unknown-module")]
    layer = re.search(r"Module '(\w+)' is incompatible with", message)
    if layer:
        why = f"PEFT has no adapter for {layer[1]} of this model, whose weight fused kernels read directly"
        return [Problem("model.lora.targets", why, f"add {layer[1]} to model.lora.exclude", code="unfit-adapter")]
    if "lora_dropout" in message:
        why = "PEFT supports no dropout in adapters of experts, which transformers stores in one parameter"
        remedy = "set model.lora.dropout=0, or list other layers in model.lora.targets"
        return [Problem("model.lora.dropout", why, remedy, code="unfit-adapter")]
    return [Problem("model.lora.targets", message.splitlines()[0], code="unknown-module")]


def _unmatched_targets(targets: str | list[str], modules: Sequence[str], others: Collection[str]) -> Iterator[Problem]:
    for entry in targets if isinstance(targets, list) else ():
        if entry not in others and not any(_ends(name, entry) for name in modules):
            yield _unmatched("model.lora.targets", entry, modules)


def _unmatched_exclude(model: nn.Module, settings: Lora) -> Iterator[Problem]:
    key, exclude = "model.lora.exclude", settings.exclude
    modules = [name for name, _ in model.named_modules() if name]
    if isinstance(exclude, str):
        try:
            pattern = re.compile(exclude)
        except re.error as error:
            yield Problem(
                key,
                f"{exclude!r} is not a valid regular expression: {first_line(error)}",
                "fix it, or list module names",
                code="invalid-regex",
            )
            return
        if not any(pattern.fullmatch(name) for name in modules):
            why = f"{exclude!r} matches no module of {type(model).__name__}: it would exclude nothing"
            yield Problem(
                key,
                why,
                f"it must match a full name, such as {modules[-1]!r}; start the expression with `.*`",
                code="unknown-module",
            )
    for entry in exclude if isinstance(exclude, list) else ():
        if not any(_ends(name, entry) for name in modules):
            yield _unmatched(key, entry, modules)


def _ends(name: str, entry: str) -> bool:
    """Returns whether PEFT applies a list entry to this module name. The entry must equal the full name or its last
    components."""
    return name == entry or name.endswith(f".{entry}")


def _unmatched(key: str, entry: str, modules: Sequence[str]) -> Problem:
    parts = entry.count(".") + 1
    last = dict.fromkeys(".".join(name.split(".")[-parts:]) for name in modules)
    endings = [name for name in last if not name.isdigit()]
    near = get_close_matches(entry, endings, n=1)
    remedy = f"did you mean {near[0]}?" if near else f"names of modules end with {', '.join(endings)}"
    return Problem(key, f"{entry!r} matches no module of the model", remedy, code="unknown-module")


def _unfit_layers(model: Any, settings: Lora, holders: Mapping[nn.Parameter, Sequence[str]]) -> Iterator[Problem]:
    """Yields a problem for each layer whose adapter cannot be trained or merged. Tied layers share one parameter.
    Merging an adapter into one of two tied layers would also change the other layer, which training did not change."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    where, remedy = "model.lora.targets", "remove it from the targets, or name it in model.lora.exclude"
    if settings.adapter is not None:
        where, remedy = f"model.lora.adapter {settings.adapter}", "merge the adapter: set model.path to its path"
    head = model.get_output_embeddings()
    for name, layer in model.named_modules():
        if not isinstance(layer, BaseTunerLayer):
            continue
        if layer is head:
            yield Problem(
                where,
                f"{name} is the output head, which runs in chunks and cannot have an adapter",
                remedy,
                code="unfit-adapter",
            )
            continue
        for parameter in layer.get_base_layer().parameters(recurse=False):
            names = holders.get(parameter, ())
            if len(names) > 1:
                other = next((one for one in names if one.rpartition(".")[0] != name), names[-1])
                why = f"{name} cannot have an adapter: its weight is tied to {other}"
                yield Problem(where, why, remedy, code="unfit-adapter")


def start_from(model: Any, folder: str, name: str | None = None) -> None:
    """Loads the weights of a stored adapter into the new adapter of the model. The weight names of the stored and the
    new adapter must match exactly."""
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    where = f"model.lora.adapter {name or folder}"
    file = Path(folder) / WEIGHTS
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise Refusal.at(
            where, f"{WEIGHTS} cannot be read: {first_line(error)}", "give the path of a PEFT folder", code="unreadable"
        ) from error
    expected = get_peft_model_state_dict(model)
    problems = [
        Problem(where, f"the adapter has no {name}", code="missing-weight")
        for name in sorted(expected.keys() - weights.keys())
    ]
    problems += [
        Problem(where, f"the model has no parameter for {name}", code="unknown-weight")
        for name in sorted(weights.keys() - expected.keys())
    ]
    problems += [
        Problem(
            where,
            f"{name} has the shape {tuple(weights[name].shape)}, but the model needs {tuple(expected[name].shape)}",
            code="wrong-shape",
        )
        for name in sorted(expected.keys() & weights.keys())
        if expected[name].shape != weights[name].shape
    ]
    if problems:
        raise Refusal(shortened(problems, "weights"))
    if torch.get_default_device().type != "meta":  # parameters on the meta device have no storage to load into
        set_peft_model_state_dict(model, weights)


def _stored_config(settings: Lora, folder: str) -> dict[str, Any]:
    """Returns the configuration of the stored adapter. Raises `Refusal` if the recipe contradicts that
    configuration."""
    where = f"model.lora.adapter {settings.adapter}"
    file = Path(folder) / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        keys = {name: found[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal.at(
            where, f"{CONFIG} cannot be read: {first_line(error)}", "give the path of a PEFT folder", code="unreadable"
        ) from error
    keys["exclude_modules"] = found.get("exclude_modules")
    problems = [
        Problem(
            where,
            f"{name} is {value!r}: only plain LoRA can be trained",
            "to train a model with this adapter merged, set model.path to the adapter",
            code="unfit-adapter",
        )
        for name, value in found.items()
        if name not in _ANY and value and value not in _PLAIN.get(name, ())
    ]
    for key, name in (("rank", "r"), ("alpha", "lora_alpha")):
        value = getattr(settings, key)
        if value is not None and value != keys[name]:
            problems.append(
                Problem(
                    f"model.lora.{key}",
                    f"is {value}, but the adapter has {keys[name]}",
                    "remove it",
                    code="conflicting-keys",
                )
            )
    if problems:
        raise Refusal(problems)
    return keys
