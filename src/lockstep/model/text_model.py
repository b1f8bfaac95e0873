"""The language model of a folder whose config is nested (`text_config`, `vision_config`), without its towers.

A model with a nested config has a language model and towers: encoders and projectors for images, video or audio.
lockstep trains the language model on text. lockstep builds the class that `architectures` names, without its towers,
because transformers has no causal LM class for some text configs (such as Qwen2.5-VL). Each tensor keeps its name, so
checkpoints, adapters and exports fit the full class. The forward pass is that of the full class, so the checks can use
the full class as reference. The tensors of the towers are never loaded: the export copies their bytes from the files of
the model folder (`tower.py`).
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.kernels.mixers import RECURRENT_KINDS, layer_kinds


def text_config(config: Any) -> Any:
    """Returns the config of the language model: the nested text config, or `config` itself if it is not nested.

    All sizes of a model are read from this config. Raises ValueError if there are several text configs.
    """
    return config.get_text_config(decoder=True)


def writable_text_config(config: Any) -> Any:
    """Returns the text config whose values the model reads. Does not call `text_config` for a flat config, because for
    flat encoder-decoder models it returns a copy."""
    return text_config(config) if is_nested(config) else config


class TextSizes(NamedTuple):
    """The sizes of a language model, read from its config. If layers have different sizes, the largest size is used."""

    hidden: int
    inner: int
    """The width of the feed-forward: four times `hidden` if the config has none."""
    heads: int
    key_heads: int
    head_size: int
    layers: int
    vocabulary: int


def text_sizes(config: Any) -> TextSizes:
    """Returns the sizes of the language model of a config, nested or not. Raises `Refusal` if the config lacks one. A
    model that has only recurrent layers has no heads."""
    text = text_config(config)
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    found = {name: max(layer_sizes(text, name), default=0) for name in names}
    kinds = layer_kinds(text)
    headless = bool(kinds) and kinds <= RECURRENT_KINDS
    problems = [
        Problem(
            "model.path",
            f"the config of {config.model_type} has no number {name}, so its memory cannot be planned",
            "use a model that `lockstep help models` lists as supported",
            code="unsupported-model",
        )
        for name, value in found.items()
        if not value and not (headless and name == "num_attention_heads")
    ]
    refuse_all(problems)
    hidden, heads, layers, vocabulary = found.values()
    inner = max(layer_sizes(text, "intermediate_size"), default=4 * hidden)
    key_heads = max(layer_sizes(text, "num_key_value_heads"), default=heads)
    head_size = max(layer_sizes(text, "head_dim"), default=hidden // heads if heads else 0)
    return TextSizes(hidden, inner, heads, key_heads, head_size, layers, vocabulary)


def layer_sizes(text: Any, name: str) -> list[int]:
    """Returns the values of one key of a text config that are positive integers: one, or one for each layer if layers
    differ. The list is empty if the config has no such number."""
    try:
        value = getattr(text, name, None)
    except RuntimeError:  # transformers refuses to read a value that differs between layers
        value = [getattr(layer, name, None) for layer in text.per_layer_config]
    values = value if isinstance(value, list | tuple) else [value]
    return [number for number in values if isinstance(number, int) and number > 0]


# The keys of config.json that contain the token ids of placeholders for images, video or audio.
PLACEHOLDERS = re.compile(r"(image|video|audio|vision|speech)_token_(id|index)")


def placeholder_ids(config: Any) -> dict[int, str]:
    """Returns the token ids of placeholders for images, video or audio, each with its key in config.json."""
    ids = {}
    parts = [config.to_dict()]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif PLACEHOLDERS.fullmatch(str(name)) and isinstance(value, int):
                ids[value] = str(name)
    return ids


def is_nested(config: Any) -> bool:
    """Returns whether the text config is a part of `config`. Raises ValueError if there are several text configs."""
    return type(text_config(config)) is not type(config)


def multimodal_class(config: Any) -> type | None:
    """Returns the transformers class of a nested config that has the language model and the towers. Returns None for a
    flat config, and if transformers has no such class."""
    from transformers.models.auto.auto_factory import _get_model_class
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
        MODEL_FOR_MULTIMODAL_LM_MAPPING,
    )

    if not is_nested(config):
        return None
    mappings = (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING)
    found = [_get_model_class(config, mapping) for mapping in mappings if type(config) in mapping]
    # For some configs a mapping names the class of the text config, which has no towers.
    found = [kind for kind in found if kind.config_class is not type(text_config(config))]
    named = [kind for kind in found if kind.__name__ in (config.architectures or ())]
    return next(iter(named or found), None)


def _auto_class(config: Any) -> Any:
    """Returns the Auto class of a flat config. transformers lists the causal LM of Mistral 4 only as a model of images
    and text."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    other = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    listed = type(config) in AutoModelForCausalLM._model_mapping
    causal = other is not None and other.__name__.endswith("ForCausalLM")
    return AutoModelForImageTextToText if causal and not listed else AutoModelForCausalLM


