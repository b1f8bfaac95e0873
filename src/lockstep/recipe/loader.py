"""Loads a recipe from YAML and `key=value` overrides, and reports all problems at once."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from lockstep.errors import Problem, Refusal
from lockstep.functions import class_path, register_callable
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
from lockstep.recipe.renamed_keys import (
    RENAMED,
    both_names,
    current_key,
    stored_recipe,
    warn_renamed,
    with_current_names,
)
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import invalid_reason


class _Loader(yaml.SafeLoader):
    """A safe YAML loader that reads 1e-5 as a number (YAML 1.1 requires 1.0e-5) and rejects duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a word, not a list or a mapping", key_node.start_mark
                )
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=deep)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """A YAML dumper that quotes a text if `_Loader` would read it as a number."""


_EXPONENT = re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)[eE][-+]?\d+$")
for _kind in (_Loader, _Dumper):
    _kind.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def builtin_names() -> list[str]:
    """Returns the names of the recipes shipped with the package."""
    folder = resources.files("lockstep") / "recipes"
    return sorted(entry.name[: -len(".yaml")] for entry in folder.iterdir() if entry.name.endswith(".yaml"))


def recipe_text(name_or_path: str) -> str:
    """Returns the YAML text of a recipe file or of a built-in recipe."""
    path = Path(name_or_path)
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Refusal.at(name_or_path, f"is not UTF-8 text ({error})", code="unreadable") from error
    names = builtin_names()
    if name_or_path in names:
        return (resources.files("lockstep") / "recipes" / f"{name_or_path}.yaml").read_text(encoding="utf-8")
    near = difflib.get_close_matches(name_or_path, names, n=1)
    hint = f"did you mean {near[0]}? " if near else ""
    raise Refusal.at(
        f"recipe {name_or_path}",
        "no such file, and no built-in recipe with this name",
        f"{hint}built in: {', '.join(names)}",
        code="no-such-file",
    )


def load_recipe(name_or_path: str, overrides: Sequence[str] = (), *, stored: bool = False) -> Recipe:
    """Reads a recipe, applies overrides and checks it. Raises one `Refusal` that lists all problems of the recipe.

    `stored`: the recipe is from a run folder, so secrets that an earlier version of lockstep wrote into it are masked.
    """
    values = _mapping(name_or_path)
    if stored:
        values = stored_recipe(masked_tree(values))
    values, problems = with_current_names(values)
    problems += both_names(word.partition("=")[0] for word in overrides)
    problems += [problem for word in overrides for problem in _apply_override(values, word)]
    return _checked(values, problems)


def _mapping(name_or_path: str) -> dict[str, Any]:
    """Returns the values of a recipe file or of a built-in recipe."""
    values = _parse_yaml(recipe_text(name_or_path), name_or_path)
    if not isinstance(values, dict):
        raise Refusal.at(
            name_or_path, f"a recipe must be a mapping of keys, not {type(values).__name__}", code="wrong-type"
        )
    return values


def recipe_with(recipe: str | Path | Recipe, overrides: Mapping[str, Any]) -> Recipe:
    """Returns a recipe (object, file or built-in name) with overrides given as Python values.

    A key is dotted (`{"optim.lr": 1e-4}`) or a group (`{"optim": {"lr": 1e-4}}`). The value of a function key may be a
    Python function instead of `path/to/file.py:name`. A given Python function is registered for the runs of this
    process, and the recipe stores the location of the function.
    """
    if isinstance(recipe, Recipe):
        given = recipe.model_dump(mode="json", exclude_unset=True)
    else:
        given = _mapping(str(recipe))
    values, problems = with_current_names(given)
    problems += both_names(overrides)
    for key, value in overrides.items():
        *parents, leaf = key.split(".")
        group: dict[str, Any] = {leaf: _plain(value, key)}
        for parent in reversed(parents):
            group = {parent: group}
        group, more = with_current_names(group)
        problems += more
        values = over(values, group)
    return _checked(values, problems)


def checked_recipe(values: dict[str, Any]) -> Recipe:
    """Returns a recipe from nested plain values, as in a YAML file."""
    return _checked(*with_current_names(values))


def value_text(value: Any) -> str:
    """Returns one value as one line of YAML, from which `load_recipe` restores the same value."""
    text = yaml.dump(
        value, Dumper=_Dumper, default_flow_style=True, allow_unicode=True, width=2**20, sort_keys=False
    ).strip()
    return text.removesuffix("...").strip()


