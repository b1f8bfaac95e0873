"""Parameter counts and activation sizes of the models of a run, from their configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.device.base import Device
from lockstep.errors import refuse_all
from lockstep.kernels.fused_modules import fused_feed_forwards
from lockstep.kernels.logprob import FUSED_CHUNK_BYTES
from lockstep.kernels.quantized.formats import quantized_bytes
from lockstep.kernels.quantized.projections import projections
from lockstep.kernels.tiled_mlp import untiled
from lockstep.methods import METHODS
from lockstep.model.adapters.active import TRAINED, lora_layers
from lockstep.model.adapters.expert_adapters import innermost
from lockstep.model.decoder import decoder_layers, inner_decoder
from lockstep.model.division.expert_plan import expert_modules
from lockstep.model.division.tensor_plan import divided_parameters, part_shapes, styles_of, with_adapters
from lockstep.model.load import load_config
from lockstep.model.load_folder import DTYPES
from lockstep.model.lora import with_adapter
from lockstep.model.quantized.quantize import adapted_stacks, quantizable, stacks_of
from lockstep.model.resolve import checked_adapter
from lockstep.model.streamed import loaded_whole
from lockstep.model.text_model import layer_sizes, model_on_meta, text_config, text_sizes
from lockstep.model.towers.vision_model import freeze_towers, loaded_kind
from lockstep.optimizers.roles import roles_of
from lockstep.optimizers.rule_table import refuse_parts, scratch_bytes_of, state_bytes_of
from lockstep.optimizers.update_rule import Roles
from lockstep.parallel.sharding import Grid
from lockstep.parallel.tensor import Style
from lockstep.preflight.state_sizes import recurrent_activations
from lockstep.preflight.tower_sizes import TowerSizes
from lockstep.recipe import Recipe
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.optim_checks import unmatched_groups
from lockstep.recipe.registry import ENGINES
from lockstep.recipe.schema import Model
from lockstep.reward.model import reward_config
from lockstep.reward.process_model import process_config

# The memory of reward models, computed from their configurations.


def reward_bytes(recipe: Recipe) -> int:
    """Returns the bytes of `reward.model` and `reward.process` in their stored precision. Reward models are not
    sharded: every device has a full copy."""
    if recipe.method not in ONLINE:
        return 0
    from transformers import AutoModelForSequenceClassification

    named = recipe.reward.model or []
    found = [
        (AutoModelForSequenceClassification, reward_config(path))
        for path in ([named] if isinstance(named, str) else named)
    ]
    if recipe.reward.process is not None:
        found.append((loaded_kind(recipe.model), process_config(recipe.reward.process)))
    return sum(_weights(kind, config) for kind, config in found)


def _weights(kind: Any, config: Any) -> int:
    model = model_on_meta(config, kind)
    # If the configuration has no dtype, transformers takes the dtype of the weight files. For such a configuration,
    # fp32 is assumed as the upper bound.
    size = (getattr(config, "dtype", None) or torch.float32).itemsize
    return sum(parameter.numel() for parameter in model.parameters()) * int(size)


# Parameter counts from shapes.


# How many values are dequantised at once, which limits the fp32 copies.
PIECE = 2**24


class Coded(NamedTuple):
    """The weights of a model that `model.quantize` stores as codes: their number, the bytes of codes and scales, and
    the number of elements of the largest matrix, which is dequantised at once."""

    parameters: int = 0
    bytes: int = 0
    largest: int = 0

    @classmethod
    def of(cls, model: Any, settings: Model) -> Coded:
        if settings.quantize is None:
            return NOT_CODED
        shapes = []
        for _, module in _quantizable(model, settings):
            names = ["weight"] if isinstance(module, nn.Linear) else stacks_of(module)
            shapes += [tuple(module.get_parameter(name).shape) for name in names]
        sizes = [quantized_bytes(shape, settings.quantize, settings.double_quantize) for shape in shapes]
        return cls(sum(map(prod, shapes)), sum(sizes), max(map(prod, shapes)))

    def weight_bytes(self, parameters: int, size: int) -> int:
        """Returns the bytes of a model with so many parameters, of which those that are not coded have `size` bytes."""
        return (parameters - self.parameters) * size + self.bytes

    def workspace(self, size: int) -> int:
        """Returns the bytes of the largest dequantised matrix, and of the fp32 pieces from which it is computed: index,
        value and product."""
        return self.largest * size + min(self.largest, PIECE) * 12


NOT_CODED = Coded()


def _quantizable(model: Any, settings: Model) -> list[tuple[str, nn.Module]]:
    if settings.quantize is None:
        return []
    return list(quantizable(model, settings.quantize_exclude, "model.path"))


@dataclass(frozen=True)
class Counted:
    """The parameter counts of the policy (`parameters`), of its trained part, and of each frozen model by its offload
    key."""

    parameters: int
    trained: int
    divided: int
    """The number of parameters that tensor parallelism divides."""
    largest: int
    """The number of parameters of the largest trained tensor."""
    layer: int
    """The number of parameters of the largest layer, before tensor parallelism divides it."""
    outside: int
    """The number of parameters outside the layers: embedding, output head, final norm."""
    whole: str | None
    """The reason why every process loads the full model into host memory, or None if it does not."""
    fused: bool
    """Whether the fused kernels support the feed-forward of every layer. Adapters are not considered."""
    frozen: dict[str, int]
    reward: int = 0
    """Bytes of the reward models, which keep their stored precision and are not sharded."""
    coded: Coded = NOT_CODED
    """The policy's weights that are stored as codes."""
    frozen_coded: dict[str, Coded] = field(default_factory=dict)
    """The weights of each frozen model that are stored as codes."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shapes of the trained parameters by name."""
    roles: Roles = field(default_factory=Roles)
    dora_outputs: int = 0
    """The number of outputs of all layers with DoRA adapters."""
    dora_weight: int = 0
    """The number of parameters of the largest weight with a DoRA adapter, whose norms each forward pass computes."""
    tileable: bool = False
    """Whether `model.tiled_mlp` supports the layers."""
    view: int = 0
    """Bytes of the quantised weights with which the native engine generates (`rollout.precision`)."""
    tower: TowerSizes | None = None
    """The vision tower, if it is loaded."""
    experts: int = 0
    """The number of parameters that expert parallelism divides."""
    expert_layers: int = 0
    """The number of layers whose experts expert parallelism divides."""
    _states: dict[Any, int] = field(default_factory=dict, repr=False, compare=False)
    """Results of `state_bytes`, which a search for settings asks for many times."""

    def weight_bytes(self, size: int) -> int:
        """Returns the bytes of the policy's weights, of which those that are not quantised have `size` bytes each."""
        return self.coded.weight_bytes(self.parameters, size)

    def frozen_bytes(self, size: int) -> dict[str, int]:
        return {
            key: self.frozen_coded.get(key, NOT_CODED).weight_bytes(count, size) for key, count in self.frozen.items()
        }

    def state_bytes(self, recipe: Recipe, more: Mapping[str, tuple[int, ...]] | None = None) -> int:
        """Returns the bytes of the optimizer state, unsharded: fp32 master weights and the tensors of the update rule.
        `more` has the shapes of further parameters."""
        masters, dtype = bool(recipe.model.master_weights), DTYPES[recipe.model.dtype]
        key = (repr(recipe.optim), masters, dtype, tuple(more or ()))
        if key not in self._states:
            shapes = {**self.shapes, **(more or {})}
            self._states[key] = state_bytes_of(recipe.optim, self.roles, shapes, dtype, masters)
        return self._states[key]

    def scratch_bytes(self, recipe: Recipe, shards: int) -> int:
        """Returns the bytes of temporary tensors of an optimizer step on each device."""
        return scratch_bytes_of(recipe.optim, self.roles, self.shapes, shards)


