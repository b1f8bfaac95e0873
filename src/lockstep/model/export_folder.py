"""Exports a trained model or a merged adapter as a Hugging Face folder, or the adapter as a PEFT folder."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from lockstep.errors import Problem, Refusal, first_line, refuse_all, unwritten
from lockstep.model.adapters.active import give_storage
from lockstep.model.adapters.peft_folder import save_adapter
from lockstep.model.check import tokens
from lockstep.model.export_check import AdapterBase, Verification, probe_of_transformers, verify_export
from lockstep.model.heads import build_value_model, classified_config, merge_adapters
from lockstep.model.load_folder import DTYPES, ModelFolders, config_of, has_codes, stream_transformers
from lockstep.model.lora import CONFIG, WEIGHTS, NewAdapter, with_adapter
from lockstep.model.pretrained import (
    has_tokenizer,
    pretrained,
    rounded,
    save_generation,
    save_model,
    tokenizer_of,
    whole_model,
)
from lockstep.model.quantized.merged_weights import base_record, dequantized_base, merged_weights, recorded_base
from lockstep.model.quantized.quantize import dequantize_layers
from lockstep.model.quantized.quantized_folder import needs_dequantizing, readable_quantization
from lockstep.model.streamed import META, stored_buffers
from lockstep.model.text_model import LanguageModel, text_config
from lockstep.model.towers.tower import add_towers, copy_processor
from lockstep.model.towers.vision_model import exported_kind
from lockstep.model.weights import refuse_other_weights, restore_weights
from lockstep.parallel.sharded_files import StoredTensors, shapes_of
from lockstep.recipe.schema import Lora, Model
from lockstep.run.checkpoint import Checkpoint
from lockstep.run.files import share_model, written_aside
from lockstep.run.tensor_file import link_model, write_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class SavedNames:
    """The tensors of the exported files: the shape of each tensor, and the model parameter it comes from. Tensors that
    come from the same parameter are consecutive.

    When transformers loads a model, it merges some tensors of the files into one parameter. The export splits such
    merged parameters again, one parameter at a time.
    """

    model: Any
    shapes: Mapping[str, torch.Size]
    parameters: Mapping[str, str]
    unchanged: bool
    """Whether each tensor of the files is a parameter of the model with the same name and the same values."""

    def reader(self, read: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
        """Returns a function that returns a tensor by its name in the file. The function calls `read` once per
        parameter, and frees a parameter before it reads the next one."""
        parts: dict[str, torch.Tensor] = {}

        def part(name: str) -> torch.Tensor:
            if name not in parts:
                parts.clear()
                parameter = self.parameters[name]
                parts.update(_reverted(self.model, {parameter: read(parameter)}))
            return parts.pop(name)

        return part


def saved_names(model: PreTrainedModel, shapes: Mapping[str, torch.Size]) -> SavedNames | None:
    """Returns the tensors that `save_pretrained` would write, or None if a tensor is made of several parameters."""
    parameters_on_meta = {name: torch.empty(shape, device=META) for name, shape in shapes.items()}
    found: dict[str, torch.Size] = {}
    parameters: dict[str, str] = {}
    unchanged = True
    for parameter, tensor in parameters_on_meta.items():
        for name, part in _reverted(model, {parameter: tensor}).items():
            if name in found:
                return None
            found[name], parameters[name] = part.shape, parameter
            unchanged = unchanged and part is tensor and name == parameter
    at_once = {name: part.shape for name, part in _reverted(model, parameters_on_meta).items()}
    return SavedNames(model, found, parameters, unchanged) if at_once == found else None


def _reverted(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    made: dict[str, torch.Tensor] = revert_weight_conversion(model, tensors)
    return made


def export_checkpoint(
    settings: Model,
    found: Checkpoint,
    out: Path,
    *,
    folders: ModelFolders,
    adapter: bool = False,
    replace: bool = False,
    files: Mapping[str, str] = MappingProxyType({}),
) -> Verification:
    """Exports a checkpoint as a language model or reward model, with additional text `files`."""
    state, weights = found.state, found.weights
    how: dict[str, Any] = {"where": str(found.path), "folders": folders, "end_tokens": state.end_tokens}
    how |= {"files": {**state.files, **files}, "probe": state.probe, "replace": replace}
    if state.kind == "policy":
        return export_model(settings, weights, out, adapter=adapter, **how)
    if adapter:
        raise Refusal.at(
            "--adapter",
            "a reward model also has a trained head, which is not part of an adapter",
            "export without --adapter",
            code="no-adapter",
        )
    return export_value_model(settings, weights, out, **how)


def export_model(
    settings: Model,
    weights: Mapping[str, torch.Tensor],
    out: Path,
    *,
    where: str,
    folders: ModelFolders,
    adapter: bool = False,
    end_tokens: Sequence[int] = (),
    replace: bool = False,
    files: Mapping[str, str] = MappingProxyType({}),
    probe: Mapping[str, Any] = MappingProxyType({}),
) -> Verification:
    """Writes the model to a temporary folder, compares it with outputs of the trained model (`probe`), and renames it
    to `out`. With `adapter`, exports the adapter of a LoRA run instead of the merged model."""
    if adapter and settings.lora is None:
        raise Refusal.at(
            "--adapter",
            "the run trained all weights, so it has no adapter",
            "export without --adapter",
            code="no-adapter",
        )
    _refuse_taken(out, replace)
    with _written(settings, folders, out) as aside:
        streamed = _write_merged if settings.quantize and not adapter else _write_streamed
        alone = settings.lora is not None and streamed is _write_streamed
        if alone or not streamed(settings, folders, weights, aside, where, end_tokens):
            _write_in_memory(settings, folders, weights, aside, where, end_tokens, adapter=adapter)
        if not adapter:
            config = config_of(folders.model, settings.path)
            add_towers(config, folders.model, aside, f"model.path {settings.path}", trained=settings.vision == "train")
        _write_texts(aside, {**files, **(base_record(settings) if adapter else {})})
        base = AdapterBase(settings, folders.model) if adapter else None
        return verify_export(aside, probe, "policy", DTYPES[settings.dtype], str(out), base=base)


def _write_streamed(
    settings: Model,
    folders: ModelFolders,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    where: str,
    end_tokens: Sequence[int],
) -> bool:
    """Writes the model tensor by tensor, to save memory. Returns False if this model cannot be written tensor by
    tensor."""
    source = stream_transformers(exported_kind(settings), folders.model, settings.dtype, settings.path)
    if source is None:
        return False
    refuse_other_weights(source.model, weights, where)
    names = saved_names(source.model, {**shapes_of(weights), **shapes_of(_buffers(source.model))})
    if names is None:
        return False
    _write_by_tensor(source.model, names, settings, weights, folder, end_tokens)
    return True


def _write_merged(
    settings: Model,
    folders: ModelFolders,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    where: str,
    end_tokens: Sequence[int],
) -> bool:
    """Merges the adapter of a quantised model and writes the model tensor by tensor. Returns False if this model cannot
    be written tensor by tensor."""
    found = merged_weights(settings, folders, weights, where)
    if found is None:
        return False
    model, merged = found
    names = saved_names(model, {**merged.shapes, **shapes_of(_buffers(model))})
    if names is None:
        return False
    _write_by_tensor(model, names, settings, merged, folder, end_tokens)
    return True


def _write_in_memory(
    settings: Model,
    folders: ModelFolders,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    where: str,
    end_tokens: Sequence[int],
    *,
    adapter: bool,
) -> None:
    """Loads the whole model into memory and writes it. The memory is freed before the folder is verified."""
    where_from = f"model.path {settings.path}"
    dtype = _working(settings, adapter)
    source = stream_transformers(LanguageModel, folders.model, settings.dtype, settings.path) if adapter else None
    if source is not None:
        base = source.model  # the files of an adapter need no weights of the base model
    elif has_codes(settings, folders.model):
        base = dequantized_base(settings, folders, dtype)
    else:
        base = whole_model(exported_kind(settings), folders.model, where_from, "its weights", dtype=dtype)
    model = with_adapter(base, _without_reference(settings.lora), NewAdapter(0, values=False), folders.adapter)
    give_storage(model)
    restore_weights(model, weights, where)
    if adapter:
        # The adapter refers to its base model by the path of the recipe, not by the resolved folder.
        save_adapter(model, folder, settings.path)
        return
    merged = model.merge_and_unload() if settings.lora else model
    rounded(merged, DTYPES[settings.dtype])
    _stop_at(merged, end_tokens)
    save_model(merged, folder)


def _without_reference(lora: Lora | None) -> Lora | None:
    """Returns the settings without the frozen copy of the adapter that only training needs."""
    return None if lora is None else lora.model_copy(update={"reference": "base"})


def _write_texts(folder: Path, files: Mapping[str, str]) -> None:
    for name, content in files.items():
        (folder / name).write_text(content, encoding="utf-8")


def _write_by_tensor(
    model: PreTrainedModel,
    names: SavedNames,
    settings: Model,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    end_tokens: Sequence[int],
) -> None:
    """Writes the files that `save_pretrained` would write. The model is on the meta device; weights are read one by
    one."""
    model.config.dtype = str(DTYPES[settings.dtype]).removeprefix("torch.")
    model.config.architectures = [type(model).__name__]
    _stop_at(model, end_tokens)
    folder.mkdir(parents=True)
    model.config.save_pretrained(folder)
    save_generation(model, folder)
    buffers = _buffers(model)
    dtypes = dict.fromkeys(names.shapes, DTYPES[settings.dtype])
    if (
        names.unchanged
        and isinstance(weights, StoredTensors)
        and link_model(folder, weights.files, names.shapes, dtypes)
    ):
        return
    read = names.reader(lambda name: buffers[name] if name in buffers else weights[name])
    kept = {name: buffers[source].dtype for name, source in names.parameters.items() if source in buffers}
    write_model(folder, names.shapes, DTYPES[settings.dtype], read, kept)


def _buffers(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: model.get_buffer(name) for name in stored_buffers(model)}


def export_value_model(
    settings: Model,
    weights: Mapping[str, torch.Tensor],
    out: Path,
    *,
    where: str,
    folders: ModelFolders,
    end_tokens: Sequence[int] = (),
    replace: bool = False,
    files: Mapping[str, str] = MappingProxyType({}),
    probe: Mapping[str, Any] = MappingProxyType({}),
) -> Verification:
    """Exports a reward model, with its adapter merged, as a sequence classification model with one label."""
    _refuse_taken(out, replace)
    with _written(settings, folders, out) as aside:
        _write_classifier(settings, folders, weights, aside, where, end_tokens)
        _write_texts(aside, files)
        return verify_export(aside, probe, "value", DTYPES[settings.dtype], str(out))


def _write_classifier(
    settings: Model,
    folders: ModelFolders,
    weights: Mapping[str, torch.Tensor],
    folder: Path,
    where: str,
    end_tokens: Sequence[int],
) -> None:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    # Quantised layers keep the dtype in which they were trained, because dequantisation rounds to it.
    wide = settings.lora is not None and settings.quantize is None
    working = settings.model_copy(update={"dtype": "fp32"}) if wide else settings
    trained = build_value_model(
        working, folders, torch.device("cpu"), "sdpa", seed=0, name=settings.path, key="model.path"
    )
    restore_weights(trained, weights, where)
    if settings.quantize:
        dequantize_layers(trained.decoder, torch.float32)
        trained.float()
    merge_adapters(trained.decoder)
    config = classified_config(config_of(folders.model, settings.path), settings)
    config.num_labels = 1
    classifier = AutoModelForSequenceClassification.from_config(
        config, dtype=torch.float32 if settings.quantize else DTYPES[working.dtype], trust_remote_code=False
    )
    # Tensors are assigned instead of copied, because copying would round fp32 buffers.
    decoder = trained.decoder if settings.vision is None else trained.decoder.base_model
    classifier.base_model.load_state_dict(decoder.state_dict(), assign=True)
    with torch.no_grad():
        classifier.score.weight.copy_(trained.head.weight)
    padding = _padding(_tokenizer(settings, folders), end_tokens)
    classifier.config.pad_token_id = text_config(classifier.config).pad_token_id = padding
    rounded(classifier, DTYPES[settings.dtype]).save_pretrained(folder)
    if settings.vision is not None:
        copy_processor(folders.model, folder)


def _tokenizer(settings: Model, folders: ModelFolders) -> PreTrainedTokenizerBase:
    return tokenizer_of(folders.model, f"model.path {settings.path}")


def _padding(tokenizer: PreTrainedTokenizerBase, end_tokens: Sequence[int]) -> int:
    """Returns a padding token that is no end token. The classifier scores the last token that is not padding, so an end
    token must not be padding."""
    candidates = [tokenizer.pad_token_id, *tokenizer.all_special_ids, *range(len(end_tokens) + 1)]
    return next(token for token in candidates if token is not None and token not in end_tokens)


def _working(settings: Model, adapter: bool) -> torch.dtype:
    """Returns the dtype in which the export is computed. An adapter is merged in fp32, so that the result is rounded
    only once."""
    return torch.float32 if settings.lora and not adapter else DTYPES[settings.dtype]


def _refuse_taken(out: Path, replace: bool) -> None:
    if out.exists() and not out.is_dir():
        raise Refusal.at(out, "is a file, not a folder", "choose a new folder", code="not-a-folder")
    if out.exists() and any(out.iterdir()) and not replace:
        raise Refusal.at(out, "is not empty", "choose a new folder", code="not-empty")


@contextmanager
def _written(settings: Model, folders: ModelFolders, out: Path) -> Iterator[Path]:
    """Yields a temporary folder for the model. After the `with` block, adds the tokenizer and renames the folder to
    `out`."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(out, over=True) as aside:
            yield aside
            tokenizer, template = _tokenizer(settings, folders), aside / "chat_template.jinja"
            if template.is_file():  # the chat template of the run replaces that of the model
                tokenizer.chat_template = template.read_text(encoding="utf-8")
            tokenizer.save_pretrained(aside)
            share_model(aside, like="tokenizer_config.json")
    except (OSError, SafetensorError) as error:  # safetensors has a separate error type for a full disk
        raise unwritten(out, error, "run `lockstep export` again; checkpoints are unchanged") from error


