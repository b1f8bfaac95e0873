"""Checks of the models of a run before their weights load."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from typing import Any

from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal, shortened
from lockstep.model.check import check_architecture
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.load_folder import DTYPES, kernel_of
from lockstep.model.pretrained import refuse_no_weights, refuse_quantized
from lockstep.model.resolve import model_folder
from lockstep.model.router import experts_of_token, refuse_router_loss, refuse_router_noise
from lockstep.model.tensor_plan import refuse_indivisible
from lockstep.recipe import Recipe
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import estimator_row
from lockstep.types import Origin

# Tokens that stand for pictures or sound in a model of several senses: its own forward puts something else there.

_NAMES = re.compile(r"(image|video|audio|vision|speech)_token_(id|index)")


def placeholder_ids(config: Any) -> dict[int, str]:
    """Token ids that mean no word, with the configuration's key of each."""
    found = {}
    parts = [config.to_dict()]
    while parts:
        for name, value in parts.pop().items():
            if isinstance(value, dict):
                parts.append(value)
            elif _NAMES.fullmatch(str(name)) and isinstance(value, int):
                found[value] = str(name)
    return found


def refuse_placeholders(config: Any, rows: Iterable[tuple[Origin, Iterable[int]]]) -> list[Problem]:
    """Rows of text with such a token: the model would see its embedding where transformers puts a picture's."""
    ids = placeholder_ids(config)
    if not ids:
        return []
    problems = []
    for origin, tokens in rows:
        token = next((token for token in tokens if token in ids), None)
        if token is not None:
            why = f"holds token {token}, which stands for a picture or sound ({ids[token]} of config.json)"
            problems.append(Problem(str(origin), why, "take it out: only text is trained on here", code="not-text"))
    return shortened(problems, "rows")


# The models of a run, and everything about them that is refused before their weights are loaded.


def trained_folders(recipe: Recipe) -> dict[str, str]:
    """The folders of trained models by key, each once. References and teachers are only read."""
    folders = {"model.path": recipe.model.path}
    if has_critic(recipe) and recipe.critic.path not in (None, recipe.model.path):
        folders["critic.path"] = str(recipe.critic.path)
    return folders


def model_folders(recipe: Recipe) -> dict[str, str]:
    """The folders of all models that pass over the tokens of the policy, trained or only read, each once."""
    folders = trained_folders(recipe)
    if reference_kind(recipe) in ("model", "disk"):
        folders.setdefault("the reference", reference_folder(recipe))
    if recipe.distill.teacher is not None:
        folders["distill.teacher"] = recipe.distill.teacher
    return {key: path for key, path in folders.items() if key == "model.path" or path != recipe.model.path}


def refuse_models(recipe: Recipe, device: Device) -> list[Problem]:
    """What loading the models would refuse, found without reading a weight: `plan` refuses what `train` refuses."""
    problems: list[Problem] = []

    def collect(check: Callable[[], None]) -> None:
        try:
            check()
        except Refusal as refusal:
            problems.extend(refusal.problems)

    kernel, dtype = kernel_of(recipe.model, device.attention), DTYPES[recipe.model.dtype]
    for key, path in model_folders(recipe).items():
        where = f"{key} {path}"
        before = len(problems)
        config = load_config(path)
        collect(lambda where=where, config=config: refuse_quantized(config, where))  # type: ignore[misc]
        if key != "model.path":
            collect(lambda key=key, path=path: refuse_other_vocabulary(recipe, key, path))  # type: ignore[misc]
        if key == "distill.teacher":
            collect(lambda key=key, path=path: refuse_other_tokenizer(recipe, key, path))  # type: ignore[misc]
        if len(problems) == before:
            # The device that this rank uses: kernels run on the current one.
            here = device.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
            arguments = (config, path, dtype, kernel, here)
            collect(lambda arguments=arguments: check_architecture(*arguments))  # type: ignore[misc]
    return problems


def missing_weights(recipe: Recipe) -> list[Problem]:
    """Models whose folders lack weight files."""
    problems: list[Problem] = []
    for key, path in model_folders(recipe).items():
        try:
            refuse_no_weights(model_folder(path), f"{key} {path}")
        except Refusal as refusal:
            problems += refusal.problems
    return problems


def refuse_routers(recipe: Recipe) -> list[Problem]:
    """What the routers of trained models would add to training."""
    problems: list[Problem] = []
    for key, path in trained_folders(recipe).items():
        config, where = load_config(path), f"{key} {path}"
        # A critic may be of another architecture, without experts.
        wanted = recipe.model.aux_loss_coef if key == "model.path" or experts_of_token(config) else 0.0
        try:
            refuse_router_loss(config, where, wanted)
            refuse_router_noise(config, where)
        except Refusal as refusal:
            problems += refusal.problems
    return list(dict.fromkeys(problems))


def refuse_indivisible_models(recipe: Recipe) -> list[Problem]:
    """Models, also those that are only read, that the processes of `parallel.tensor_parallel` cannot divide."""
    problems: list[Problem] = []
    for path in model_folders(recipe).values():
        try:
            refuse_indivisible(load_config(path), path, recipe.parallel.tensor_parallel)
        except Refusal as refusal:
            problems += refusal.problems
    return problems


def has_critic(recipe: Recipe) -> bool:
    return recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic


def refuse_other_vocabulary(recipe: Recipe, key: str, path: str) -> None:
    """The same ids would be other tokens to it."""
    own = load_config(recipe.model.path).vocab_size
    other = load_config(path).vocab_size
    if own != other:
        raise Refusal.at(
            f"{key} {path}",
            f"has {other:,} tokens, and the policy {own:,}",
            "use a model of the same family",
            code="other-vocabulary",
        )


def refuse_other_tokenizer(recipe: Recipe, key: str, path: str) -> None:
    """Two vocabularies of one size may still number their tokens differently."""
    own, other = load_tokenizer(recipe.model.path).get_vocab(), load_tokenizer(path).get_vocab()
    differing = sorted(own.items() ^ other.items())
    if differing:
        token, number = differing[0]
        side = "the policy's" if (token, number) in own.items() else "its"
        raise Refusal.at(
            f"{key} {path}",
            f"its tokenizer is another one: {len(differing):,} tokens differ, the first is {token!r} "
            f"({number} in {side})",
            "use a teacher of the same family",
            code="other-vocabulary",
        )
