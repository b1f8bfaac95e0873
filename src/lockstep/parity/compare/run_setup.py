"""Finds the differences of two runs in recipe, data, model, versions and device, and their effect on the curves."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from lockstep.masking import comparable
from lockstep.parity.compare.comparison import Difference, SetupPart
from lockstep.parity.compare.logs.log_curves import Evidence, Log
from lockstep.recipe.measure import facts_of
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Effect
from lockstep.run.metrics import missing_steps

Differences = tuple[list[Difference], list[str]]
Values = Mapping[str, Any]

_ORDER = ("blocks", "matters", "harmless")
_ABSENT = object()

# Packages that affect the computation. Packages that are not listed here only read and write data.
_COMPUTING = ("torch", "transformers", "peft", "triton", "tokenizers", "vllm", "sglang")
# Device properties that are not compared here, because they change during a run or are compared elsewhere.
_NOT_COMPARED = ("memory", "visible", "count", "torch", "ray_resource")
_DEVICE = Effect("harmless", "devices are expected to differ; sums in another order round differently")
_FUNCTIONS = (
    *("reward.function", "rollout.function", "rollout.environment", "rollout.agent"),
    *("algorithm.advantage", "algorithm.loss", "data.reader"),
)
_LENGTH = ("run.steps", "run.epochs")
UNREAD = Effect("harmless", "neither side uses it")
UNKNOWN = Effect("matters", "the effect of this key is unknown; see `lockstep help recipe`")
MAX_SAMPLES = 8
# Keys of the recorded device information that are not software versions.
_NO_VERSION = {"name", "chip", "count", "memory", "visible", "threads", "instructions", "kernel", "torch"}
_NO_VERSION |= {"ray_resource", "emulated"}


def differences(a: Log, b: Log) -> tuple[list[Difference], list[str]]:
    """Returns the set-up differences between A and B, and descriptions of what is unknown. Differences that block the
    comparison come first."""
    if a.evidence is None or b.evidence is None:
        return [], [
            f"{log.source} ({log.kind}) is not a run folder: its recipe, data, weights and versions are unknown"
            for log in (a, b)
            if log.evidence is None
        ]
    unknown = [sentence for log, one in ((a, a.evidence), (b, b.evidence)) for sentence in _resumed(log, one)]
    unknown += [sentence for log in (a, b) for sentence in _holes(log)]
    found, missing = setup_differences(a.evidence, b.evidence)
    return found, unknown + missing


def setup_differences(a: Evidence, b: Evidence) -> Differences:
    """Returns the differences between the recorded set-ups of two run folders."""
    found: list[Difference] = []
    unknown: list[str] = []
    for look in (_recipe, _own_code, _data, _model, _versions, _engine, _determinism, _device):
        differ, missing = look(a, b)
        found += differ
        unknown += missing
    return sorted(found, key=lambda difference: _ORDER.index(difference.weight)), unknown


def _recipe(a: Evidence, b: Evidence) -> Differences:
    """Compares the newest recipes, then the earlier recipes of runs that were resumed with other keys."""
    found = _recipes(a.recipe, b.recipe, a.env, b.env)
    seen = [(one.key, one.a, one.b) for one in found]
    for last in sorted({*a.earlier, *b.earlier}):
        for one in _recipes(a.recipe_at(last), b.recipe_at(last), a.env, b.env):
            if (one.key, one.a, one.b) not in seen:
                seen.append((one.key, one.a, one.b))
                effect = one.effect
                if one.weight != "harmless":
                    effect = f"{effect}; {_change(last, a, b, length=one.key in _LENGTH)}"
                found.append(replace(one, key=f"{one.key} to step {last}", effect=effect))
    return found, []


def _change(last: int, a: Evidence, b: Evidence, *, length: bool) -> str:
    """Describes which of A and B was resumed after step `last` with other recipe keys. If `length` is true, the changed
    key is the length of the run, and its effect is described too."""
    sides = " and ".join(f"side {name}" for name, one in (("a", a), ("b", b)) if last in one.earlier)
    resumed = f"{sides} was resumed after step {last} with"
    if not length:
        return f"{resumed} other keys"
    return (
        f"{resumed} another length, which stretched its learning-rate schedule: the curves differ up to step {last}"
        " because of the schedule, and later because the weights differ"
    )


def _recipes(recipe_a: Values, recipe_b: Values, env_a: Values, env_b: Values) -> list[Difference]:
    sides = _Recipes(recipe_a, recipe_b)
    found = []
    length = False
    for key, left, right in _unlike(recipe_a, recipe_b):
        if key in _LENGTH:
            length = True
            continue
        weight, effect = _weighed(key, left, right, sides, env_a, env_b)
        found.append(Difference("recipe", key, left, right, weight, effect))
    return found + ([_length(sides)] if length else [])


def _weighed(key: str, a: Any, b: Any, sides: _Recipes, env_a: Values, env_b: Values) -> Effect:
    facts = facts_of(key)
    if facts.read_where is not None:
        other, values = facts.read_where
        if not any(value in values for value in sides.get(other)):
            return UNREAD
    if key == "model.path":
        recorded = all(_at(env, "model.weights") for env in (env_a, env_b))
        return _path_effect(recorded, "the weights are compared by fingerprint")
    if key.startswith("data.train.") and key.endswith(".path"):
        recorded = all(_at(env, "data.train") for env in (env_a, env_b))
        return _path_effect(recorded, "the rows are compared by fingerprint")
    if key in ("reward.function", "reward.model", "reward.process", "reward.remote") and (a is None or b is None):
        return Effect("blocks", "only one of the two runs has this reward")
    if all(_code(env).get(key, {}).get("sha256") for env in (env_a, env_b)) and _function(a) == _function(b):
        return _path_effect(True, "the files are compared by checksum")
    return facts.effect or UNKNOWN


def _function(value: Any) -> str:
    """Returns the name of the function in `path/to/file.py:name`."""
    return str(value).rpartition(":")[2]


def _code(env: Values) -> Values:
    """Returns the checksums of the user's files by recipe key."""
    found = env.get("own_code")
    return found if isinstance(found, Mapping) else {}


