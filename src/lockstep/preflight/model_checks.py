"""Checks the models of a run before their weights load."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from lockstep.data.encode.chat_template import with_template
from lockstep.device.serving import serving_on
from lockstep.errors import Problem, Refusal, shortened
from lockstep.kernels.mixers import RECURRENT_KINDS, layer_kinds
from lockstep.methods import METHODS
from lockstep.model.check import check_architecture
from lockstep.model.decoder import decoder_layers, refuse_untiled
from lockstep.model.division.expert_plan import refuse_undivided_experts
from lockstep.model.division.tensor_plan import refuse_indivisible
from lockstep.model.heads import refuse_no_classifier
from lockstep.model.load import load_config, load_tokenizer, refuse_foreign_tokenizer
from lockstep.model.load_folder import DTYPES, kernel_of
from lockstep.model.pretrained import refuse_no_weights, refuse_quantized
from lockstep.model.quantized.quantized_folder import needs_dequantizing, readable_quantization, stored_tensors
from lockstep.model.resolve import image_folder, model_folder
from lockstep.model.router import experts_of_token, refuse_router_loss, refuse_router_noise
from lockstep.model.routing import KEY as ROUTING_KEY
from lockstep.model.routing import refuse_unknown_routers
from lockstep.model.streamed import weight_files
from lockstep.model.text_model import model_on_meta, placeholder_ids, text_config
from lockstep.model.towers.tower import tower_tensors
from lockstep.preflight.prepared import Context, problems_of
from lockstep.recipe import Recipe
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES, estimator_row
from lockstep.types import Origin
from lockstep.vision.families import FAMILIES
from lockstep.vision.processors import image_processor


def refuse_placeholders(config: Any, rows: Iterable[tuple[Origin, Iterable[int]]]) -> list[Problem]:
    """Reports text rows that contain a placeholder token. transformers would replace the embedding of this token with
    that of an image."""
    ids = placeholder_ids(config)
    if not ids:
        return []
    problems = []
    for origin, tokens in rows:
        token = next((token for token in tokens if token in ids), None)
        if token is not None:
            why = f"contains token {token}, which is a placeholder for an image or audio ({ids[token]} of config.json)"
            problems.append(
                Problem(str(origin), why, "remove the token: lockstep trains only on text", code="not-text")
            )
    return shortened(problems, "rows")


def trained_folders(recipe: Recipe) -> dict[str, str]:
    """Returns the folders of the trained models by recipe key, without duplicates. References and teachers are
    excluded."""
    folders = {"model.path": recipe.model.path}
    if has_critic(recipe) and recipe.critic.path not in (None, recipe.model.path):
        folders["critic.path"] = str(recipe.critic.path)
    return folders


def model_folders(recipe: Recipe) -> dict[str, str]:
    """Returns the folders of all trained and frozen models that process the policy's tokens, by recipe key and without
    duplicates."""
    folders = trained_folders(recipe)
    if reference_kind(recipe) in ("model", "disk"):
        folders.setdefault("the reference", reference_folder(recipe))
    if recipe.distill.teacher is not None:
        folders["distill.teacher"] = recipe.distill.teacher
    return {key: path for key, path in folders.items() if key == "model.path" or path != recipe.model.path}


def has_critic(recipe: Recipe) -> bool:
    return recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic


def trains_value_model(recipe: Recipe) -> bool:
    return recipe.method not in ONLINE and METHODS[recipe.method].model == "value"


# Checks.


def open_tokenizer(context: Context) -> None:
    context.tokenizer = with_template(load_tokenizer(context.recipe.model.path), context.recipe.data)


def open_config(context: Context) -> None:
    context.config = load_config(context.recipe.model.path)


def dtype_of_device(context: Context) -> Iterator[Problem]:
    """Reports a dtype that the device does not support."""
    device, dtype = context.device, context.recipe.model.dtype
    if not device.supports(DTYPES[dtype]):
        usable = [name for name, kind in DTYPES.items() if device.supports(kind)]
        yield Problem(
            "model.dtype",
            f"{device.name} does not compute in {dtype}",
            f"use {' or '.join(usable)}",
            code="unsupported-dtype",
        )


def matmul_of_device(context: Context) -> Iterator[Problem]:
    """Reports fp8 training on a device without fp8 matmuls."""
    matmul = context.recipe.model.matmul
    why = None if matmul is None else context.device.no_low_precision(matmul)
    if why is not None:
        yield Problem("model.matmul", f"{why}, so {matmul} is not available", "remove it", code="unsupported-dtype")


def precision_of_device(context: Context) -> Iterator[Problem]:
    """Reports a precision of generation that the engine does not have on this device."""
    device, rollout = context.device, context.recipe.rollout
    precision = rollout.precision
    if rollout.kv_cache is not None and (why := device.no_low_precision(rollout.kv_cache)) is not None:
        yield Problem("rollout.kv_cache", f"{why}, so it has no fp8 cache", "remove it", code="unsupported-dtype")
    if precision is None:
        return
    if ENGINES[rollout.engine].served:
        if precision not in serving_on(device.name, rollout.engine).precisions:
            why = f"{rollout.engine} on {device.name} does not quantise the weights of an update to {precision}"
            yield Problem("rollout.precision", why, "remove it, or use rollout.engine=native", code="unsupported-dtype")
        return
    why = device.no_low_precision(precision)
    if why is not None:
        usable = [one for one in ("fp8", "int8") if device.no_low_precision(one) is None]
        remedy = f"use {' or '.join(usable)}, or remove it" if usable else "remove it"
        yield Problem("rollout.precision", f"{why}, so {precision} is not available", remedy, code="unsupported-dtype")


def tokenizer_of_model(context: Context) -> None:
    """Refuses a tokenizer that has token ids outside the model's embedding."""
    refuse_foreign_tokenizer(context.tokenizer, text_config(context.config).vocab_size, context.recipe.model.path)


