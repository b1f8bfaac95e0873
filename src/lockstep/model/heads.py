"""Value models (critics and reward models): a decoder with a scalar head."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Refusal
from lockstep.kernels.fused import fuse
from lockstep.model.adapters.active import TRAINED, saved_copies
from lockstep.model.check import check_architecture
from lockstep.model.decoder import Decoder, decoder_layers
from lockstep.model.division.expert_plan import check_experts
from lockstep.model.division.tensor_trial import check_division
from lockstep.model.load_folder import (
    DTYPES,
    ModelFolders,
    config_of,
    divide_model,
    division_of,
    follow_copies,
    kernel_of,
    load_base,
    new_adapter,
    spread,
)
from lockstep.model.lora import put_adapter
from lockstep.model.text_model import LanguageModel, text_config
from lockstep.model.towers.vision_model import freeze_towers, loaded_kind, refuse_no_towers
from lockstep.model.weights import NONE, digits_of
from lockstep.parallel.sharding import Sharding
from lockstep.recipe.schema import Model
from lockstep.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ValueModel(nn.Module):
    """Computes a scalar per token. A critic's scalars are its value estimates. A reward model's score is the scalar at
    the last token."""

    def __init__(self, decoder: PreTrainedModel, head: nn.Linear, kernel: str):
        super().__init__()
        self.decoder, self.head, self.kernel = decoder, head, kernel
        self.runner = Decoder(decoder, kernel)
        self.digits = NONE
        self.unused: tuple[str, ...] = ()

    @property
    def stored(self) -> nn.Module:
        """The module whose trained weights are written to a checkpoint."""
        return self

    @property
    def alike_up_to(self) -> int | None:
        return self.runner.alike_up_to

    def layers(self) -> list[nn.Module]:
        return decoder_layers(self.decoder)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Computes values at the positions that predict `batch.targets_K`, in fp32."""
        hidden = self.runner(batch)
        hidden_KH = hidden.flatten(0, 1).index_select(0, batch.predictors_K)
        values_K = nn.functional.linear(hidden_KH, self.head.weight, self.head.bias)[:, 0].float()
        # If this rank has no targets, adding 0 * hidden keeps every parameter in the autograd graph, as in the policy.
        return values_K if len(batch.targets_K) else values_K + hidden.sum().float() * 0


def build_value_model(
    settings: Model,
    folders: ModelFolders,
    device: torch.device,
    kernel: str,
    seed: int,
    *,
    name: str | None = None,
    key: str = "critic.path",
    head_init: str = "zeros",
    sharding: Sharding | None = None,
) -> ValueModel:
    """Loads a value model. If the folder has a causal language model, the value model gets a new head (`head_init`). If
    the folder has a reward model or a critic of verl, the value model gets the head of that model. `name` is the model
    name or path in the recipe."""
    path = name or folders.model
    config = config_of(folders.model, name)
    check_architecture(config, path, DTYPES[settings.dtype], kernel_of(settings, kernel), device)
    check_division(config, path, kernel_of(settings, kernel), device, sharding)
    check_experts(config, path, kernel_of(settings, kernel), device, sharding)
    where = folders.model, settings, name, device, sharding
    kind = _kind_of(config, settings)
    if settings.vision is not None and not issubclass(kind, LanguageModel):
        raise Refusal.at(
            f"{key} {path}",
            "is a reward model or a critic, and with model.vision a value model starts from a vision-language model",
            "use the folder of the model from which it was trained",
            code="wrong-model-kind",
        )
    source, model, info = load_base(kind, *where)
    refuse_no_towers(model, settings, f"{key} {path}")
    if not issubclass(kind, LanguageModel):
        if model.num_labels != 1:
            raise Refusal.at(
                f"{key} {path}",
                f"its head returns {model.num_labels} numbers, not one",
                "use a reward model",
                code="wrong-model-kind",
            )
        decoder, head = model.base_model, model.score
    else:
        decoder = model.get_decoder() if settings.vision is None else _without_output_head(model, settings)
        head = _new_head(text_config(config), DTYPES[settings.dtype], head_init, seed)
    missing = [name for name in info.get("missing_keys", ()) if not name.startswith("lm_head")]
    if missing:
        raise Refusal.at(
            f"{key} {path}", f"the weights lack {missing[0]}", "use a complete model folder", code="missing-weight"
        )
    kernel = kernel_of(settings, kernel)
    try:
        if sharding is None:
            decoder.to(device)
            head.to(device)
            fuse(decoder, kernel)
        division = division_of(decoder, sharding)
        if settings.lora is not None:
            # Only the decoder gets adapters; all weights of the head are trained.
            new = new_adapter(settings, kind, folders.model, seed, source, sharding)
            put_adapter(decoder, settings.lora, new, None, folders.adapter)
            if source is not None:
                follow_copies(decoder, source.places)
        divide_model(decoder, division, source, sharding, kernel)
        value_model = ValueModel(decoder, head, kernel)
        if value_model.runner.images is not None:
            value_model.runner.images.cache_bytes = settings.vision_cache_gb * 2**30
        value_model.unused = tuple(info["unused"])
        if settings.lora is None:
            value_model.digits = digits_of(value_model, model, source, folders.model, DTYPES[settings.dtype])
        spread(value_model, source, sharding, decoder, kernel)
    except RuntimeError as error:
        refuse_trouble(error, device)
        raise
    if settings.tiled_mlp is not None:
        value_model.runner.tile_mlps(settings.tiled_mlp)
    if settings.gradient_checkpointing:
        decoder.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if settings.activation_offload:
        value_model.runner.keep_activations_on_host(device)
    return value_model.train()