def _own_code(a: Evidence, b: Evidence) -> Differences:
    """Compares the checksums of the user's code files that both recipes name under the same key."""
    codes = _code(a.env), _code(b.env)
    effect = "the content of the file differs, so its code may compute something else"
    found = [
        Difference("own code", key, codes[0][key]["sha256"], codes[1][key]["sha256"], "matters", effect)
        for key in codes[0]
        if key in codes[1] and codes[0][key]["sha256"] != codes[1][key]["sha256"]
    ]
    named = [[key for key in _FUNCTIONS if ":" in str(_at(one.recipe, key) or "")] for one in (a, b)]
    recorded = [
        not keys or isinstance(one.env.get("own_code"), Mapping) for keys, one in zip(named, (a, b), strict=True)
    ]
    missing = [] if all(recorded) else [_unknown("the content of the user's functions (checksum)", recorded)]
    return found, missing


def _path_effect(has_fingerprints: bool, how: str) -> Effect:
    if has_fingerprints:
        return Effect("harmless", f"only a name: {how}")
    return Effect("matters", "the path differs, and there are no recorded fingerprints to compare")


def _length(sides: _Recipes) -> Difference:
    """Compares the lengths of the runs. If the learning rate does not depend on the length, common steps are
    comparable."""
    key, (a, b) = "run.steps", sides.get("run.steps")
    if a == b:
        key, (a, b) = "run.epochs", sides.get("run.epochs")
    shares = [0 < warmup < 1 for warmup in sides.get("optim.warmup") if isinstance(warmup, (int, float))]
    if all(schedule == "constant" for schedule in sides.get("optim.schedule")) and not any(shares):
        return Difference("recipe", key, a, b, "harmless", "the learning rate is constant: common steps are comparable")
    if a is None or b is None:
        effect = (
            "the learning rate depends on the length of the run, so the runs are comparable only if they have equally "
            "many steps"
        )
        return Difference("recipe", key, a, b, "matters", effect)
    effect = "the learning rate depends on the length of the run, so it differs between the runs at the same step"
    return Difference("recipe", key, a, b, "blocks", effect)


