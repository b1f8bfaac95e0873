"""Loads transformers models from a local Hugging Face folder, splits them over ranks, and fuses their operators.

`load.py` resolves model names to local folders before it calls this module.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.kernels.fused import fuse, fuse_adapters
from lockstep.kernels.quantized.formats import dequantize, quantize
from lockstep.kernels.quantized.quantized_linear import QuantizedLinear
from lockstep.model.adapters.active import TRAINED, saved_copies
from lockstep.model.adapters.divided_dora import divide_dora
from lockstep.model.adapters.expert_adapters import adapt_experts, innermost
from lockstep.model.adapters.lora_init import ReadWeight, fill_norms, unset_norms
from lockstep.model.check import enter
from lockstep.model.decoder import inner_decoder
from lockstep.model.division.expert_plan import expert_modules, without_experts
from lockstep.model.division.tensor_plan import styles_of, with_adapters
from lockstep.model.lora import NewAdapter
from lockstep.model.pretrained import pretrained, refuse_not_finite, unused_weights
from lockstep.model.quantized.quantize import quantize_loaded
from lockstep.model.quantized.quantized_folder import needs_dequantizing, readable_quantization
from lockstep.model.streamed import InFiles, Streamed, blocks_of, streamed
from lockstep.model.text_model import no_language_model
from lockstep.parallel.expert import divide_experts
from lockstep.parallel.sharding import Sharding, shard, unit_gathered
from lockstep.parallel.tensor import Style, divide
from lockstep.parallel.world import refused_together
from lockstep.recipe.schema import Model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class ModelFolders(NamedTuple):
    """The local folders to which `model.path` and `model.lora.adapter` were resolved."""

    model: str
    adapter: str | None = None


def config_of(folder: str, name: str | None = None) -> Any:
    """Returns the transformers config of a language model. `name` is the model name or path in the recipe, for error
    messages."""
    from transformers import AutoConfig

    where = f"model.path {name or folder}"
    config = pretrained(AutoConfig, folder, where, "its config.json")
    if readable_quantization(Path(folder)) is not None:
        del config.quantization_config  # lockstep reads the weights itself, without transformers' layers
    if reason := no_language_model(config):
        remedy = "use a model that `lockstep help models` lists as supported"
        raise Refusal.at(where, reason, remedy, code="unsupported-model")
    return config


def load_transformers(kind: Any, folder: str, dtype: str, name: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Loads a model with the transformers Auto class `kind` and lockstep's attention. Also returns the loading info of
    transformers. `name` is the model name or path in the recipe, for error messages."""
    register_attention()
    prepare_products(DTYPES[dtype])
    config, where = config_of(folder, name), f"model.path {name or folder}"
    how = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION, "output_loading_info": True}
    model, info = pretrained(kind, folder, where, "its weights", config=config, **how)
    refuse_not_finite(dict(model.named_parameters()), where)
    return model, {**info, "unused": unused_weights(model, info["unexpected_keys"], where)}


def stream_transformers(kind: Any, folder: str, dtype: str, name: str | None = None) -> Streamed | None:
    """Builds the model without weights. The weights are read from the files when the model is sharded. Returns None if
    the weights of this model cannot be read one by one."""
    register_attention()
    prepare_products(DTYPES[dtype])
    config = config_of(folder, name)
    how = {"dtype": DTYPES[dtype], "attn_implementation": ATTENTION}
    return streamed(
        lambda: kind.from_config(config, trust_remote_code=False, **how), folder, f"model.path {name or folder}"
    )


def has_codes(settings: Model, folder: str) -> bool:
    """Returns whether the model is quantised by the recipe, or stored quantised in its folder. Such a model is read
    tensor by tensor, and not by transformers."""
    return settings.quantize is not None or readable_quantization(Path(folder)) is not None


def load_base(
    kind: Any, folder: str, settings: Model, name: str | None, device: torch.device, sharding: Sharding | None
) -> tuple[Streamed | None, Any, dict[str, Any]]:
    """Returns the source from which weights are streamed (or None), the model, and its loading info. If a source is
    returned, the model has no weights yet. A quantised model is streamed for one device too, so that its original
    weights are never in memory together."""
    quantized, dtype = settings.quantize is not None, settings.dtype
    source = None
    if sharding is not None or has_codes(settings, folder):
        source = stream_transformers(kind, folder, dtype, name)
    if source is not None:
        if quantized:
            source.quantize(settings, DTYPES[dtype])
        if sharding is None:
            source.load(device)
        return source if sharding is not None else None, source.model, {"unused": source.unused}
    if readable_quantization(Path(folder)) is not None:
        raise needs_dequantizing(folder, f"model.path {name or folder}", "its tensors cannot be read one by one")
    if not quantized:
        return None, *load_transformers(kind, folder, dtype, name)
    # The codes are computed from the values in the files, which fp32 represents exactly.
    model, info = load_transformers(kind, folder, "fp32", name)
    prepare_products(DTYPES[dtype])
    size = sum(parameter.numel() for parameter in model.parameters()) * 4 / 2**30
    why = f"the tensors of {name or folder} cannot be read one by one"
    warnings.warn(f"model.quantize: {why}: all of it is in host memory first ({size:.1f} GiB, fp32)", stacklevel=2)
    quantize_loaded(model, settings, DTYPES[dtype], f"model.path {name or folder}")
    return None, model, info


