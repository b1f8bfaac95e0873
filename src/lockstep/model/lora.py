"""LoRA adapters: creates a new adapter from the recipe, or loads one from a PEFT folder."""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from lockstep.errors import Problem, Refusal, first_line, refuse_all, shortened
from lockstep.model.adapters.active import FIRST, TRAINED, add_start, lora_layers, saved_copies
from lockstep.model.adapters.lora_init import ReadWeight, add_initial, norms_later, own_weight, start_from_weights
from lockstep.model.adapters.peft_folder import adapter_weights
from lockstep.model.decoder import decoder_layers
from lockstep.model.quantized.quantize import adapted_stacks, coded_parts, is_coded
from lockstep.model.streamed import META, adapters_on_host
from lockstep.model.towers.vision_model import tower_parts
from lockstep.recipe.keys_lora import Lora, layer_indices

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys of a PEFT config that a new adapter takes from a stored one.
_KEPT = {"target_modules", "exclude_modules", "target_parameters", "rank_pattern", "alpha_pattern", "use_rslora"}
_KEPT |= {"use_dora", "modules_to_save", "layers_to_transform", "layers_pattern"}
# The supported values of other keys. Config keys that are not listed here must be unset, because they may select
# variants of LoRA that lockstep would train wrongly.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    # `pissa_niter_N` is not supported: its random decomposition cannot be repeated. LoftQ and others change the base.
    "init_lora_weights": (True, "gaussian", "eva", "orthogonal", "pissa"),
}
_ANY = {"r", "lora_alpha", "lora_dropout", "task_type", "auto_mapping", *_KEPT}
_ANY |= {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "runtime_config", "eva_config"}
_ANY |= {"megatron_core", "qalora_group_size", "ensure_weight_tying"}
# The value of PEFT's `init_lora_weights` for each `model.lora.init`. Values that depend on the weights of the layers
# (PiSSA, LoftQ) replace the default afterwards.
_INIT = {"gaussian": "gaussian", "orthogonal": "orthogonal"}


class NewAdapter(NamedTuple):
    """How a new adapter is created. `read` returns the matrices from which PiSSA and LoftQ start; `shared` is true if
    all ranks of a sharded model create the adapter together. With `values` false, matrices that depend on the weights
    of the layers are not computed, because a checkpoint replaces them."""

    seed: int
    read: ReadWeight = own_weight
    shared: bool = False
    values: bool = True


def lora_config(settings: Lora, task: str | None, stored: str | None, model: nn.Module | None = None) -> Any:
    """Returns the PEFT configuration of the adapter. Rank, scale and layers come from the folder `stored`, if given,
    else from the recipe."""
    from peft import LoraConfig

    if stored is not None:
        keys = _stored_config(settings, stored)
        keys["exclude_modules"] = _excluded(keys.get("exclude_modules"), model)
        return LoraConfig(**keys, bias="none", task_type=task)
    keys = {
        "r": settings.rank,
        "lora_alpha": settings.alpha,
        "lora_dropout": settings.dropout,
        "target_modules": settings.targets,
        "exclude_modules": _excluded(settings.exclude, model),
        "use_rslora": settings.rslora,
        "use_dora": settings.dora,
        "init_lora_weights": _INIT.get(settings.init, True),
    }
    if model is not None and (experts := _expert_targets(settings, model)):
        keys["target_modules"] = [entry for entry in settings.targets if entry not in experts]
        keys["target_parameters"] = _of_layers(settings, model, experts)
    if settings.layers is not None and model is not None:
        keys |= {"layers_to_transform": layers_of(settings, model), "layers_pattern": [_layer_list(model)]}
        if settings.targets == "all-linear":  # PEFT takes layer indices only with a list of names
            keys["target_modules"] = _linear_names(model)
    if settings.modules_to_save and model is not None:
        keys["modules_to_save"] = matched_modules(settings, model)
    return LoraConfig(**keys, bias="none", task_type=task)