def _data(a: Evidence, b: Evidence) -> Differences:
    train_a, train_b = _fingerprints(a, "data.train"), _fingerprints(b, "data.train")
    if not (train_a and train_b):
        return [], [_unknown("the training rows' fingerprints", [train_a, train_b])]
    found = []
    if train_a != train_b:
        effect = "the files of the training rows differ (generated files can differ: copy them to both machines)"
        found.append(Difference("data", "data.train", train_a, train_b, "blocks", effect))
    for key in ("data.kept.rows", "data.kept.tokens"):
        if all(_has(one.env, key) for one in (a, b)):
            kept = Effect("blocks", "the trained tokens differ because of template, tokenizer or limits")
            found += _differences("data", key, a, b, kept)
    images_a, images_b = _image_fingerprints(a), _image_fingerprints(b)
    unknown = []
    if bool(images_a) != bool(images_b):  # older versions recorded none
        unknown.append(_unknown("the content of the images", [images_a, images_b]))
    elif images_a != images_b:
        found.append(
            Difference("data", "data.train", images_a, images_b, "blocks", "the images of the training rows differ")
        )
    val_a, val_b = _fingerprints(a, "data.val"), _fingerprints(b, "data.val")
    if val_a != val_b:
        found.append(Difference("data", "data.val", val_a, val_b, "harmless", "the val/ curves use different rows"))
    return found, unknown


def _fingerprints(one: Evidence, key: str) -> list[str]:
    return [str(source.get("fingerprint"))[:12] for source in _at(one.env, key) or [] if isinstance(source, dict)]


def _image_fingerprints(one: Evidence) -> list[str]:
    sources = [source for source in _at(one.env, "data.train") or [] if isinstance(source, dict)]
    return [
        str(source["images"].get("fingerprint"))[:12] for source in sources if isinstance(source.get("images"), dict)
    ]


def _model(a: Evidence, b: Evidence) -> Differences:
    found: list[Difference] = []
    unknown = []
    parts: tuple[tuple[SetupPart, str, str, str], ...] = (
        ("weights", "model.weights", "the initial weights", "training starts from other weights"),
        ("tokenizer", "model.tokenizer", "the tokenizer", "the same text becomes other tokens"),
        ("tokenizer", "model.template", "the chat template", "prompts have another format"),
        ("tokenizer", "model.processor", "the image processor", "the same image becomes other pixels"),
    )
    if not any(_at(one.recipe, "model.vision") for one in (a, b)):
        parts = parts[:-1]
    for part, key, subject, effect in parts:
        # A recorded template may be None, because a model may have no chat template. A checksum that is None was not
        # recorded.
        recorded = [_has(one.env, key) if key == "model.template" else bool(_at(one.env, key)) for one in (a, b)]
        if all(recorded):
            found += _differences(part, key, a, b, Effect("blocks", effect))
        else:
            unknown.append(_unknown(f"{subject} (fingerprint)", recorded))
    return found, unknown


def _versions(a: Evidence, b: Evidence) -> Differences:
    found, unknown = [], []
    code = Effect("matters", "another version of the code: its results may differ")
    for key in ("lockstep", "git_commit"):
        found += _differences("versions", key, a, b, code)
    packages = [_at(one.env, "packages") for one in (a, b)]
    if all(isinstance(one, dict) for one in packages):
        for name in sorted({*packages[0], *packages[1]}):
            effect = code if name in _COMPUTING else Effect("harmless", "not part of the computation")
            found += _differences("versions", f"packages.{name}", a, b, effect)
    else:
        unknown.append(_unknown("the versions of packages", packages))
    unused = Effect("harmless", "not part of the computation")
    for key in ("python", "platform"):
        found += _differences("versions", key, a, b, unused)
    return found, unknown


def _engine(a: Evidence, b: Evidence) -> Differences:
    """Compares the versions and the number of rollout servers. The recipe comparison covers the engine's name, and the
    package comparison covers the versions of built-in engines."""
    versions = Effect(
        "matters", "another version of the rollout engine: it samples from the same distribution with other kernels"
    )
    number = Effect("harmless", "only the number of rollout servers differs")
    return [
        *_differences("engine", "engine.version", a, b, versions),
        *_differences("engine", "engine.servers", a, b, number),
    ], []


def _determinism(a: Evidence, b: Evidence) -> Differences:
    switches = [_at(one.env, "determinism") for one in (a, b)]
    if not all(isinstance(one, dict) for one in switches):
        return [], [_unknown("the switches for determinism", [isinstance(one, dict) for one in switches])]
    effect = "one run is bit-reproducible, and the other may not be"
    return [
        Difference("determinism", name, switches[0].get(name), switches[1].get(name), "matters", effect)
        for name in sorted({*switches[0], *switches[1]})
        if switches[0].get(name) != switches[1].get(name)
    ], []


