"""How many numbers the models of a run have, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from lockstep.kernels.plain_modules import fused_feed_forwards
from lockstep.model.decoder import decoder_layers, inner_decoder
from lockstep.model.load import DTYPES, load_config, with_lora
from lockstep.model.streamed import loaded_whole
from lockstep.model.tensor_plan import divided_parameters, styles_of, with_adapters
from lockstep.parallel.mesh import Grid
from lockstep.recipe import Recipe
from lockstep.recipe.methods import reference_folder, reference_kind
from lockstep.train.plan_reward import reward_bytes


@dataclass(frozen=True)
class Counted:
    """Numbers of parameters: of the policy, those that are trained, and of what is frozen beside it, by the key that
    keeps it on the host."""

    parameters: int
    trained: int
    divided: int
    """Those that the ranks of a tensor group divide."""
    largest: int
    """Those of the largest tensor that is trained."""
    layer: int
    """Those of the largest layer, whole."""
    outside: int
    """Those that no layer has: the embedding, the output head, the last norm."""
    whole: str | None
    """Why every process loads the whole model into the host's memory, where that is so."""
    fused: bool
    """Whether every feed-forward is one that devices with lean layers have fused, where no adapter is in it."""
    frozen: dict[str, int]
    reward: int = 0
    """Bytes of the reward models, which have a precision of their own and are whole on every device."""


def count_parameters(recipe: Recipe, config: Any) -> Counted:
    """From shapes alone: the models are built without storage."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
        # The norms, biases and adapters of a tensor group are too small to count apart.
        divided = divided_parameters(base, recipe.parallel.tensor)
        styles = styles_of(base, recipe.parallel.tensor) if recipe.parallel.tensor > 1 else {}
        layers, whole = decoder_layers(base), loaded_whole(base, DTYPES[recipe.model.dtype])
        fused = recipe.model.attention != "sdpa" and fused_feed_forwards(base) == config.num_hidden_layers
        model = with_lora(base, recipe.model.lora, seed=0)
        with_adapters(inner_decoder(base), styles)  # refuses layers that cannot be divided with an adapter
    parameters = sum(p.numel() for p in model.parameters())
    trained = [p.numel() for p in model.parameters() if p.requires_grad]
    frozen = _frozen(recipe, parameters - (sum(trained) if recipe.model.lora is not None else 0))
    each = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    outside, largest = parameters - sum(each), max(trained, default=0)
    sizes = (parameters, sum(trained), divided, largest, max(each, default=0), outside)
    return Counted(*sizes, whole, fused, frozen, reward_bytes(recipe))


def loaded_beside(counted: Counted, config: Any, grid: Grid) -> int:
    """Numbers that a device has for a moment beside its slices, while a sharded model is loaded: in the pass that
    enters it, what no layer has is gathered, and of the layers one, in the buffer that it came in, while that of the
    layer before it is there still. Fused operators, which are tried one layer at a time, hold less."""
    kept = counted.divided // grid.tensor
    layer = counted.layer - (counted.divided - kept) // max(1, config.num_hidden_layers)
    entered = counted.outside + 2 * layer + max(counted.outside, layer)
    # What every process has whole on the host is divided over a tensor group before it is sliced.
    parted = kept - kept // grid.shard if counted.whole and grid.tensor > 1 else 0
    return max(entered, parted)


def _frozen(recipe: Recipe, own: int) -> dict[str, int]:
    """Parameters of a reference or a teacher beside what is trained; `own` are those of a reference that is the policy
    at its start."""
    if reference_kind(recipe) == "model":
        folder = reference_folder(recipe)
        return {"offload_reference": own if folder == recipe.model.path else _parameters_of(folder)}
    if recipe.distill.teacher is not None and recipe.distill.top_k is None:
        return {"offload_teacher": _parameters_of(recipe.distill.teacher)}
    return {}


def _parameters_of(folder: str) -> int:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(load_config(folder), trust_remote_code=False)
    return sum(p.numel() for p in model.parameters())