def _excluded(exclude: str | list[str] | None, model: nn.Module | None) -> str | list[str] | None:
    """Returns the modules without an adapter: those of the recipe, and the linear layers of towers."""
    towers = tower_parts(model) if model is not None else set()
    if not towers or model is None:
        return exclude
    inside = [name for name, part in model.named_modules() if part in towers and isinstance(part, nn.Linear)]
    if isinstance(exclude, str):
        return "|".join([f"(?:{exclude})", *map(re.escape, inside)])
    return [*(exclude or ()), *inside]


def with_adapter(model: Any, settings: Lora | None, seed: int | NewAdapter, stored: str | None) -> Any:
    """Returns a PEFT model around `model`, with a new adapter (initialised from `seed`) or the adapter of the folder
    `stored`. Without LoRA settings returns `model`."""
    if settings is None:
        return model
    new = seed if isinstance(seed, NewAdapter) else NewAdapter(seed)
    adapted = put_adapter(model, settings, new, "CAUSAL_LM", stored)
    if stored is not None:
        with adapters_on_host():
            start_from(adapted, stored, settings.adapter)
            if settings.reference == "start":
                add_start(adapted, adapted.peft_config[TRAINED])
    return adapted


def put_adapter(model: Any, settings: Lora, new: NewAdapter, task: str | None, stored: str | None) -> Any:
    """Returns a PEFT model around `model`. If `task` is None, inserts the adapters into the layers of `model` and
    returns `model` itself."""
    from peft import get_peft_model, inject_adapter_in_model

    if task is None:
        settings = _of_decoder(settings, getattr(model, "base_model_prefix", "model"))
    refuse_all(list(unmatched_modules(settings, model)))
    config = lora_config(settings, task, stored, model)
    refuse_all(list(_unmatched_exclude(model, settings)))
    modules = [name for name, _ in model.named_modules() if name]
    holders: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name)
    # The random state is forked and seeded, so that the initial adapter does not depend on earlier random numbers.
    with torch.random.fork_rng(devices=[]), adapters_on_host(), norms_later(), warnings.catch_warnings():
        # PEFT looks for the patterns that it makes for stacked experts among the modules, and then uses them.
        warnings.filterwarnings("ignore", r"The following \w+_pattern keys did not match", RuntimeWarning)
        torch.default_generator.manual_seed(new.seed)  # only the CPU generator is forked, so only it may be seeded
        try:
            if task is None:
                adapted = inject_adapter_in_model(config, model)
            else:
                adapted = get_peft_model(model, config, autocast_adapter_dtype=False)
        except (ValueError, TypeError) as error:
            raise Refusal(_refused(str(error), settings, modules)) from error
        # transformers stores all experts of a layer in one parameter. If a target names single experts, PEFT adapts
        # this parameter instead, so the target matches no module.
        refuse_all(list(adapted_stacks(coded_parts(model), config.target_parameters or ())))
        replaced = set(settings.targets) - set(config.target_modules or ()) if config.target_parameters else set()
        refuse_all([*_unmatched_targets(settings.targets, modules, replaced), *_unfit_layers(model, settings, holders)])
        refuse_all(list(_experts_elsewhere(model, settings))[:1])
        _start(model, config, _init_of(settings, stored), new)
    return adapted


def _start(model: Any, config: Any, init: str, new: NewAdapter) -> None:
    """Computes matrices that depend on the weights of the layers, and adds the frozen copy of them."""
    if not init.startswith(("pissa", "loftq")):
        return
    meta = all(parameter.device == META for parameter in model.parameters() if not parameter.requires_grad)
    if init == "loftq" and new.values and new.read is own_weight and not meta:
        why = "loftq starts from the errors of quantised weights, and the weights are not quantised"
        raise Refusal.at("model.lora.init", why, "set another model.lora.init", code="unfit-adapter")
    if new.values:
        start_from_weights(model, init, new.seed, new.read, shared=new.shared)
    if init == "loftq":
        add_start(model, config, FIRST)
    else:
        add_initial(model, config)


def _init_of(settings: Lora, stored: str | None) -> str:
    """Returns the initialisation of the adapter, which decides whether the model has a frozen initial adapter."""
    if stored is None:
        return settings.init
    init = json.loads((Path(stored) / CONFIG).read_text(encoding="utf-8")).get("init_lora_weights")
    return "pissa" if init == "pissa" else "default"