def count_parameters(recipe: Recipe, config: Any) -> Counted:
    """Counts the parameters of the run's models, which are built on the meta device without weights."""
    base = model_on_meta(config, loaded_kind(recipe.model))
    freeze_towers(base, recipe.model)
    with torch.device("meta"):
        # Norms, biases and adapters are too small to count separately for tensor parallelism.
        divided = divided_parameters(base, recipe.parallel.tensor_parallel)
        styles = styles_of(base, recipe.parallel.tensor_parallel) if recipe.parallel.tensor_parallel > 1 else {}
        expert, tensor = recipe.parallel.expert_parallel, recipe.parallel.tensor_parallel
        names = expert_modules(base, expert * tensor) if expert > 1 else []
        layers, whole = decoder_layers(base), loaded_whole(base, DTYPES[recipe.model.dtype])
        view, tower = _view_bytes(recipe, layers), TowerSizes.of(base)
        fused = recipe.model.attention != "sdpa" and fused_feed_forwards(base) == text_sizes(config).layers
        coded, tileable = Coded.of(base, recipe.model), untiled(layers) is None
        quantized = {name: stacks_of(module) for name, module in _quantizable(base, recipe.model)}
        model = with_adapter(base, recipe.model.lora, 0, checked_adapter(recipe.model))
        adapter = getattr(model, "peft_config", {}).get(TRAINED)
        refuse_all(list(adapted_stacks(quantized, getattr(adapter, "target_parameters", None) or ())))
        styles = with_adapters(inner_decoder(base), styles)  # refuses adapters that cannot be divided
        names = innermost(inner_decoder(base), names)
        stacks = [inner_decoder(base).get_submodule(name) for name in names]
    parameters = sum(p.numel() for p in model.parameters())
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if p.requires_grad}
    refuse_all(list(unmatched_groups(recipe.optim, shapes)) if _trains_policy(recipe) else [])
    roles, parts = roles_of(model), part_shapes(model, inner_decoder(base), styles, recipe.parallel.tensor_parallel)
    by_experts: dict[str, Style] = dict.fromkeys(names, "experts")
    parts |= part_shapes(model, inner_decoder(base), by_experts, expert * tensor)
    refuse_parts(recipe.optim, roles, shapes, parts)
    trained = [prod(shape) for shape in shapes.values()]
    own = parameters - (sum(trained) if recipe.model.lora is not None else 0)
    frozen, frozen_coded = _frozen(recipe, own, coded)
    each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    outside, largest = parameters - sum(each), max(trained, default=0)
    sizes = (parameters, sum(trained), divided, largest, max(each, default=0), outside)
    dora = [layer for _, layer in lora_layers(model) if len(layer.lora_magnitude_vector)]
    weights = [layer.out_features * layer.in_features for layer in dora]
    outputs, weight = sum(layer.out_features for layer in dora), max(weights, default=0)
    return Counted(
        *sizes,
        whole,
        fused,
        frozen,
        reward_bytes(recipe),
        coded,
        frozen_coded,
        shapes,
        roles,
        dora_outputs=outputs,
        dora_weight=weight,
        tileable=tileable,
        view=view,
        tower=tower,
        experts=sum(one.numel() for module in stacks for one in module.parameters()),
        expert_layers=len(stacks),
    )