def _plain(value: Any, key: str) -> Any:
    """Converts a Python value to plain values as in a YAML file; a function or a class becomes its path."""
    if isinstance(value, Mapping):
        return {name: _plain(inner, f"{key}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, key) for inner in value]
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json", exclude_unset=True)
    if isinstance(value, Path):
        return str(value)
    if inspect.isclass(value):
        return class_path(key, value)
    if hasattr(value, "reset") and hasattr(value, "step"):
        why = f"is an object of {type(value).__name__}, and each trajectory needs its own object"
        remedy = "pass the class, and its arguments as rollout.environment_args"
        raise Refusal.at(key, why, remedy, code="wrong-type")
    if not callable(value):
        return value
    return register_callable(key, value)


def _checked(values: dict[str, Any], problems: list[Problem]) -> Recipe:
    problems = [
        *problems,
        *(Problem(*secret, code="secret-in-recipe") for secret in secrets_in(values)),
        *import_plugins(values),
    ]
    recipe, more = _validate(with_method_defaults(values))
    if problems or more or recipe is None:
        raise Refusal([*problems, *more])
    return with_derived_defaults(recipe)


def dump_recipe(recipe: Recipe) -> str:
    """Returns the resolved recipe as YAML, from which `load_recipe` restores the same recipe."""
    return yaml.dump(resolved(recipe), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def resolved(recipe: Recipe) -> dict[str, Any]:
    """Returns every key that the method reads, with its value."""
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
    """Returns the defaults of a method as YAML, or None if there is no such method."""
    if name not in OFFLINE and name not in ONLINE:
        return None
    return yaml.dump({"method": name, **method_defaults(name)}, Dumper=_Dumper, sort_keys=False)


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise Refusal.at(where, f"not valid YAML: {error}", code="invalid-yaml") from error
    except RecursionError as error:
        raise Refusal.at(
            where, "is nested too deeply", "a recipe has only a few levels of keys", code="nested-too-deeply"
        ) from error


def _apply_override(values: dict[str, Any], word: str) -> list[Problem]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        return [Problem(word, "an override must be key=value", "for example optim.lr=1e-5", code="invalid-syntax")]
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        return [Problem(key, f"value {text!r} is not valid YAML: {error}", code="invalid-yaml")]
    except RecursionError:
        return [Problem(key, f"value {text[:20]}... is nested too deeply", code="nested-too-deeply")]
    warn_renamed(key)
    key = current_key(key)
    both: list[Problem] = []
    if isinstance(value, dict):
        value, both = with_current_names(value, key)
    target: Any = values
    *parents, leaf = key.split(".")
    for parent in parents:
        if isinstance(target, list):
            if not parent.isdigit() or int(parent) >= len(target):
                return [
                    Problem(key, f"{parent} is not an index of a list with {len(target)} entries", code="out-of-range")
                ]
            target = target[int(parent)]
        else:
            if target.get(parent) is None or isinstance(target[parent], bool):
                target[parent] = _expand_short_form(parent, target.get(parent))
            target = target[parent]
        if not isinstance(target, dict | list):
            return [Problem(key, f"{parent} is a value, not a group of keys", code="not-a-group")]
    if isinstance(target, list):
        if not leaf.isdigit() or int(leaf) >= len(target):
            return [Problem(key, f"{leaf} is not an index of a list with {len(target)} entries", code="out-of-range")]
        target[int(leaf)] = value
    elif isinstance(value, bool) and key == "tape" and isinstance(target.get(key), dict):
        target[key]["record"] = value
    else:
        target[leaf] = value
    return both


def override_of(word: str) -> tuple[str, Any]:
    """Splits `key=value` into the key and the parsed value."""
    values: dict[str, Any] = {}
    if problems := _apply_override(values, word):
        raise Refusal(problems)
    key, value = current_key(word.partition("=")[0]), values
    for part in key.split("."):
        value = value[part]
    return key, value


def _expand_short_form(name: str, short: bool | None) -> Any:
    """Expands `tape=true` to a group, so that `tape=true tape.steps=5` works."""
    if short is None:
        return {}
    return {"record": short} if name == "tape" else short


def _validate(values: dict[str, Any]) -> tuple[Recipe | None, list[Problem]]:
    """Validates the schema, then the combinations of keys.

    If the schema check fails, the invalid keys are removed, so that invalid combinations of the other keys are reported
    too.
    """
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as failure:
        problems = _first_of_each_key([_problem(error) for error in failure.errors()])
        rest = _without(values, [_plain_loc(error["loc"]) for error in failure.errors()])
        # Missing required keys get a placeholder value, so that the check of combinations can still run.
        for section, key in (("model", "path"), ("data", "train")):
            given = rest.get(section)
            rest[section] = {key: "unset", **(given if isinstance(given, dict) else {})}
        try:
            partial = Recipe.model_validate(rest)
        except ValidationError:
            return None, problems
        # A key that was removed because it is invalid must not also be reported as missing.
        reported = {problem.where for problem in problems}
        return None, problems + [new for new in combination_problems(partial) if new.where not in reported]
    return recipe, list(combination_problems(recipe))


def _first_of_each_key(problems: list[Problem]) -> list[Problem]:
    """Keeps one problem per key, because pydantic reports a value that matches no branch of a union once per branch."""
    return list({problem.where: problem for problem in reversed(problems)}.values())[::-1]


def _plain_loc(loc: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Returns the location of a pydantic error without the union branches that pydantic adds ('list[str]',
    'literal[...]')."""
    return tuple(part for part in loc if isinstance(part, int) or ("[" not in part and part not in ("int", "float")))


def _problem(error: Any) -> Problem:
    loc = _plain_loc(error["loc"])
    key = ".".join(str(part) for part in loc)
    if error["type"] == "extra_forbidden":
        return Problem(key, "no such key", _nearest(loc), code="unknown-key")
    if error["type"] == "missing":
        return Problem(key, "must be set", _describe(loc), code="not-set")
    if error["type"] == "model_type":
        return Problem(
            key, f"must be a group of keys (given: {error['input']!r})", f"write {key}.NAME=VALUE", code="not-a-group"
        )
    reason = invalid_reason(error)
    remedy = ""
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        near = difflib.get_close_matches(error["input"], choices, n=1)
        remedy = f"did you mean {near[0]}?" if near else ""
    if error["type"] == "string_type" and isinstance(error["input"], bool):
        remedy = "YAML reads yes, no, on and off as true and false: quote the word"
    return Problem(key, f"{reason} (given: {error['input']!r})", remedy, code="invalid-value")


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
    """Returns every dotted key of the schema with its description."""
    keys: dict[str, str] = {}
    for name, info in model.model_fields.items():
        full = f"{prefix}{name}"
        keys[full] = info.description or ""
        for section in sections_of(info.annotation):
            keys |= described_keys(section, f"{full}.")
    return keys


def sections_of(annotation: Any) -> list[type[BaseModel]]:
    """Returns the schema classes inside an annotation, such as `Lora | None` or `list[Source]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for part in getattr(annotation, "__args__", ()) for section in sections_of(part)]


# Key names of other trainers, mapped to recipe keys.
_ELSEWHERE = {
    "learning_rate": "optim.lr",
    "max_length": "data.max_tokens",
    "max_seq_length": "data.max_tokens",
    "max_seq_len": "data.max_tokens",
    "batch_size": "batch.rows_per_update",
    "train_batch_size": "batch.rows_per_update",
    "micro_batch_size": "batch.micro_batch_size",
    "per_device_train_batch_size": "batch.micro_batch_size",
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
    "early_stopping_patience": "run.early_stopping.patience",
    "early_stopping_threshold": "run.early_stopping.min_delta",
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
    "f_divergence_type": "preference.divergence",
    "f_alpha_divergence_coef": "preference.alpha, which is 1 minus TRL's value",
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
    "chat_template_kwargs": "data.template_arguments",
    "apply_chat_template_kwargs": "data.template_arguments",
    "roles_to_train": "data.train_roles",
    "assistant_only_loss": "data.train_roles",
    "multiturn": "data.turns",
    "mask_history": "data.turns",
    "ref_model": "preference.reference",
    "ref_pretrain": "preference.reference",
    "precompute_ref_log_probs": "preference.precompute",
    "desirable_weight": "preference.desirable",
    "undesirable_weight": "preference.undesirable",
    "center_rewards_coefficient": "rm.center_rewards_coef",
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


# Keys of other trainers that lockstep does not have, and what to do instead.
_ABSENT = {
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config", "bnb_4bit_quant_type"),
        "use model.quantize=nf4 (4 bits) or model.quantize=int8 with an adapter: model.lora.rank=16",
    ),
    **dict.fromkeys(
        ("zero_stage", "stage", "deepspeed", "fsdp"),
        "weights, gradients and optimizer state are sharded over all processes; parallel.offload saves more memory",
    ),
}


def _nearest(loc: tuple[int | str, ...]) -> str:
    keys = described_keys()
    names = [str(part) for part in loc if isinstance(part, str)]
    full, leaf = ".".join(names), names[-1]
    parent = full[: -len(leaf)]
    siblings = [key[len(parent) :] for key in keys if key.startswith(parent) and "." not in key[len(parent) :]]
    if leaf in _ABSENT:
        return _ABSENT[leaf]
    near = [_ELSEWHERE[leaf]] if leaf in _ELSEWHERE else []
    # The cutoffs are high: for less similar names, "did you mean" is wrong more often than right (`stage` and `tape`).
    names_here = [*siblings, *(old[len(parent) :] for old in RENAMED if old.rpartition(".")[0] == parent.rstrip("."))]
    near = near or [current_key(parent + name) for name in difflib.get_close_matches(leaf, names_here, n=1, cutoff=0.7)]
    near = near or [current_key(key) for key in (*keys, *RENAMED) if key.split(".")[-1] == leaf]
    leaves = {key.split(".")[-1]: current_key(key) for key in (*RENAMED, *keys)}
    near = near or [leaves[name] for name in difflib.get_close_matches(leaf, list(leaves), n=1, cutoff=0.75)]
    if near:
        return f"did you mean {near[0]}?"
    return f"keys of {parent.rstrip('.') or 'a recipe'}: {', '.join(siblings)}"


def _describe(loc: tuple[int | str, ...]) -> str:
    return described_keys().get(".".join(str(part) for part in loc if isinstance(part, str)), "")
