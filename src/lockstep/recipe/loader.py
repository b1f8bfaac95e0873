"""From YAML and `key=value` words to a checked recipe, with every problem told at once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.errors import Problem, Refusal
from lockstep.functions import give
from lockstep.masking import masked_tree, secrets_in
from lockstep.recipe.method_checks import preference_reads
from lockstep.recipe.methods import (
    OFFLINE,
    ONLINE,
    OPTIONAL_SECTIONS,
    method_defaults,
    over,
    sections_read,
    with_method_defaults,
)
from lockstep.recipe.recipe_checks import combination_problems, with_derived_defaults
from lockstep.recipe.registry import estimator_row, import_plugins
from lockstep.recipe.schema import Recipe


class _Loader(yaml.SafeLoader):
    """Safe YAML that reads 1e-5 as a number (YAML 1.1 wants 1.0e-5) and refuses a key given twice."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key is a word, not a list", key_node.start_mark)
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what `_Loader` would read as a number."""


_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def builtin_names() -> list[str]:
    """Recipes shipped with the package."""
    folder = resources.files("lockstep") / "recipes"
    return sorted(entry.name[: -len(".yaml")] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name_or_path: str) -> str:
    """The YAML text of a recipe file or of a built-in recipe."""
    path = Path(name_or_path)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Refusal.at(name_or_path, f"is not UTF-8 text ({error})") from error
    names = builtin_names()
    if name_or_path in names:
        return (resources.files("lockstep") / "recipes" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    near = difflib.get_close_matches(name_or_path, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise Refusal.at(
        f"recipe {name_or_path}",
        "no such file and no built-in recipe of that name",
        f"{hint}built in: {', '.join(names)}",
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), *, stored: bool = False) -> Recipe:
    """Read, override, check. Raises one Refusal with every problem found. `stored`: of a run folder, where an earlier
    version may have left secrets, which are masked."""
    values = _parse_yaml(recipe_text(name_or_path), name_or_path)
    if not isinstance(values, dict):
        raise Refusal.at(name_or_path, f"a recipe is a mapping of keys, not {type(values).__name__}")
    if stored:
        values = masked_tree(values)
    problems = [problem for word in overrides for problem in _apply_override(values, word)]
    return _checked(values, problems)


def recipe_with(recipe: str | Path | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """A recipe, or a file or built-in name of one, with values of Python's over its own.

    A key is dotted (`{"optim.lr": 1e-4}`) or a group (`{"optim": {"lr": 1e-4}}`). A function may stand where the
    recipe takes `path/to/file.py:name`: it is kept for the runs of this process, and the recipe says where it is from.
    """
    if isinstance(recipe, Recipe):
        values = recipe.model_dump(mode="json", exclude_unset=True)
    else:
        values = _parse_yaml(recipe_text(str(recipe)), str(recipe))
        if not isinstance(values, dict):
            raise Refusal.at(str(recipe), f"a recipe is a mapping of keys, not {type(values).__name__}")
    for key, value in overrides.items():
        *parents, leaf = key.split(".")
        group: dict[str, Any] = {leaf: _plain(value, key)}
        for parent in reversed(parents):
            group = {parent: group}
        values = over(values, group)
    return _checked(values, [])


def checked_recipe(values: dict[str, Any]) -> Recipe:
    """A recipe from groups of plain values, as a YAML file has them."""
    return _checked(values, [])


def value_text(value: Any) -> str:
    """One value as YAML on one line, which `load_recipe` reads back to the same value."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=2**20, sort_keys=False
    ).strip()
    return text.removesuffix("...").strip()


def _plain(value: Any, key: str) -> Any:
    """Values as a YAML file has them; a function becomes its path."""
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Path):
        return str(value)
    if not callable(value):
        return value
    return give(key, value)