def _stop_at(model: PreTrainedModel, end_tokens: Sequence[int]) -> None:
    """Adds the end tokens of the training rows to the generation config."""
    config = model.generation_config
    eos = config.eos_token_id
    present = eos if isinstance(eos, list) else [] if eos is None else [eos]
    ends = [*present, *[token for token in end_tokens if token not in present]]
    config.eos_token_id = ends[0] if len(ends) == 1 else ends or None


# Merges a PEFT adapter and its base model into one Hugging Face folder.

# Number of test tokens, and the allowed difference between merged and unmerged logits, relative to the largest logit.
PROBE, MERGED_ERROR = 16, 1e-3


def merge_adapter(adapter: Path, base: str, out: Path, where: str) -> Verification:
    """Merges a PEFT adapter into its base model in fp32, and rounds to the dtype of the stored base model. Compares the
    outputs of the merged model with those of base model and adapter. If the adapter was trained on quantised weights,
    it is merged into the dequantised ones."""
    from peft import PeftModel

    kind = json.loads((adapter / CONFIG).read_text(encoding="utf-8")).get("task_type")
    if kind not in ("CAUSAL_LM", None):
        raise Refusal.at(
            where, f"is an adapter for {kind}", "only adapters of language models are supported", code="unfit-adapter"
        )
    if not (adapter / WEIGHTS).is_file():
        raise Refusal.at(where, f"has no {WEIGHTS}", "save it with safe_serialization=True", code="missing-file")
    from transformers import AutoConfig

    config = pretrained(AutoConfig, base, where, "the config of its base")
    stored: Any = config.dtype or text_config(config).dtype or torch.float32
    quantized = recorded_base(adapter, base, where)
    if quantized is None and readable_quantization(Path(base)) is not None:
        raise needs_dequantizing(base, f"{where}: its base {base}", "an adapter is merged into plain weights")
    if quantized is None:
        model = whole_model(LanguageModel, base, where, "its base", dtype=torch.float32)
    else:
        model = dequantized_base(quantized, ModelFolders(base), torch.float32)
    try:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # PEFT warns about tied weights, but the outputs are compared below
            adapted = PeftModel.from_pretrained(model, str(adapter))
            _refuse_other_keys(adapted, adapter, where)
            unmerged, probe = _logits(adapted), probe_of_transformers(adapted)
            _untie(adapted)
            merged: Any = adapted.merge_and_unload()
            off = float((_logits(merged) - unmerged).abs().max() / unmerged.abs().max())
    except (ValueError, RuntimeError, KeyError, OSError, SafetensorError) as error:
        raise Refusal.at(
            where, f"does not fit its base {base}: {first_line(error)}", "give its base model", code="unfit-adapter"
        ) from error
    if not off <= MERGED_ERROR:
        why = f"its logits change when it is merged into {base}: they differ by {off:.2g} of the largest logit"
        raise Refusal.at(where, why, "merge it with the library that created it", code="unfit-adapter")
    tokenizer = tokenizer_of(str(adapter) if has_tokenizer(adapter) else base, where)
    try:
        save_model(rounded(merged, stored), out)
        add_towers(config, base, out, where)
        tokenizer.save_pretrained(out)
    except (OSError, SafetensorError) as error:
        raise unwritten(out, error) from error
    del model, adapted, merged  # free memory before the next load
    return verify_export(out, probe, "policy", stored, where)