def _view_bytes(recipe: Recipe, layers: list[nn.Module]) -> int:
    """Returns the bytes of the view of `rollout.precision`. Projections of recurrent modules are counted too, although
    the view does not have them, because these modules are known only after a forward pass."""
    precision = recipe.rollout.precision
    if recipe.method not in ONLINE or precision is None or ENGINES[recipe.rollout.engine].served:
        return 0
    shapes = [(one.out_features, one.in_features) for one in projections(layers).values()]
    return sum(quantized_bytes(shape, precision) for shape in shapes)


def _trains_policy(recipe: Recipe) -> bool:
    """Returns whether the run trains a language model. The parameters of a reward model have other names."""
    return recipe.method in ONLINE or METHODS[recipe.method].model == "policy"


def gathered_beside(counted: Counted, config: Any, grid: Grid, size: int) -> tuple[int, int]:
    """Returns the bytes of gathered weights on a device of several, beside its shards, if a parameter that is not
    quantised has `size` bytes: the most, when a pass begins, and those that stay until the end of the backward pass.
    The root gathers the parameters outside the layers, first into a buffer. They stay with one layer and its buffer."""
    inside = counted.parameters - counted.outside
    each = counted.coded.weight_bytes(inside, size) / max(1, inside)
    layer, outside = int(_layer_here(counted, config, grid) * each), counted.outside * size
    return outside + 2 * layer + max(outside, layer), outside + 2 * layer


