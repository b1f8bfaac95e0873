"""Reads the tensor-parallel plan of a model (`base_model_tp_plan` of transformers), and refuses unsupported models.

If the model has a `base_model_ep_plan`, each rank of the group has some complete experts (expert parallelism).
Embedding and output head are sharded by FSDP, but not split by tensor parallelism. So every rank computes the logits of
the full vocabulary, and log-probs, losses and samples need no communication.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from lockstep.errors import Problem, Refusal
from lockstep.kernels.experts.grouped_experts import stacks_experts
from lockstep.kernels.mixers import RECURRENT_KINDS, layer_kinds
from lockstep.kernels.quantized.formats import NF4_BLOCK
from lockstep.kernels.quantized.quantized_linear import QuantizedLinear
from lockstep.model.adapters.expert_adapters import innermost
from lockstep.model.decoder import decoder_layers, inner_decoder
from lockstep.model.text_model import layer_sizes, model_on_meta, text_config
from lockstep.parallel.tensor import Style, divided_dimensions

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# STYLES maps the supported styles of transformers' plan to lockstep's styles. Modules in LEFT_WHOLE are not split.
STYLES: dict[str, Style] = {"colwise": "columns", "rowwise": "rows", "replicated_with_grad_allreduce": "shared"}
EXPERTS = "moe_tp_experts"
DIVIDED_EXPERTS: dict[str, Style] = {EXPERTS: "experts"}
LEFT_WHOLE = ("embed_tokens",)
# The style of projections in recurrent modules (linear attention). transformers splits their weights and gathers their
# output. lockstep does not split them: recurrent modules run undivided on every rank of the group.
GATHERED = "colwise_gather_output"
KEY = "parallel.tensor_parallel"
REMEDY = (
    "set parallel.tensor_parallel=1 and shard the model instead (parallel.shard), "
    "or use a model that `lockstep help several-processes` lists"
)


class Indivisible(Exception):
    """Raised if tensor parallelism cannot split a model. `why` is the reason, `remedy` what to do."""

    def __init__(self, why: str, remedy: str = REMEDY):
        super().__init__(why)
        self.remedy = remedy


def refuse_indivisible(config: Any, path: str, size: int) -> None:
    """Raises `Refusal` if tensor parallelism cannot split the model. Reads only the config, no weights."""
    if size == 1:
        return
    try:
        refuse_heads(config, size)
        styles_of(model_on_meta(config), size)
    except Indivisible as found:
        raise Refusal(
            [Problem(KEY, f"{path} ({config.model_type}): {found}", found.remedy, code="indivisible")]
        ) from found


def styles_of(model: PreTrainedModel, size: int) -> dict[str, Style]:
    """Returns how each module of the decoder is split (its style), by module name."""
    decoder = inner_decoder(model)
    plan: dict[str, str] = getattr(decoder.config, "base_model_tp_plan", None) or {}
    if not plan:
        raise Indivisible("transformers has no plan for its tensor parallelism")
    experts = [name for name, how in plan.items() if how == EXPERTS and name in _expert_plan(decoder.config)]
    # The plan's entries inside the experts are dropped, because each expert is assigned to one rank and not split.
    plan = {name: how for name, how in plan.items() if not name.startswith(tuple(f"{one}." for one in experts))}
    if layer_kinds(decoder.config) & RECURRENT_KINDS:
        plan = {name: how for name, how in plan.items() if how != GATHERED}
    styles = STYLES | DIVIDED_EXPERTS if experts else STYLES
    unknown = {name: how for name, how in plan.items() if how not in styles and name not in LEFT_WHOLE}
    if unknown:
        name, how = next(iter(unknown.items()))
        more = ", and it has no plan for dividing the experts" if "expert" in name and not experts else ""
        raise Indivisible(f"transformers' plan for {name} is {how!r}, which is not supported{more}")
    layers = decoder_layers(model)
    found: dict[str, Style] = {}
    for name, module in decoder.named_modules():
        style = next((styles.get(how) for pattern, how in plan.items() if _matches(pattern, name)), None)
        if style is None:
            continue
        if not any(module is part for layer in layers for part in layer.modules()):
            raise Indivisible(f"transformers' plan divides {name}, which is not inside a decoder layer")
        _refuse_module(name, module, style, size)
        found[name] = style
    if "rows" not in found.values():
        raise Indivisible("transformers' tensor-parallel plan for this model does not divide its attention")
    return found


def with_adapters(decoder: nn.Module, styles: dict[str, Style]) -> dict[str, Style]:
    """Returns how each module of a decoder with LoRA adapters is split (its style). If the outputs of a layer are
    split, its lora_B is split too. If the inputs of a layer are split, its lora_A is split. Adapters of experts are not
    split; each rank uses the part of them that belongs to its experts. Trained copies of a module are split like the
    module."""
    sides: dict[Style, str] = {"columns": "lora_B", "rows": "lora_A"}
    found: dict[str, Style] = {}
    for name, style in styles.items():
        module: Any = decoder.get_submodule(name)
        if (copies := getattr(module, "modules_to_save", None)) is not None:
            found[f"{name}.original_module"] = style
            found |= {f"{name}.modules_to_save.{one}": style for one in copies}
            continue
        adapters = getattr(module, "lora_A", None)
        if adapters is None:
            found[name] = style
        elif style == "experts" and stacks_experts(module.get_base_layer()):
            (inside,) = innermost(decoder, [name])
            found[inside] = style
        elif style not in sides:
            raise _undivided(name, style)
        else:
            found[f"{name}.base_layer"] = style
            found |= {f"{name}.{sides[style]}.{one}": style for one in adapters}
            # Every rank has the norms of all rows if it has only some inputs.
            norms = module.lora_magnitude_vector if style == "columns" else ()
            found |= {f"{name}.lora_magnitude_vector.{one}": style for one in norms}
            _refuse_dora(name, module)
    return found


def _undivided(name: str, style: Style) -> Refusal:
    return Refusal.at(
        "model.lora.targets",
        f"{name} has an adapter, but parallel.tensor_parallel gives each process a part of its {style}",
        "set other layers in model.lora.targets; or set parallel.tensor_parallel=1 and shard the model "
        "(parallel.shard)",
        code="unfit-adapter",
    )


def _refuse_dora(name: str, layer: Any) -> None:
    """Raises `Refusal` for a DoRA adapter that cannot be split: with dropout, or of a quantised weight."""
    dropout = any(not isinstance(one, nn.Identity) for one in layer.lora_dropout.values())
    if len(layer.lora_magnitude_vector) and (dropout or hasattr(layer.get_base_layer(), "coding")):
        what = "model.lora.dropout=0" if dropout else "model.quantize=null"
        raise Refusal.at(
            "model.lora.dora",
            f"{name}: parallel.tensor_parallel splits DoRA only without dropout and without quantised weights",
            f"set {what}, model.lora.dora=false, or parallel.tensor_parallel=1",
            code="unfit-adapter",
        )


def _expert_plan(config: Any) -> dict[str, str]:
    """Returns the expert-parallel plan of a config."""
    return getattr(config, "base_model_ep_plan", None) or {}


def part_shapes(
    model: nn.Module, decoder: nn.Module, styles: dict[str, Style], size: int
) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parts that a rank of `size` ranks has of the trained parameters that are split, by
    name."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = {}
    for name, style in styles.items():
        module = decoder.get_submodule(name)
        for part, dimension in divided_dimensions(module, style).items():
            if (parameter := module.get_parameter(part)) in names:
                shape = list(parameter.shape)
                shape[dimension] //= size
                found[names[parameter]] = tuple(shape)
    return found


def divided_parameters(model: PreTrainedModel, size: int) -> int:
    """Returns the number of parameters that tensor parallelism splits over the ranks of a group of `size`."""
    if size == 1:
        return 0
    found = 0
    for name, style in styles_of(model, size).items():
        module = inner_decoder(model).get_submodule(name)
        found += sum(module.get_parameter(part).numel() for part in divided_dimensions(module, style))
    return found


def _matches(pattern: str, name: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"\d+"), name) is not None


def _refuse_module(name: str, module: nn.Module, style: Style, size: int) -> None:
    if style == "shared":
        return
    if style == "experts":
        count = vars(module).get("num_experts")
        if not isinstance(count, int) or any(len(parameter) != count for parameter in module.parameters()):
            raise Indivisible(f"{name} does not stack its experts in the first dimension")
        if count % size:
            raise Indivisible(f"{name} has {count} experts, not divisible by {size}")
        return
    if not isinstance(module, nn.Linear):
        raise Indivisible(f"{name} is a {type(module).__name__}, not a linear layer")
    if style == "rows" and isinstance(module, QuantizedLinear) and module.coding.format == "nf4":
        _refuse_blocks(name, module, size)
    side = module.out_features if style == "columns" else module.in_features
    if side % size:
        raise Indivisible(f"{name} has {side} {'outputs' if style == 'columns' else 'inputs'}, not divisible by {size}")


def _refuse_blocks(name: str, module: nn.Linear, size: int) -> None:
    """Raises `Refusal` if a split of the inputs would divide a block of values with a common scale."""
    if module.in_features % (NF4_BLOCK * size):
        raise Refusal.at(
            KEY,
            f"{name} has {module.in_features} inputs, which {size} processes cannot divide into blocks of {NF4_BLOCK}",
            f"add {name.rpartition('.')[2]} to model.quantize_exclude, use model.quantize=int8 or fp8, or set {KEY}=1",
            code="indivisible",
        )


def refuse_heads(config: Any, size: int) -> None:
    """Raises `Indivisible` if the number of attention heads is not divisible by the group size."""
    text = text_config(config)
    query = layer_sizes(text, "num_attention_heads")
    heads = {"query": query, "key/value": layer_sizes(text, "num_key_value_heads") or query}
    if not query:
        raise Indivisible("its configuration does not say how many attention heads it has")
    for kind, counts in heads.items():
        count = next((count for count in counts if count % size), None)
        if count is not None:
            fitting = ", ".join(str(number) for number in _divisors(*(n for counts in heads.values() for n in counts)))
            why = f"its {count} {kind} heads cannot be divided over {size} processes"
            raise Indivisible(why, f"set parallel.tensor_parallel to one of {fitting}")


def _divisors(*counts: int) -> Iterator[int]:
    return (number for number in range(1, min(counts) + 1) if not any(count % number for count in counts))