def _of_decoder(settings: Lora, prefix: str) -> Lora:
    """Converts module names of a language model to module names of its decoder. A value model has its adapters in the
    decoder."""
    named = {
        key: [entry.removeprefix(f"{prefix}.") for entry in entries if key == "targets" or entry != "lm_head"]
        for key, entries in (
            ("targets", settings.targets),
            ("exclude", settings.exclude),
            ("modules_to_save", settings.modules_to_save),
        )
        if isinstance(entries, list)
    }
    return settings.model_copy(update=named)


def layers_of(settings: Lora, model: Any) -> list[int]:
    """Returns the indices of the decoder layers that get an adapter. Raises `Refusal` for an index beyond the model."""
    assert settings.layers is not None
    indices, count = layer_indices(settings.layers), len(decoder_layers(model))
    if not indices or indices[0] < 0 or indices[-1] >= count:
        wrong = f"has no layer {indices[0] if indices[0] < 0 else indices[-1]}" if indices else "would be unchanged"
        raise Refusal.at(
            "model.lora.layers",
            f"the model has the layers 0 to {count - 1}, so it {wrong}",
            f"use layers from 0 to {count - 1}",
            code="unknown-module",
        )
    return indices


def _expert_targets(settings: Lora, model: nn.Module) -> list[str]:
    """Returns the entries of `model.lora.targets` that name the stacked weights of experts, such as
    `experts.gate_up_proj`. These weights are parameters of three dimensions, and no modules."""
    modules = [name for name, _ in model.named_modules() if name]
    entries = settings.targets if isinstance(settings.targets, list) else []
    names = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    return [
        entry
        for entry in entries
        if not any(_ends(name, entry) for name in modules) and any(_ends(name, entry) for name in names)
    ]


def _of_layers(settings: Lora, model: nn.Module, entries: Sequence[str]) -> list[str]:
    """Returns the targeted parameters: the entries, or with `model.lora.layers` the full names in these layers."""
    if settings.layers is None:
        return list(entries)
    layers = [decoder_layers(model)[index] for index in layers_of(settings, model)]
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    named = model.named_parameters()
    return [name for name, p in named if p in inside and any(_ends(name, entry) for entry in entries)]


def _experts_elsewhere(model: Any, settings: Lora) -> Iterator[Problem]:
    """Yields a problem for an adapter of experts outside of `model.lora.layers`. PEFT converts the names of single
    experts to the stacked weights of all layers."""
    if settings.layers is None:
        return
    layers = decoder_layers(model)
    chosen = {part for index in layers_of(settings, model) for part in layers[index].modules()}
    for name, layer in lora_layers(model):
        if hasattr(layer, "parameter_name") and layer not in chosen:
            why = f"{name} has an adapter, because names of single experts stand for the experts of all layers"
            remedy = (
                "name the stacked weights in model.lora.targets, such as experts.gate_up_proj and experts.down_proj"
            )
            yield Problem("model.lora.layers", why, remedy, code="unfit-adapter")


def _layer_list(model: Any) -> str:
    """Returns the name of the list of decoder layers, such as `layers` or `h`."""
    first = decoder_layers(model)[0]
    return next(name.split(".")[-2] for name, module in model.named_modules() if module is first)


def _linear_names(model: Any) -> list[str]:
    """Returns the last names of the linear layers inside the decoder layers."""
    from transformers.pytorch_utils import Conv1D

    parts = [part for layer in decoder_layers(model) for part in layer.named_modules()]
    return sorted({name.rpartition(".")[2] for name, module in parts if isinstance(module, nn.Linear | Conv1D)})


def matched_modules(settings: Lora, model: nn.Module) -> list[str]:
    """Returns the full names of the modules of `model.lora.modules_to_save`."""
    names = [name for name, _ in model.named_modules() if name]
    return [name for name in names if any(_ends(name, entry) for entry in settings.modules_to_save)]