def _checked(values: dict[str, Any], problems: list[Problem]) -> Recipe:
    problems = [*problems, *(Problem(*told) for told in secrets_in(values)), *import_plugins(values)]
    recipe, more = _validate(with_method_defaults(values))
    if problems or more or recipe is None:
        raise Refusal([*problems, *more])
    return with_derived_defaults(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that `load_recipe` reads back to the same recipe."""
    return yaml.dump(resolved(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Every key that the method reads, with its value."""
    unread = [section for section in OPTIONAL_SECTIONS if section not in sections_read(recipe.method)]
    unused: dict[str, Any] = dict.fromkeys(unread, True)
    if recipe.method in ONLINE:
        unused["batch"] = {"rows_per_update"}
        if not estimator_row(recipe.algorithm.advantage).critic:
            unused["critic"] = True
    else:
        unused["batch"] = {"prompts", "prompts_per_update"}
    if "preference" in sections_read(recipe.method):
        unused["preference"] = set(type(recipe.preference).model_fields) - set(preference_reads(recipe))
    return recipe.model_dump(mode="json", exclude=unused)


def method_text(name: str) -> str | None:
    """The defaults of a method as YAML; None when there is no such method."""
    if name not in OFFLINE and name not in ONLINE:
        return None
    return yaml.dump({"method": name, **method_defaults(name)}, Dumper=_Dumper, sort_keys=False)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise Refusal.at(where, f"not valid YAML: {error}") from error
    except RecursionError as error:
        raise Refusal.at(where, "is nested too deeply to be read", "a recipe has a few levels of keys") from error


def _apply_override(values: dict[str, Any], word: str) -> list[Problem]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        return [Problem(word, "an override is written key=value", "for example optim.lr=1e-5")]
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        return [Problem(key, f"value {text!r} is not valid YAML: {error}")]
    except RecursionError:
        return [Problem(key, f"value {text[:20]}... is nested too deeply to be read")]
    target: Any = values
    *parents, leaf = key.split(".")
    for parent in parents:
        if isinstance(target, list):
            if not parent.isdigit() or int(parent) >= len(target):
                return [Problem(key, f"{parent} is not an index into a list of {len(target)}")]
            target = target[int(parent)]
        else:
            if target.get(parent) is None or isinstance(target[parent], bool):
                target[parent] = _whole_group(parent, target.get(parent))
            target = target[parent]
        if not isinstance(target, dict | list):
            return [Problem(key, f"{parent} is a value, not a group of keys")]
    if isinstance(target, list):
        if not leaf.isdigit() or int(leaf) >= len(target):
            return [Problem(key, f"{leaf} is not an index into a list of {len(target)}")]
        target[int(leaf)] = value
    elif isinstance(value, bool) and key == "tape" and isinstance(target.get(key), dict):
        target[key]["record"] = value
    else:
        target[leaf] = value
    return []


def override_of(word: str) -> tuple[str, Any]:
    """A word `key=value` taken apart."""
    values: dict[str, Any] = {}
    if problems := _apply_override(values, word):
        raise Refusal(problems)
    key, found = word.partition("=")[0], values
    for part in key.split("."):
        found = found[part]
    return key, found


def _whole_group(name: str, short: bool | None) -> Any:
    """`tape=true tape.steps=5`: the short form and keys of the group may stand side by side."""
    if short is None:
        return {}
    return {"record": short} if name == "tape" else short


def _validate(values: dict[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """Schema problems, then combination problems of what is left when the bad keys are taken out.

    Pydantic stops at the schema; taking the bad keys out lets the second kind be told in the same breath.
    """
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as failure:
        problems = _first_of_each_key([_problem(error) for error in failure.errors()])
        rest = _without(values, [_plain_loc(error["loc"]) for error in failure.errors()])
        # What must be set gets a stand-in, so that its absence does not hide the other problems.
        for section, key in (("model", "path"), ("data", "train")):
            given = rest.get(section)
            rest[section] = {key: "unset", **(given if isinstance(given, dict) else {})}
        try:
            partial = Recipe.model_validate(rest)
        except ValidationError:
            return None, problems
        # A key whose value was taken out is not missed as well.
        named = {problem.where for problem in problems}
        return None, problems + [one for one in combination_problems(partial) if one.where not in named]
    return recipe, list(combination_problems(recipe))


def _first_of_each_key(problems: list[Problem]) -> list[Problem]:
    """A value that fits no branch of a union fails once for each branch; one of them tells enough."""
    return list({problem.where: problem for problem in reversed(problems)}.values())[::-1]


def _plain_loc(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Pydantic names the branch of a union in the location ('list[str]', 'literal[...]'); a key has no bracket."""
    return tuple(part for part in loc if isinstance(part, int) or ("[" not in part and part not in ("int", "float")))


def _problem(error: Any) -> Problem:
    loc = _plain_loc(error["loc"])
    key = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden":
        return Problem(key, "no such key", _nearest(loc))
    if error["type"] == "missing":
        return Problem(key, "must be set", _describe(loc))
    if error["type"] == "model_type":
        return Problem(key, f"is a group of keys, not a value (given: {error['input']!r})", f"write {key}.NAME=VALUE")
    reason = error["msg"][0].lower() + error["msg"][1:]
    remedy = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        near = difflib.get_close_matches(error["input"], choices, n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
    if error["type"] == "string_type" and isinstance(error["input"], bool):
        remedy = "YAML reads yes, no, on and off as true and false: put the word in quotes"
    return Problem(key, f"{reason} (given: {error['input']!r})", remedy)


def _without(values: Any, locs: list[tuple[int | str, ...]]) -> Any:
    heads = {loc[0] for loc in locs if len(loc) == 1}
    pairs = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else None
    if pairs is None:
        return values
    kept = {
        key: _without(value, [loc[1:] for loc in locs if len(loc) > 1 and loc[0] == key])
        for key, value in pairs
        if key not in heads
    }
    return kept if isinstance(values, dict) else list(kept.values())


def described_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> dict[str, str]:
    """Every full key of the schema with its description."""
    found: dict[str, str] = {}
    for name, info in model.model_fields.items():
        full = f"{prefix}{name}"
        found[full] = info.description or ""
        for section in sections_of(info.annotation):
            found |= described_keys(section, f"{full}.")
    return found


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Schema classes inside an annotation: `Lora | None` and `list[Source]` hold one each."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in getattr(annotation, "__args__", ()) for found in sections_of(part)]


# What other trainers call a key of ours.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "batch_size": "batch.rows_per_update",
    "train_batch_size": "batch.rows_per_update",
    "micro_batch_size": "batch.rows",
    "per_device_train_batch_size": "batch.rows",
    "gradient_accumulation_steps": "batch.rows_per_update",
    "num_train_epochs": "run.epochs",
    "total_epochs": "run.epochs",
    "max_steps": "run.steps",
    "lora_rank": "model.lora.rank",
    "lora_r": "model.lora.rank",
    "lora_alpha": "model.lora.alpha",
    "max_grad_norm": "optim.clip",
    "grad_clip": "optim.clip",
    "warmup_ratio": "optim.warmup",
    "warmup_steps": "optim.warmup",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep_last",
    "metric_for_best_model": "checkpoint.best",
    "load_best_model_at_end": "checkpoint.best",
    "early_stopping_patience": "run.stop_early.patience",
    "early_stopping_threshold": "run.stop_early.min_delta",
    "eval_steps": "val.every",
    "report_to": "log.track",
    "num_generations": "rollout.n",
    "n_samples_per_prompt": "rollout.n",
    "max_completion_length": "rollout.max_tokens",
    "max_response_length": "rollout.max_tokens",
    "max_new_tokens": "rollout.max_tokens",
    "generate_max_len": "rollout.max_tokens",
    "max_prompt_length": "data.max_prompt_tokens",
    "prompt_max_len": "data.max_prompt_tokens",
    "adv_estimator": "algorithm.advantage",
    "clip_ratio_low": "algorithm.clip_low",
    "clip_ratio_high": "algorithm.clip_high",
    "clip_ratio_c": "algorithm.dual_clip",
    "epsilon": "algorithm.clip_low",
    "epsilon_high": "algorithm.clip_high",
    "loss_agg_mode": "algorithm.aggregation",
    "entropy_coeff": "algorithm.entropy",
    "kl_loss_coef": "algorithm.kl.coefficient",
    "kl_coef": "algorithm.kl.coefficient",
    "beta": "preference.beta, or online algorithm.kl.coefficient",
    "label_smoothing": "preference.label_smoothing",
    "rpo_alpha": "preference.nll",
    "nll_loss_coef": "preference.nll",
    "simpo_gamma": "preference.gamma",
    "cpo_alpha": "preference.nll",
    "loss_type": "preference.loss",
    "answer_key": "data.label_key, or offline data.response_key",
    "input_key": "data.prompt_key",
    "output_key": "data.response_key",
    "system_prompt": "data.system",
    "input_template": "data.prompt_format",
    "chat_template": "data.template",
    "ref_model": "preference.reference",
    "ref_pretrain": "preference.reference",
    "precompute_ref_log_probs": "preference.precompute",
    "desirable_weight": "preference.desirable",
    "undesirable_weight": "preference.undesirable",
    "center_rewards_coefficient": "rm.centre",
    "placeholder_token": "prm.placeholder",
    "reward_tokens": "prm.tokens",
    "teacher_model": "distill.teacher",
    "kd_coef": "distill.coefficient",
    "lmbda": "distill.coefficient",
    "use_kl_loss": "algorithm.kl.where",
    "ppo_epochs": "algorithm.epochs",
    "ppo_mini_batch_size": "batch.prompts_per_update",
    "reward_funcs": "reward.function",
    "custom_reward_function": "reward.function",
}


# Keys of other trainers that lockstep has no counterpart for, and what to do instead.
_ABSENT = {
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "bnb_4bit_quant_type"),
        "weights are not quantized here; train an adapter in bf16: model.dtype=bf16 model.lora.rank=16",
    ),
    **dict.fromkeys(
        ("zero_stage", "stage", "deepspeed", "fsdp"),
        "weights, gradients and optimizer are sharded wherever several processes train; see parallel.offload for less",
    ),
}


def _nearest(loc: tuple[int | str, ...]) -> str:
    known = described_keys()
    names = [str(part) for part in loc if isinstance(part, str)]
    full, leaf = ".".join(names), names[-1]
    parent = full[: -len(leaf)]
    siblings = [key[len(parent) :] for key in known if key.startswith(parent) and "." not in key[len(parent) :]]
    if leaf in _ABSENT:
        return _ABSENT[leaf]
    near = [_ELSEWHERE[leaf]] if leaf in _ELSEWHERE else []
    # Below this likeness a hint names another thing more often than the one that was meant (`stage` and `tape`).
    near = near or [parent + name for name in difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)]
    near = near or [key for key in known if key.split(".")[-1] == leaf]
    leaves = {key.split(".")[-1]: key for key in known}
    near = near or [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    if near:
        return f"did you mean {near[0]}?"
    return f"keys of {parent.rstrip('.') or 'a recipe'}: {', '.join(siblings)}"


def _describe(loc: tuple[int | str, ...]) -> str:
    return described_keys().get(".".join(str(part) for part in loc if isinstance(part, str)), "")