def _without_output_head(model: Any, settings: Model) -> Any:
    """Returns a model with its towers, and without its output head."""
    freeze_towers(model, settings)
    model.lm_head = nn.Identity()
    return model


def _kind_of(config: Any, settings: Model) -> Any:
    """Returns the transformers Auto class of the folder. verl's critics are token classification models."""
    from transformers import AutoModelForSequenceClassification, AutoModelForTokenClassification

    kinds = {
        "ForSequenceClassification": AutoModelForSequenceClassification,
        "ForTokenClassification": AutoModelForTokenClassification,
    }
    names = config.architectures or []
    found = next((kind for end, kind in kinds.items() if any(name.endswith(end) for name in names)), None)
    return found or loaded_kind(settings)


def _new_head(config: Any, dtype: torch.dtype, init: str, seed: int) -> nn.Linear:
    """Returns a head of zeros without a bias, or a head of random weights and a bias of zero, as transformers makes it
    for token classification."""
    head = nn.Linear(config.hidden_size, 1, bias=init == "random", dtype=dtype)
    nn.init.zeros_(head.weight)
    if init == "random":
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            weight = torch.randn(1, config.hidden_size, generator=generator) * config.initializer_range
            head.weight.copy_(weight)
            head.bias.zero_()
    return head


def refuse_no_classifier(config: Any, settings: Model) -> None:
    """Raises `Refusal` if transformers has no sequence classification class for the architecture. Reward models are
    exported as sequence classification models."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    judged = classified_config(config, settings)
    if type(judged) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise Refusal.at(
            f"model.path {settings.path}",
            f"transformers has no sequence classification model for {judged.model_type}",
            "start from another architecture" + (", or remove model.vision" if settings.vision else ""),
            code="unsupported-model",
        )


def classified_config(config: Any, settings: Model) -> Any:
    """Returns the config of an exported reward model. Without `model.vision`, a reward model scores text only, so it is
    built from the text config of a nested config, without its towers."""
    return text_config(config) if settings.vision is None else config


def merge_adapters(decoder: nn.Module) -> None:
    """Merges every LoRA adapter of the decoder into its base layer, and puts trained copies in the place of their
    modules."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in list(decoder.named_modules()):
        if isinstance(layer, BaseTunerLayer):
            layer.merge()
            decoder.set_submodule(name, layer.get_base_layer())
    for name, wrapper in saved_copies(decoder):
        decoder.set_submodule(name, wrapper.modules_to_save[TRAINED])
