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

from lockstep.errors import Problem, Refusal, first_line
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
    ABSENT,
    OTHER_TRAINERS,
    RENAMED,
    both_names,
    current_key,
    stored_recipe,
    warn_renamed,
    with_current_names,
)
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import FUNCTION_PATH, invalid_reason


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
        raise Refusal([_invalid_yaml(where, "", error)]) from error
    except RecursionError as error:
        raise Refusal.at(
            where, "is nested too deeply", "a recipe has only a few levels of keys", code="nested-too-deeply"
        ) from error


def _invalid_yaml(where: str, what: str, error: yaml.YAMLError) -> Problem:
    """Returns the problem of a text that YAML cannot parse. A problem in a file names the line."""
    mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None) or first_line(error)
    if "'\\t'" in why:
        remedy = "indent with spaces, because YAML does not allow tabs"
    elif "given twice" in why:
        remedy = "remove one of the two, or put the keys of both into one group"
    elif "mapping values are not allowed" in why:
        remedy = "indent the keys of a group equally, and quote a text that contains a colon and a space"
    else:
        remedy = "check the brackets, quotes and indentation there"
    line = f"line {mark.line + 1}, column {mark.column + 1}: " if mark and not what else ""
    return Problem(where, f"{what}not valid YAML: {line}{why}", remedy, code="invalid-yaml")


def _apply_override(values: dict[str, Any], word: str) -> list[Problem]:
    key, equals, text = word.partition("=")
    if not equals or not key:
        return [Problem(word, "an override must be key=value", "for example optim.lr=1e-5", code="invalid-syntax")]
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        return [_invalid_yaml(key, f"value {text!r} is ", error)]
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
        found = [new for new in combination_problems(partial) if new.where not in reported]
        return None, problems + [new for new in found if not _needs_one_of(new, reported)]
    return recipe, list(combination_problems(recipe))


def _needs_one_of(problem: Problem, removed: set[str]) -> bool:
    """Returns whether a key lacks another key only because the value of that key was invalid and is removed."""
    keys = {re.sub(r"\.\d+$", "", key) for key in removed}
    return problem.code == "needs-key" and any(re.search(rf"\b{re.escape(key)}\b", problem.remedy) for key in keys)


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
    remedy = _example(loc) or _within_bound(key, error)
    if error["type"] == "literal_error" and isinstance(error["input"], str):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        near = difflib.get_close_matches(error["input"], choices, n=1)
        remedy = f"did you mean {near[0]}?" if near else ""  # the reason lists the choices
        if error["input"].endswith(".py") and FUNCTION_PATH in error["ctx"]["expected"]:
            remedy = f"write {error['input']}:NAME, with the name of a class or function of the file"
    if error["type"] == "string_type" and isinstance(error["input"], bool):
        remedy = "YAML reads yes, no, on and off as true and false: quote the word"
    return Problem(key, f"{reason} (given: {error['input']!r})", remedy, code="invalid-value")


def _example(loc: tuple[int | str, ...]) -> str:
    """Returns the default of a key that has a number or a text as default, as an example of a valid value."""
    sections: list[type[BaseModel]] = [Recipe]
    for name in loc[:-1]:
        fields = [section.model_fields[name] for section in sections if name in section.model_fields]
        sections = [inner for info in fields for inner in sections_of(info.annotation)]
    for section in sections:
        default = section.model_fields[loc[-1]].default if loc[-1] in section.model_fields else None
        if isinstance(default, int | float | str):
            return f"for example {'.'.join(map(str, loc))}={yaml.safe_dump(default).split()[0]}"
    return ""


# What to set a key to, by the type of pydantic's error; the error's `ctx` fills the braces.
_BOUNDS = {
    "greater_than": "more than {gt:g}",
    "greater_than_equal": "{ge:g} or more",
    "less_than": "less than {lt:g}",
    "less_than_equal": "{le:g} or less",
}


def _within_bound(key: str, error: Any) -> str:
    """Returns the remedy for a number that is out of bounds, if the key has no default that could be the example."""
    bound = _BOUNDS.get(error["type"])
    return f"set {key} to {bound.format(**error['ctx'])}" if bound else ""


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


def _nearest(loc: tuple[int | str, ...]) -> str:
    keys = described_keys()
    names = [str(part) for part in loc if isinstance(part, str)]
    full, leaf = ".".join(names), names[-1]
    parent = full[: -len(leaf)]
    siblings = [key[len(parent) :] for key in keys if key.startswith(parent) and "." not in key[len(parent) :]]
    if leaf in ABSENT:
        return ABSENT[leaf]
    near = [OTHER_TRAINERS[leaf]] if leaf in OTHER_TRAINERS else []
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
    keys, key = described_keys(), ".".join(str(part) for part in loc if isinstance(part, str))
    if keys.get(key):
        return keys[key]
    # A group of keys has no description. The first key of a required group is the required one.
    first = next((name for name in keys if name.startswith(f"{key}.")), None)
    return f"set {first}: {keys[first]}" if first else ""