def routers(context: Context) -> Iterator[Problem]:
    """Reports load-balancing losses and router noise that a trained model does not support."""
    coefficient = context.recipe.model.aux_loss_coef
    for key, path in trained_folders(context.recipe).items():
        config, where = load_config(path), f"{key} {path}"
        # A critic may have another architecture, without experts.
        wanted = coefficient if key == "model.path" or experts_of_token(config) else 0.0
        problems = problems_of(refuse_router_loss, config, where, wanted)
        yield from problems or problems_of(refuse_router_noise, config, where)


def replayed_routers(context: Context) -> None:
    """Refuses `algorithm.routing_replay` for a model without experts or with routers that lockstep does not know, and
    for an engine that returns no experts on this device."""
    engine, device = context.recipe.rollout.engine, context.device.name
    why = serving_on(device, engine).no_routes if context.recipe.algorithm.routing_replay == "rollout" else None
    if why is not None:
        remedy = "use rollout.engine=native, or set it to old"
        raise Refusal.at(ROUTING_KEY, f"engine {engine} on {device}: {why}", remedy, code="unsupported-combination")
    folders = {"model.path": context.recipe.model.path}
    if context.recipe.algorithm.routing_replay == "rollout" and reference_kind(context.recipe) == "model":
        folders["the reference"] = reference_folder(context.recipe)
    for key, path in folders.items():
        model = model_on_meta(load_config(path))
        refuse_unknown_routers(decoder_layers(model), type(model).__name__, f"{key} {path}")


def classifier(context: Context) -> None:
    """Refuses an architecture that cannot be exported as a reward model."""
    refuse_no_classifier(context.config, context.recipe.model)


def architectures(context: Context) -> Iterator[Problem]:
    """Reports models that loading would refuse, without reading their weights."""
    recipe, device = context.recipe, context.device
    kernel, dtype = kernel_of(recipe.model, device.attention), DTYPES[recipe.model.dtype]
    for key, path in model_folders(recipe).items():
        config = load_config(path)
        problems = problems_of(refuse_quantized, config, f"{key} {path}")
        served = key == "model.path" and recipe.method in ONLINE and ENGINES[recipe.rollout.engine].served
        problems += problems_of(refuse_codes, model_folder(path), f"{key} {path}", served)
        if key != "model.path":
            problems += problems_of(refuse_other_vocabulary, recipe, key, path)
            problems += problems_of(refuse_other_pixels, recipe, key, path)
        if key == "distill.teacher":
            problems += problems_of(refuse_other_tokenizer, recipe, key, path)
        if not problems:
            # Kernels run on the device of this rank.
            torch_device = device.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
            problems = problems_of(check_architecture, config, path, dtype, kernel, torch_device, context.console)
        yield from problems


def refuse_codes(folder: str, where: str, served: bool) -> None:
    """Raises `Refusal` if the folder is quantised and its files lack what its method needs, or if a serving engine
    would compute with its codes, which is not what the trainer computes. Reads no weights."""
    if readable_quantization(Path(folder)) is None:
        return
    if served:
        why = "a serving engine would generate with other kernels than the trainer"
        raise needs_dequantizing(folder, where, why)
    if files := weight_files(folder):
        stored_tensors(files, where)


def missing_weights(context: Context) -> Iterator[Problem]:
    """Reports models whose folders lack weight files, or tensors that the export needs."""
    for key, path in model_folders(context.recipe).items():
        problems = problems_of(refuse_no_weights, model_folder(path), f"{key} {path}")
        if key == "model.path" and not problems:
            problems = problems_of(tower_tensors, load_config(path), model_folder(path), f"{key} {path}")
        yield from problems