def _device(a: Evidence, b: Evidence) -> Differences:
    facts = [_at(one.env, "device") for one in (a, b)]
    if not all(isinstance(one, dict) for one in facts):
        return [], [_unknown("the device", facts)]
    found = []
    for name in [name for name in {**facts[0], **facts[1]} if name not in _NOT_COMPARED]:
        found += _differences("device", f"device.{name}", a, b, _DEVICE)
    found += _differences("device", "machine", a, b, _DEVICE)
    shared = Effect(
        "harmless", "changes only how an update is distributed; the loss is normalised once over all processes"
    )
    return found + _differences("device", "world_size", a, b, shared), []


def _resumed(log: Log, evidence: Evidence) -> Iterator[str]:
    """Yields sentences on how often the run was resumed, and which recipe keys and models changed."""
    earlier = evidence.env.get("before_resume")
    if earlier:
        yield f"{log.source} was resumed {len(earlier)} times: the environment after its last resume is compared"
    for last in sorted(evidence.earlier):
        before, after = evidence.earlier[last], evidence.recipe_at(last + 1)
        changes = [f"{key} from {old!r} to {new!r}" for key, old, new in _unlike(before, after)]
        if changes:
            yield f"{log.source} was resumed after step {last} with other keys: {', '.join(changes)}"
    parts = [*(earlier if isinstance(earlier, list) else []), evidence.env]
    steps = [_at(part, "resumed.after_step", 0) for part in parts]
    for number, part in enumerate(parts):
        if any(later <= steps[number] for later in steps[number + 1 :]):
            continue  # a later resume trained these steps again
        for key, files in (_at(part, "resumed.accepted_models") or {}).items():
            changed = f"although these files of the model in {key} had changed: {', '.join(files)}"
            yield f"{log.source} was resumed after step {steps[number]} {changed}"


def _holes(log: Log) -> Iterator[str]:
    """Yields a warning if metrics.jsonl, which has one line per step, has gaps."""
    steps = {int(step) for series in log.metrics.values() for step in series.steps}
    if lost := missing_steps(steps, max(steps, default=0)):
        yield f"metrics.jsonl of {log.source} has a gap: the metrics of steps {lost} are lost"


class _Recipes:
    """Returns the values of a key in both recipes. A key that a recipe does not contain has its default value."""

    def __init__(self, a: Values, b: Values) -> None:
        self._recipes = (a, b)

    def get(self, key: str) -> tuple[Any, Any]:
        a, b = (_value(recipe, key) for recipe in self._recipes)
        return a, b


def _value(recipe: Values, key: str) -> Any:
    found = _at(recipe, key, _ABSENT)
    return defaults().get(key) if found is _ABSENT else found