def _layer_here(counted: Counted, config: Any, grid: Grid) -> int:
    """Returns the parameters of a layer that a device gathers. Expert parallelism leaves the experts of the other ranks
    of the group where they are."""
    kept = counted.divided // grid.tensor
    others = counted.experts // grid.tensor - counted.experts // (grid.tensor * grid.expert)
    return counted.layer - (counted.divided - kept + others) // text_sizes(config).layers


def reduced_beside(counted: Counted, config: Any, grid: Grid, size: int) -> tuple[int, int]:
    """Returns the bytes of unsharded gradients on a device of several, with the fp32 buffer in which they are reduced:
    in a layer, beside the gradient of the output head, which waits for the end of the backward pass, and at this end,
    outside the layers. With an adapter, only the adapters of a layer are counted."""
    each, sizes = size + 4, text_sizes(config)
    if counted.trained < counted.parameters:
        layer = counted.trained // sizes.layers * each
        return layer, layer
    head = sizes.vocabulary * sizes.hidden * size
    return _layer_here(counted, config, grid) * each + head, counted.outside * each


def loaded_beside(counted: Counted, config: Any, grid: Grid, size: int) -> int:
    """Returns the extra bytes that a device holds for a moment while a sharded model loads: those of its first pass, or
    the model in host memory. The trials of fused operators need less memory."""
    inside = counted.parameters - counted.outside
    each, kept = counted.coded.weight_bytes(inside, size) / max(1, inside), counted.divided // grid.tensor
    # If the full model is in host memory, it is divided over the tensor-parallel ranks before it is sharded.
    split = int((kept - kept // grid.shard) * each) if counted.whole and grid.tensor > 1 else 0
    return max(gathered_beside(counted, config, grid, size)[0], split)


def _frozen(recipe: Recipe, own: int, coded: Coded) -> tuple[dict[str, int], dict[str, Coded]]:
    """Returns the parameter count of a frozen reference or teacher by its offload key, and its quantised weights. `own`
    and `coded` are those of the policy's model, which may also be the reference."""
    if reference_kind(recipe) == "model":
        key, folder = "offload_reference", reference_folder(recipe)
        if folder == recipe.model.path:
            return {key: own}, {key: coded}
    elif recipe.distill.teacher is not None and recipe.distill.top_k is None:
        key, folder = "offload_teacher", recipe.distill.teacher
    else:
        return {}, {}
    model = model_on_meta(load_config(folder), loaded_kind(recipe.model))
    return {key: sum(p.numel() for p in model.parameters())}, {key: Coded.of(model, recipe.model)}


# Activation and KV cache sizes of layers and head, from shapes.


class LayerKernels(NamedTuple):
    """Which fused kernels the layers use, and how they run the feed-forward. Both change which activations are
    stored."""

    lean: bool = False
    """Norms, rotary and attention use the device's fused kernels."""
    fused: bool = False
    """The feed-forward also uses the device's fused kernels."""
    tile: int | None = None
    """The tokens that the feed-forward computes at a time (`model.tiled_mlp`), or None for all."""

    @property
    def wide(self) -> int:
        """The number of tensors as wide as the feed-forward that it keeps: gate, up, act(gate) and their product. The
        device's kernels recompute act(gate), and without adapters also the product."""
        return 2 if self.fused else 3 if self.lean else 4

    def tiles(self, tokens: int) -> bool:
        """Returns whether the feed-forward of a micro-batch of `tokens` tokens runs in tiles."""
        return self.tile is not None and tokens > self.tile


def kernels_of(recipe: Recipe, counted: Counted, device: Device | type[Device], devices: int) -> LayerKernels:
    model = recipe.model
    # In fp32, torch computes the attention and keeps copies of its inputs, so fused layers save no memory.
    half = DTYPES[model.dtype].itemsize < 4
    own = device.lean_layers and devices == 1 and counted.fused
    lean = own and half and not (model.lora and model.lora.dropout)
    return LayerKernels(lean, own and model.lora is None, model.tiled_mlp)


def activation_bytes(
    config: Any, tokens: int, size: int, checkpointing: bool, kernels: LayerKernels | None = None, *, tensor: int = 1
) -> int:
    """Returns the bytes that the decoder layers keep for the backward pass, computed from the tensors of a Llama-like
    layer.

    Each layer keeps for each token: the inputs of two norms and of the projections, queries, keys, values, attention
    output, and four tensors as wide as the feed-forward (`LayerKernels.wide`). Norms also keep fp32 copies of their
    input. Layers with fused norms, rotary and attention (`lean`) keep no fp32 copies, and keep queries, keys and values
    once. A feed-forward in tiles keeps only its input; one tile of one layer is computed again at a time.
    """
    kernels, layers = kernels or LayerKernels(), text_sizes(config).layers
    narrow = _narrow_by_layer(config, tokens, size, kernels, tensor)
    wide = feed_forward_bytes(config, tokens, size, kernels, tensor=tensor)
    if checkpointing:
        scratch = max((one.scratch for one in recurrent_activations(config) if one), default=0)
        once = max(max(narrow), min(narrow) + tokens * size * scratch if kernels.lean else 0)
        return layers * tokens * text_sizes(config).hidden * size + once + wide
    return sum(narrow) + (1 if kernels.tiles(tokens) else layers) * wide


def _narrow_bytes(config: Any, tokens: int, size: int, kernels: LayerKernels, tensor: int) -> int:
    """Returns the bytes that a layer with attention keeps outside its feed-forward, with the feed-forward's input."""
    hidden, _, heads, key_heads, head_size, _, _ = text_sizes(config)
    attention = (1 if kernels.lean else 3) * (heads + 2 * key_heads) * head_size + heads * head_size
    copies = 0 if kernels.lean else 2 * 2 * 4 * hidden
    # Tensor parallelism divides attention heads and feed-forward, but not the residual stream.
    return tokens * (size * (4 * hidden + attention // tensor) + copies)


def _narrow_by_layer(config: Any, tokens: int, size: int, kernels: LayerKernels, tensor: int) -> list[int]:
    """Returns the bytes that each layer keeps outside its feed-forward."""
    whole = _narrow_bytes(config, tokens, size, kernels, tensor)
    bare = tokens * text_sizes(config).hidden * (4 * size + (0 if kernels.lean else 2 * 2 * 4))
    sizes = []
    for one in recurrent_activations(config) or [None] * text_sizes(config).layers:
        recurrent = tokens * one.kept(size, kernels.lean) if one else 0
        sizes.append(recurrent + (whole if one is None or one.with_attention else bare))
    return sizes


def feed_forward_bytes(config: Any, tokens: int, size: int, kernels: LayerKernels, *, tensor: int = 1) -> int:
    """Returns the bytes of the wide tensors that a feed-forward keeps for its backward pass: of all tokens, or of one
    tile."""
    kept = min(tokens, kernels.tile or tokens)
    return kept * size * (kernels.wide * text_sizes(config).inner // tensor)


def layer_bytes(config: Any, tokens: int, size: int, kernels: LayerKernels, *, tensor: int = 1) -> int:
    """Returns the bytes that one layer keeps, with the wide tensors of its feed-forward or of one tile."""
    wide = feed_forward_bytes(config, tokens, size, kernels, tensor=tensor)
    return _narrow_bytes(config, tokens, size, kernels, tensor) + wide


def backward_bytes(config: Any, tokens: int, size: int, kernels: LayerKernels, *, tensor: int = 1) -> int:
    """Returns the most bytes of one layer while its backward pass runs: of its feed-forward or of its attention, with
    gradients and workspace.

    The kernel of a fused feed-forward writes gradients over the tensors that it kept. With adapters, the gradients of
    the product, gate and up are new tensors. The backward pass of the attention has the gradients of the residual
    stream, of the attention output, and of queries, keys and values. Flash attention adds up the gradient of the
    queries in fp32, and has the gradients of keys and values for every query head before it sums them by group. For
    layers without fused kernels, the estimate of what they keep covers their gradients.
    """
    hidden, inner, heads, key_heads, head_size, _, _ = text_sizes(config)
    kept = _narrow_bytes(config, tokens, size, kernels, tensor)
    wide = feed_forward_bytes(config, tokens, size, kernels, tensor=tensor)
    if not kernels.lean:
        return kept + wide
    if not kernels.fused:
        wide += 3 * min(tokens, kernels.tile or tokens) * size * inner // tensor
    queries, keys = heads * head_size, 2 * key_heads * head_size
    grouped = 2 * queries if key_heads < heads else 0
    gradients = size * (hidden + (2 * queries + keys + grouped) // tensor) + 4 * queries // tensor
    # The inputs of the second norm and of the feed-forward are freed before the attention runs.
    return kept + max(wide, tokens * (gradients - 2 * size * hidden))


def tile_sums(config: Any, size: int, kernels: LayerKernels, tokens: int, trained: bool, *, tensor: int = 1) -> int:
    """Returns the bytes of the fp32 gradients of one feed-forward, which its tiles add up before they are rounded."""
    if not (trained and size < 4 and kernels.tiles(tokens)):
        return 0
    return 4 * 3 * text_sizes(config).hidden * text_sizes(config).inner // tensor


def kept_by_layer(
    config: Any, tokens: int, size: int, checkpointing: bool, kernels: LayerKernels, *, tensor: int = 1
) -> int:
    """Returns the bytes that one layer keeps until its backward pass, on average. With checkpointing, the layer keeps
    only its input."""
    if checkpointing:
        return tokens * text_sizes(config).hidden * size
    wide = 0 if kernels.tiles(tokens) else feed_forward_bytes(config, tokens, size, kernels, tensor=tensor)
    narrow = _narrow_by_layer(config, tokens, size, kernels, tensor)
    return sum(narrow) // len(narrow) + wide


# Config keys of models that select tokens by scores. They run on right-padded rows with dense masks (`rows.py`).
SELECTED_COUNTS = ("index_topk", "index_topk_blocks", "keep_window_size")


def selects_tokens(config: Any) -> bool:
    return any(layer_sizes(text_config(config), name) for name in SELECTED_COUNTS)


def selection_bytes(config: Any, tokens: int, longest: int, size: int, masks: int) -> int:
    """Returns the bytes of `masks` dense masks over rows of `longest` tokens, and of the fp32 scores of one indexer.
    Returns 0 for models that select no tokens."""
    if not selects_tokens(config):
        return 0
    heads = max(layer_sizes(text_config(config), "index_n_heads"), default=1)
    return tokens * longest * (size * masks + 4 * heads)


def head_bytes(config: Any, tokens: int, head_trained: bool) -> int:
    """Returns the bytes of one chunk of logits with its working copies, plus those of the output head's fp32
    gradient."""
    sizes = text_sizes(config)
    chunk = min(FUSED_CHUNK_BYTES, 3 * 4 * sizes.vocabulary * tokens)
    return chunk + (4 * sizes.vocabulary * sizes.hidden if head_trained else 0)


def micro_batch_tokens(recipe: Recipe, config: Any, rows: int, longest: int) -> int:
    """Returns the tokens per device of the largest micro-batch. Models that select tokens pad all sequences of a
    micro-batch to the longest one."""
    most = min(recipe.batch.micro_batch_size or rows, rows) * longest
    if selects_tokens(config):
        return most
    return -(-min(recipe.line_tokens or most, most) // recipe.parallel.context_parallel)


def one_micro_batch(recipe: Recipe, rows: int, longest: int) -> bool:
    """Returns whether an update fits into one micro-batch even if all rows have the maximum length."""
    fits_rows = recipe.batch.micro_batch_size is None or recipe.batch.micro_batch_size >= rows
    return fits_rows and (recipe.line_tokens is None or recipe.line_tokens >= rows * longest)