def no_language_model(config: Any) -> str:
    """Returns why transformers has no language model for this config, or an empty string if it has one."""
    try:
        if multimodal_class(config) is not None or type(config) in _auto_class(config)._model_mapping:
            return ""
    except (ValueError, AttributeError, ImportError) as error:
        return f"{config.model_type}: it is not one language model: {first_line(error)}"
    return f"transformers has no class that generates text for {config.model_type}"


class LanguageModel:
    """Used instead of `AutoModelForCausalLM`. For a nested config, builds the full class without its towers."""

    @classmethod
    def from_config(cls, config: Any, *, trust_remote_code: bool = False, **how: Any) -> Any:
        assert not trust_remote_code
        kind = multimodal_class(config)
        if kind is None:
            return _auto_class(config).from_config(config, trust_remote_code=False, **how)
        return cls._built(kind)._from_config(config, **for_text(config, how))

    @classmethod
    def from_pretrained(cls, path: str, *, config: Any = None, trust_remote_code: bool = False, **how: Any) -> Any:
        from transformers import AutoConfig

        assert not trust_remote_code
        if config is None:
            config = AutoConfig.from_pretrained(path, trust_remote_code=False)
        kind = multimodal_class(config)
        if kind is None:
            return _auto_class(config).from_pretrained(path, config=config, trust_remote_code=False, **how)
        built, how = cls._built(kind), for_text(config, how)
        return built.from_pretrained(path, config=config, trust_remote_code=False, **how)

    @staticmethod
    def _built(kind: Any) -> Any:
        return without_towers(kind)


class FullModel(LanguageModel):
    """Builds the full class with its towers, as users of the model load it."""

    @staticmethod
    def _built(kind: Any) -> Any:
        return kind


def model_on_meta(config: Any, kind: Any = LanguageModel) -> Any:
    """Builds a model without weights on the meta device. Raises `Refusal` if its class does not accept the config."""
    try:
        with torch.device("meta"):
            return kind.from_config(config, trust_remote_code=False)
    except Exception as error:  # classes raise various errors for a config that they do not support
        raise Refusal.at(
            "model.path",
            f"transformers cannot build {config.model_type} from its config.json: {first_line(error)}",
            "compare config.json with that of the published model, or use a model of `lockstep help models`",
            code="unsupported-model",
        ) from error