def _logits(adapted: Any) -> torch.Tensor:
    ids = tokens(PROBE, adapted.get_input_embeddings().weight.shape[0])
    found: torch.Tensor = adapted(input_ids=torch.tensor([ids])).logits
    return found


def _untie(adapted: Any) -> None:
    """Unties embedding and output head if the adapter changes one of them, because merging would otherwise change
    both."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    model = adapted.get_base_model()
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    if not any(isinstance(layer, BaseTunerLayer) for layer in layers):
        return
    plain = [layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers]
    if plain[0].weight is plain[1].weight:
        plain[1].weight = torch.nn.Parameter(plain[0].weight.detach().clone())
        text_config(model.config).tie_word_embeddings = model.config.tie_word_embeddings = False


def _refuse_other_keys(adapted: Any, adapter: Path, where: str) -> None:
    """Raises `Refusal` for missing and unexpected adapter weights, which PEFT ignores."""
    from peft import get_peft_model_state_dict

    with safe_open(adapter / WEIGHTS, "pt") as file:
        stored = set(file.keys())
    expected = set(get_peft_model_state_dict(adapted, save_embedding_layers=False))
    # Names of the base model's weights. The file of an adapter that adds tokens also contains some of these weights.
    full = {f"base_model.model.{name}" for name in adapted.get_base_model().state_dict()}
    problems = [
        Problem(where, f"the adapter has no {name}", code="missing-weight") for name in sorted(expected - stored)
    ]
    problems += [
        Problem(where, f"its base has no parameter for {name}", code="unknown-weight")
        for name in sorted(stored - expected - full)
    ]
    refuse_all(problems, "weights")