def served_images(context: Context) -> Iterator[Problem]:
    """Reports a family whose images were not tested with the serving engine."""
    kind, engine = context.config.model_type, context.recipe.rollout.engine
    if kind in FAMILIES and not FAMILIES[kind].served:
        able = ", ".join(sorted(name for name, family in FAMILIES.items() if family.served))
        why = f"engine {engine} was not tested with images of {kind} models"
        remedy = f"set rollout.engine=native, or use one of {able}"
        yield Problem("rollout.engine", why, remedy, code="unsupported-model")


def tensor_division(context: Context) -> Iterator[Problem]:
    """Reports models, trained or frozen, that tensor parallelism cannot divide."""
    for path in model_folders(context.recipe).values():
        yield from problems_of(refuse_indivisible, load_config(path), path, context.recipe.parallel.tensor_parallel)


def expert_division(context: Context) -> Iterator[Problem]:
    """Reports models, trained or frozen, whose experts expert parallelism cannot divide."""
    parallel = context.recipe.parallel
    for path in model_folders(context.recipe).values():
        sizes = (parallel.expert_parallel, parallel.tensor_parallel)
        yield from problems_of(refuse_undivided_experts, load_config(path), model_folder(path), path, *sizes)


def tiled_mlps(context: Context) -> Iterator[Problem]:
    """Reports trained models whose MLPs `model.tiled_mlp` cannot tile. Frozen models are tiled where possible."""
    for path in trained_folders(context.recipe).values():
        config = load_config(path)
        yield from problems_of(refuse_untiled, decoder_layers(model_on_meta(config)), f"{path} ({config.model_type})")


def context_division(context: Context) -> Iterator[Problem]:
    """Reports models with recurrent layers, whose tokens context parallelism cannot divide."""
    for key, path in model_folders(context.recipe).items():
        config = load_config(path)
        recurrent = sorted(layer_kinds(text_config(config)) & RECURRENT_KINDS)
        if recurrent:
            yield Problem(
                "parallel.context_parallel",
                f"{key} {path} ({config.model_type}) has layers of kind {', '.join(recurrent)}, which carry a state "
                "from token to token, so one sequence cannot be divided over several processes",
                "set parallel.context_parallel=1, and save memory with model.gradient_checkpointing, "
                "model.activation_offload or parallel.shard",
                code="unsupported-combination",
            )


def refuse_other_vocabulary(recipe: Recipe, key: str, path: str) -> None:
    """Refuses a model whose vocabulary size differs from the policy's."""
    expected = text_config(load_config(recipe.model.path)).vocab_size
    actual = text_config(load_config(path)).vocab_size
    if expected != actual:
        raise Refusal.at(
            f"{key} {path}",
            f"has a vocabulary of {actual:,} tokens, and the policy has {expected:,}",
            "use a model of the same family",
            code="other-vocabulary",
        )


# Settings of an image processor that determine the pixels of an image of a given size. The policy's processor computes
# the pixels for all models of a run.
PIXELS = ("patch_size", "merge_size", "temporal_patch_size", "rescale_factor", "image_mean", "image_std")


def refuse_other_pixels(recipe: Recipe, key: str, path: str) -> None:
    """Refuses a model that was trained on other pixels than those that the policy's image processor computes."""
    own, other = image_folder(recipe.model), model_folder(path, key)
    if own is None or other == own or load_config(path).model_type not in FAMILIES:
        return  # loading refuses a model without a vision tower
    for name in PIXELS:
        expected, actual = (getattr(image_processor(folder), name, None) for folder in (own, other))
        if expected != actual:
            raise Refusal.at(
                f"{key} {path}",
                f"its image processor has {name} {actual}, and that of the policy has {expected}",
                "use a model of the same family",
                code="wrong-model-kind",
            )


def refuse_other_tokenizer(recipe: Recipe, key: str, path: str) -> None:
    """Refuses a teacher whose tokenizer assigns other ids to tokens than the policy's tokenizer. Vocabularies of equal
    size may still have different ids."""
    expected, actual = load_tokenizer(recipe.model.path).get_vocab(), load_tokenizer(path).get_vocab()
    differing = sorted(expected.items() ^ actual.items())
    if differing:
        token, number = differing[0]
        side = "the policy's" if (token, number) in expected.items() else "its"
        raise Refusal.at(
            f"{key} {path}",
            f"its tokenizer differs from the policy's: {len(differing):,} tokens differ, the first is {token!r} "
            f"({number} in {side})",
            "use a teacher of the same family",
            code="other-vocabulary",
        )