def unmatched_modules(settings: Lora, model: nn.Module) -> Iterator[Problem]:
    """Yields a problem for each entry of `model.lora.modules_to_save` that names no module of the model."""
    names = [name for name, _ in model.named_modules() if name]
    for entry in settings.modules_to_save:
        if not any(_ends(name, entry) for name in names):
            yield _unmatched("model.lora.modules_to_save", entry, names)
    for name in matched_modules(settings, model):
        if any(is_coded(part) for part in model.get_submodule(name).modules()):
            why = f"{name} is quantised, and codes cannot be trained"
            remedy = f"add {name.rpartition('.')[2]} to model.quantize_exclude, or remove it"
            yield Problem("model.lora.modules_to_save", why, remedy, code="unfit-adapter")


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
    if "No modules were targeted" in message:
        why = "no layer gets an adapter: all named layers are excluded or trained as copies"
        return [Problem("model.lora.targets", why, "name other layers", code="unknown-module")]
    if "modules_to_save" in message:
        why, remedy = message.splitlines()[0], "name modules that have weights themselves, such as embed_tokens"
        return [Problem("model.lora.modules_to_save", why, remedy, code="unfit-adapter")]
    if "use_dora" in message or "variants like DoRA" in message:
        why = "PEFT supports no DoRA in adapters of experts, which transformers stores in one parameter"
        remedy = "set model.lora.dora=false, or list other layers in model.lora.targets"
        return [Problem("model.lora.dora", why, remedy, code="unfit-adapter")]
    if "rank to be even" in message:
        why = f"init orthogonal needs an even rank, not {settings.rank}"
        return [Problem("model.lora.rank", why, "set an even rank", code="unfit-adapter")]
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
    for name, wrapper in saved_copies(model):
        for parameter in wrapper.original_module.parameters():
            if len(names := holders.get(parameter, ())) > 1:
                why = f"{name} cannot have a trained copy: its weight is tied to {_other(names, name)}"
                key = where if settings.adapter is not None else "model.lora.modules_to_save"
                yield Problem(key, why, "remove it, or train all weights (without model.lora)", code="unfit-adapter")
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
                why = f"{name} cannot have an adapter: its weight is tied to {_other(names, name)}"
                yield Problem(where, why, remedy, code="unfit-adapter")


def _other(names: Sequence[str], module: str) -> str:
    """Returns the name of a tied parameter in another module than `module`."""
    return next((one for one in names if one.rpartition(".")[0] != module), names[-1])


def start_from(model: Any, folder: str, name: str | None = None) -> None:
    """Loads the weights of a stored adapter into the new adapter of the model. The weight names of the stored and the
    new adapter must match exactly."""
    from peft import set_peft_model_state_dict

    where = f"model.lora.adapter {name or folder}"
    file = Path(folder) / WEIGHTS
    try:
        weights = load_file(file)
    except (OSError, SafetensorError) as error:
        raise Refusal.at(
            where, f"{WEIGHTS} cannot be read: {first_line(error)}", "give the path of a PEFT folder", code="unreadable"
        ) from error
    expected = adapter_weights(model)
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
        for _, wrapper in saved_copies(model):
            if any(parameter.device == META for parameter in wrapper.modules_to_save.parameters()):
                wrapper.modules_to_save.to_empty(device="cpu")
        set_peft_model_state_dict(model, weights)


def _stored_config(settings: Lora, folder: str) -> dict[str, Any]:
    """Returns the configuration of the stored adapter. Raises `Refusal` if the recipe contradicts that
    configuration."""
    where = f"model.lora.adapter {settings.adapter}"
    file = Path(folder) / CONFIG
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        keys = {name: found[name] for name in ("r", "lora_alpha", "lora_dropout", "target_modules")}
        keys |= {name: found[name] for name in _KEPT if found.get(name)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise Refusal.at(
            where, f"{CONFIG} cannot be read: {first_line(error)}", "give the path of a PEFT folder", code="unreadable"
        ) from error
    problems = [
        Problem(
            where,
            f"{name} is {value!r}: this kind of adapter cannot be trained",
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