def for_text(config: Any, how: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments `how`, changed so that `attn_implementation` does not apply to towers, whose
    classes may not support it."""
    chosen, text = how.get("attn_implementation"), text_config(config)
    if not isinstance(chosen, str):
        return how
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return {**how, "attn_implementation": dict.fromkeys(["", *names], chosen)}


@cache
def without_towers(kind: Any) -> Any:
    """Returns a subclass of the multimodal class `kind` that has only the language model and its output head. The
    subclass processes text like `kind`."""

    class TextOnly(kind):
        left_out: dict[str, torch.Tensor]
        """The tensors of the towers in a state dict of `kind`, on the meta device."""
        _keys_to_ignore_on_load_unexpected: set[str] | None

        def __init__(self, config: Any, *more: Any, **named: Any):
            with torch.device("meta"):
                super().__init__(config, *more, **named)
            everything = self.state_dict()
            _rebuild(self)
            dropped = _drop_towers(self, language_parts(self))
            kept = self.state_dict().keys()
            self.left_out = {name: tensor for name, tensor in everything.items() if name not in kept}
            self._keys_to_ignore_on_load_unexpected = {
                *(self._keys_to_ignore_on_load_unexpected or ()),
                *(_pattern(name, self.base_model_prefix) for name in dropped),
            }

        def get_output_embeddings(self) -> Any:
            """Returns the output head, which some classes have only in their language model."""
            head = super().get_output_embeddings()
            inner = [child for child in self.children() if hasattr(child, "get_output_embeddings")]
            return next((one.get_output_embeddings() for one in inner), None) if head is None else head

        def set_attn_implementation(self, attn_implementation: Any, **how: Any) -> None:
            """Sets the attention of the language model. The attention of the towers is unchanged."""
            chosen = for_text(self.config, {"attn_implementation": attn_implementation})
            super().set_attn_implementation(**chosen, **how)

    # transformers writes the class name to `architectures` and looks up the names of stored tensors by it.
    TextOnly.__name__, TextOnly.__qualname__, TextOnly.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return TextOnly


def language_parts(model: Any) -> list[nn.Module]:
    """Returns the decoder and the output head. Raises NotImplementedError if the decoder is not separate from the
    towers."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    if decoder is None or type(decoder.config) is type(model.config):
        raise NotImplementedError("transformers does not separate its language model from its other parts")
    if head is None:
        raise NotImplementedError("transformers finds no output head of its language model")
    return [decoder, head]


def _rebuild(model: Any) -> None:
    """Builds decoder and output head again, on the current device. The towers stay on the meta device, so that they
    need no memory at any size."""
    decoder, head = language_parts(model)
    names = {module: name for name, module in model.named_modules()}
    model.set_submodule(names[decoder], type(decoder)(decoder.config))
    if not names[head].startswith(f"{names[decoder]}."):
        if type(head) is not nn.Linear:
            raise NotImplementedError(f"its output head is a {type(head).__name__}, not a linear layer")
        again = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
        model._init_weights(again)
        model.set_submodule(names[head], again)
    model.tie_weights()


class LeftOut(nn.Module):
    """Takes the place of a tower. Some classes read the device of a tower even if there is no image or audio."""

    device = torch.device("meta")


def _drop_towers(module: nn.Module, kept: list[nn.Module], prefix: str = "") -> list[str]:
    """Replaces all modules that are neither part of `kept` nor contain a part of `kept` by `LeftOut`, and such
    parameters and buffers by None. Returns their names."""
    dropped = []
    for tensors in (module._parameters, module._buffers):
        dropped += [prefix + name for name in tensors]
        tensors.update(dict.fromkeys(tensors))
    # transformers must not initialise the dropped parameters.
    module._is_hf_initialized = True  # type: ignore[assignment]
    for name, child in module.named_children():
        if any(child is one for one in kept):
            continue
        if any(part is one for part in child.modules() for one in kept):
            dropped += _drop_towers(child, kept, f"{prefix}{name}.")
        else:
            module._modules[name] = LeftOut()
            dropped.append(prefix + name)
    return dropped


def _pattern(name: str, prefix: str) -> str:
    """Returns a regular expression for the tensors of a tower. The prefix is optional, because files of a base model
    lack it."""
    return rf"^({re.escape(prefix)}\.)?{re.escape(name.removeprefix(f'{prefix}.'))}(\.|$)"