def _unlike(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields the keys at which two nested values differ, with both values. A key that one recipe lacks has its default
    value."""
    if isinstance(a, dict) and isinstance(b, dict):
        for name in {**a, **b}:
            inner = f"{key}.{name}" if key else str(name)
            left, right = (side.get(name, defaults().get(inner, _ABSENT)) for side in (a, b))
            if left is _ABSENT or right is _ABSENT:
                yield from _only_one(inner, left, right)
            else:
                yield from _unlike(left, right, inner)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b) and _tables(a) and _tables(b):
        for index, (left, right) in enumerate(zip(a, b, strict=True)):
            yield from _unlike(left, right, f"{key}.{index}")
    elif _without_secrets(a, key) != _without_secrets(b, key):
        yield key, a, b


def _without_secrets(value: Any, key: str) -> Any:
    """Removes secrets from addresses, so that secrets are not compared."""
    if isinstance(value, list):
        return [comparable(one) for one in value]
    return comparable(value, key.rpartition(".")[2])


def _only_one(key: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """Compares a group of keys that only one recipe contains with the defaults of these keys. For a key without a
    default, the value None is used."""
    there, swap = (a, False) if b is _ABSENT else (b, True)
    if isinstance(there, dict):
        yield from _unlike(*(({}, there) if swap else (there, {})), key)
    elif there is not None:
        yield (key, None, there) if swap else (key, there, None)


def _tables(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


@cache
def defaults() -> dict[str, Any]:
    """Returns the default of every recipe key, by dotted name."""
    fields = [(key, field) for key, field in leaves(Recipe) if not field.is_required()]
    return {key: field.get_default(call_default_factory=True) for key, field in fields}


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields every key of a recipe section with its pydantic field. Keys of nested sections have dotted names."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _differences(part: SetupPart, key: str, a: Evidence, b: Evidence, effect: Effect) -> list[Difference]:
    left, right = _at(a.env, key), _at(b.env, key)
    return [Difference(part, key, left, right, *effect)] if left != right else []


def _at(values: Any, key: str, missing: Any = None) -> Any:
    """Returns the value at a dotted key of nested mappings, or `missing`."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return missing
        values = values[part]
    return values


def _has(env: Values, key: str) -> bool:
    return _at(env, key, _ABSENT) is not _ABSENT


def _unknown(what: str, recorded: list[Any]) -> str:
    side = "on both sides" if not any(recorded) else f"for side {'b' if recorded[0] else 'a'}"
    return f"{what}: unknown {side}"


# For the report and the support table --------------------------------------------------------------------------------


def support_facts(a: Log, b: Log) -> dict[str, tuple[Any, Any]]:
    """Returns method, model, dtype, hardware and versions of A and B for the support table. An unknown value is
    None."""

    def facts(one: Evidence) -> dict[str, Any]:
        method, dtype = one.recipe.get("method"), one.recipe.get("model", {}).get("dtype")
        named = {"method": method, "model": _model_name(one), "dtype": dtype}
        return {**named, "hardware": _hardware(one), "versions": _version_text(one)}

    of_a, of_b = (facts(log.evidence) if log.evidence else {} for log in (a, b))
    return {name: (of_a.get(name), of_b.get(name)) for name in ("method", "model", "dtype", "hardware", "versions")}


def paired_samples(a: Log, b: Log) -> list[tuple[dict[str, Any] | None, dict[str, Any] | None]]:
    """Returns pairs of samples of A and B with the same prompt and step. An element of a pair is None if that run has
    no sample with this prompt and step."""
    of_a, of_b = ({_prompt_key(line): line for line in log.evidence.samples} if log.evidence else {} for log in (a, b))
    keys = list(dict.fromkeys([*of_a, *of_b]))
    return [(of_a.get(key), of_b.get(key)) for key in keys[:MAX_SAMPLES]]


def same_setting(one: Log, other: Log) -> bool:
    """Returns whether two runs are repeats. Repeats use the same hardware and differ only in the seed and in harmless
    keys."""
    if one.evidence is None or other.evidence is None:
        return False
    differing = [each for each in differences(one, other)[0] if each.weight != "harmless" and each.key != "run.seed"]
    return not differing and _hardware(one.evidence) == _hardware(other.evidence)


def seed_of(log: Log) -> Any:
    return log.evidence.recipe.get("run", {}).get("seed") if log.evidence else None


def _prompt_key(line: dict[str, Any]) -> tuple[Any, ...]:
    return line.get("step"), line.get("kind"), line.get("sample"), json.dumps(line.get("prompt"), sort_keys=True)


def _model_name(evidence: Evidence) -> str:
    """Returns a text with the model's architecture, size, folder name and adapter. For an exported model, the name of
    the run replaces the folder name."""
    model = evidence.recipe.get("model", {})
    path = Path(str(model.get("path", "")))
    name = path.parent.name if path.name == "export" and path.parent.name else path.name
    kind = evidence.env.get("model", {})
    if "parameters" in kind:
        name = f"{kind['architecture'].removesuffix('ForCausalLM')} {_millions(kind['parameters'])} ({name})"
    lora = model.get("lora")
    if not lora:
        return name
    return f"{name}, LoRA rank {lora['rank']}" if lora.get("rank") else f"{name}, LoRA from {lora.get('adapter')}"


def _millions(count: int) -> str:
    return f"{count / 1e9:.2g}B" if count >= 1e9 else f"{count / 1e6:.3g}M"


def _hardware(evidence: Evidence) -> str:
    device = evidence.env.get("device", {})
    kind = f"{device.get('name', '?')}, emulated" if device.get("emulated") else device.get("name", "?")
    return f"{evidence.env.get('world_size', 1)} x {device.get('chip', 'unknown chip')} ({kind})"


def _version_text(evidence: Evidence) -> str:
    env = evidence.env
    packages = env.get("packages", {})
    named = {"lockstep": env.get("lockstep"), "torch": packages.get("torch")}
    named["transformers"] = packages.get("transformers")
    device = env.get("device", {})
    named |= {key: value for key, value in device.items() if key not in _NO_VERSION and isinstance(value, str)}
    return ", ".join(f"{name} {version}" for name, version in named.items() if version)