class ModelDivision(NamedTuple):
    """How tensor parallelism splits each module, and the experts modules that expert parallelism divides."""

    styles: dict[str, Style]
    experts: list[str]


def division_of(model: PreTrainedModel, sharding: Sharding | None) -> ModelDivision:
    """Returns how the model is split over ranks. Call this function before adapters wrap the modules."""
    if sharding is None:
        return ModelDivision({}, [])
    styles = {} if sharding.tensor is None else styles_of(model, sharding.tensor.size)
    if sharding.expert is None:
        return ModelDivision(styles, [])
    experts = expert_modules(model, sharding.expert.mesh.size())
    return ModelDivision(without_experts(styles, inner_decoder(model)), experts)


def new_adapter(
    settings: Model, kind: Any, folder: str, seed: int, source: Streamed | None, sharding: Sharding | None
) -> NewAdapter:
    """Returns how the adapter of a model is created. The weights of a streamed model are not loaded yet, so an adapter
    that depends on them reads them from the files. A LoftQ adapter reads the weights before quantisation. `kind` is the
    transformers Auto class of the model."""
    shared = sharding is not None
    if settings.lora is not None and settings.lora.init == "loftq":
        return NewAdapter(seed, _rounding_errors(settings, kind, folder, sharding), shared)
    if source is None or sharding is None:
        return NewAdapter(seed, shared=shared)
    return NewAdapter(seed, lambda name, base: source.read(base.get_parameter("weight")).to(sharding.device), shared)


def _rounding_errors(settings: Model, kind: Any, folder: str, sharding: Sharding | None) -> ReadWeight:
    """Returns a function that computes the rounding error of the quantised weight of a layer, and None for a layer that
    is not quantised."""
    original = stream_transformers(kind, folder, settings.dtype, settings.path)
    if original is None:
        why = f"loftq needs the weights before quantisation, and those of {settings.path} cannot be read one by one"
        raise Refusal.at("model.lora.init", why, "set another model.lora.init", code="unsupported-model")
    places = {name: original.places[one] for name, one in original.model.named_parameters() if one in original.places}

    def error(name: str, base: nn.Module) -> torch.Tensor | None:
        if not isinstance(base, QuantizedLinear):
            return None
        # The decoder of a value model has shorter names than the language model.
        place = next(place for key, place in places.items() if f".{key}".endswith(f".{name}.weight"))
        weight = torch.cat([block for _, block in blocks_of(original.stored, place)])
        weight = weight if sharding is None else weight.to(sharding.device)
        codes = quantize(weight, base.coding.format, base.coding.double)
        return weight.float() - dequantize(codes, base.dtype).float()

    return error


def follow_copies(model: nn.Module, places: dict[nn.Parameter, InFiles]) -> None:
    """Adds the trained copies of modules (`modules_to_save`) to `places`: a new copy starts from the weights of its
    module. The copies of a stored adapter have values already."""
    for _, wrapper in saved_copies(model):
        copies = wrapper.modules_to_save[TRAINED].parameters()
        for original, copied in zip(wrapper.original_module.parameters(), copies, strict=True):
            if original in places and copied.device == original.device:
                places[copied] = places[original]


def divide_model(
    model: PreTrainedModel, division: ModelDivision, source: Streamed | None, sharding: Sharding | None, kernel: str
) -> None:
    """Fuses the adapters of the model, and splits the model over the ranks of its tensor- and expert-parallel groups.
    Call this function before other code reads the number of heads."""
    decoder = inner_decoder(model)
    adapt_experts(decoder)
    fuse_adapters(decoder, kernel)
    if sharding is None:
        return
    replaced: dict[nn.Parameter, nn.Parameter] = {}
    if sharding.tensor is not None:
        replaced |= divide(model, decoder, with_adapters(decoder, division.styles), sharding.tensor)
        divide_dora(decoder, division.styles, sharding.tensor)
    if sharding.expert is not None:
        replaced |= divide_experts(decoder, innermost(decoder, division.experts), sharding.expert)
    if source is not None:
        source.replaced(replaced)


def spread(root: Any, source: Streamed | None, sharding: Sharding | None, model: Any, kernel: str) -> None:
    """Shards a policy or value model (`root`) layer by layer and fuses the operators of `model` inside it. The weights
    come from the files or from host memory. Does nothing without sharding."""
    if sharding is None:
        return
    if source is None:
        shard(root, root.layers(), sharding)
    else:
        unset = unset_norms(model)
        with refused_together("weights"):
            source.shard(root, root.layers(), sharding)
        fill_norms(model, unset)
    enter(root, sharding.device)
    # The weights are gathered, because each fused operator is tested with the weights of its module.
    with unit_gathered(root):
        fuse(model, kernel, unit_gathered)


def kernel_of(settings: Model, kernel: str) -> str:
    return "sdpa" if settings.attention == "sdpa" else kernel
