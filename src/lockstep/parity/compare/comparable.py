"""Are two runs comparable at all? What differs in recipe, data, model, versions and switches, and what that does."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from lockstep.masking import comparable
from lockstep.parity.compare.comparison import Difference
from lockstep.parity.compare.log import Evidence, Log
from lockstep.recipe.measure import facts_of
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Effect
from lockstep.run.metrics import missing_steps

Differences = tuple[list[Difference], list[str]]
EvidencePart = Literal[
    "recipe", "own code", "data", "tokenizer", "weights", "versions", "engine", "determinism", "device"
]
Values = Mapping[str, Any]

_ORDER = ("blocks", "matters", "harmless")
_ABSENT = object()

# Packages whose code computes what is compared; the others read and write.
_COMPUTING = ("torch", "transformers", "peft", "triton", "tokenizers", "vllm", "sglang")
# Of the device's facts: what the machine was doing, or what other parts say already.
_PASSING = ("memory", "visible", "count", "torch", "ray_resource")
_DEVICE = Effect("harmless", "this is what is compared; sums in another order round otherwise")
_FUNCTIONS = ("reward.function", "rollout.function", "algorithm.advantage", "algorithm.loss", "data.reader")
_LENGTH = ("run.steps", "run.epochs")
UNREAD = Effect("harmless", "neither side reads it")
UNKNOWN = Effect("matters", "not known here; look it up in the recipe's reference")


def differences(a: Log, b: Log) -> tuple[list[Difference], list[str]]:
    """What differs between the sides, what blocks a comparison first; and in words, what a side does not tell."""
    if a.evidence is None or b.evidence is None:
        return [], [
            f"{log.source} ({log.kind}) has no run folder: its recipe, data, weights and versions are unknown"
            for log in (a, b)
            if log.evidence is None
        ]
    unknown = [sentence for log, one in ((a, a.evidence), (b, b.evidence)) for sentence in _resumed(log, one)]
    unknown += [sentence for log in (a, b) for sentence in _holes(log)]
    found, silent = setup_differences(a.evidence, b.evidence)
    return found, unknown + silent


def setup_differences(a: Evidence, b: Evidence) -> Differences:
    """The same of what two run folders hold besides their curves."""
    found: list[Difference] = []
    unknown: list[str] = []
    for look in (_recipe, _own_code, _data, _model, _versions, _engine, _determinism, _device):
        differ, silent = look(a, b)
        found += differ
        unknown += silent
    return sorted(found, key=lambda difference: _ORDER.index(difference.weight)), unknown


def _recipe(a: Evidence, b: Evidence) -> Differences:
    """The recipes at the end, then what else differed in the parts of runs that went on with other keys."""
    found = _recipes(a.recipe, b.recipe, a.env, b.env)
    told = [(one.key, one.a, one.b) for one in found]
    for last in sorted({*a.earlier, *b.earlier}):
        for one in _recipes(a.recipe_at(last), b.recipe_at(last), a.env, b.env):
            if (one.key, one.a, one.b) not in told:
                told.append((one.key, one.a, one.b))
                effect = one.effect
                if one.weight != "harmless":
                    told_change = _stretched if one.key in _LENGTH else _changed_after
                    effect = f"{effect}; {told_change(last, a, b)}"
                found.append(replace(one, key=f"{one.key} to step {last}", effect=effect))
    return found, []


def _sides(last: int, a: Evidence, b: Evidence) -> str:
    """The sides that were resumed after this step with other keys."""
    return " and ".join(f"side {name}" for name, one in (("a", a), ("b", b)) if last in one.earlier)


def _changed_after(last: int, a: Evidence, b: Evidence) -> str:
    return f"{_sides(last, a, b)} was resumed after step {last} with other keys"


def _stretched(last: int, a: Evidence, b: Evidence) -> str:
    """Which side went on with another length, and what that does to its curve."""
    return (
        f"{_sides(last, a, b)} went on after step {last} with another length, which stretched its schedule: curves "
        f"part up to step {last} for that, and after it for what was learned until then"
    )


def _recipes(recipe_a: Values, recipe_b: Values, env_a: Values, env_b: Values) -> list[Difference]:
    sides = _Sides(recipe_a, recipe_b)
    found = []
    length = False
    for key, left, right in _unlike(recipe_a, recipe_b):
        if key in _LENGTH:
            length = True
            continue
        weight, effect = _weighed(key, left, right, sides, env_a, env_b)
        found.append(Difference("recipe", key, left, right, weight, effect))
    return found + ([_length(sides)] if length else [])


def _weighed(key: str, a: Any, b: Any, sides: _Sides, env_a: Values, env_b: Values) -> Effect:
    facts = facts_of(key)
    if facts.read_where is not None:
        other, values = facts.read_where
        if not any(value in values for value in sides.get(other)):
            return UNREAD
    if key == "model.path":
        known = all(_at(env, "model.weights") for env in (env_a, env_b))
        return _told(known, "the weights are compared by their fingerprints")
    if key.startswith("data.train.") and key.endswith(".path"):
        known = all(_at(env, "data.train") for env in (env_a, env_b))
        return _told(known, "the rows are compared by their fingerprints")
    if key in ("reward.function", "reward.model", "reward.process", "reward.remote") and (a is None or b is None):
        return Effect("blocks", "one side has a reward that the other has not")
    if all(_code(env).get(key, {}).get("sha256") for env in (env_a, env_b)) and _function(a) == _function(b):
        return _told(True, "the files are compared by their checksums")
    return facts.effect or UNKNOWN


def _function(value: Any) -> str:
    """The name of the function in `path/to/file.py:name`."""
    return str(value).rpartition(":")[2]


def _code(env: Values) -> Values:
    """The checksums of the user's own files, with the keys that name them as they are."""
    found = env.get("own_code")
    return found if isinstance(found, Mapping) else {}


def _own_code(a: Evidence, b: Evidence) -> Differences:
    """Files of the user's that both sides name by the same key, and that are not the same."""
    codes = _code(a.env), _code(b.env)
    effect = "another file: what its code computes may differ"
    found = [
        Difference("own code", key, codes[0][key]["sha256"], codes[1][key]["sha256"], "matters", effect)
        for key in codes[0]
        if key in codes[1] and codes[0][key]["sha256"] != codes[1][key]["sha256"]
    ]
    named = [[key for key in _FUNCTIONS if ":" in str(_at(one.recipe, key) or "")] for one in (a, b)]
    told = [not keys or isinstance(one.env.get("own_code"), Mapping) for keys, one in zip(named, (a, b), strict=True)]
    silent = [] if all(told) else [_silent("the content of the user's own functions (checksum)", told)]
    return found, silent


def _told(known: bool, how: str) -> Effect:
    if known:
        return Effect("harmless", f"only a name: {how}")
    return Effect("matters", "another path, and no fingerprints to compare")


def _length(sides: _Sides) -> Difference:
    """Runs of different lengths have their first steps in common, if the learning rate does not look at the length."""
    key, (a, b) = "run.steps", sides.get("run.steps")
    if a == b:
        key, (a, b) = "run.epochs", sides.get("run.epochs")
    shares = [0 < warmup < 1 for warmup in sides.get("optim.warmup") if isinstance(warmup, (int, float))]
    if all(schedule == "constant" for schedule in sides.get("optim.schedule")) and not any(shares):
        return Difference("recipe", key, a, b, "harmless", "the learning rate is constant: common steps are alike")
    if a is None or b is None:
        effect = "the learning rate follows the length of the run: alike only if both come to the same steps"
        return Difference("recipe", key, a, b, "matters", effect)
    effect = "the learning rate follows the length of the run: at the same step it is another"
    return Difference("recipe", key, a, b, "blocks", effect)


def _data(a: Evidence, b: Evidence) -> Differences:
    train_a, train_b = _fingerprints(a, "data.train"), _fingerprints(b, "data.train")
    if not (train_a and train_b):
        return [], [_silent("the training rows' fingerprints", [train_a, train_b])]
    found = []
    if train_a != train_b:
        found.append(Difference("data", "data.train", train_a, train_b, "blocks", "other training rows"))
    for key in ("data.kept.rows", "data.kept.tokens"):
        if all(_has(one.env, key) for one in (a, b)):
            kept = Effect("blocks", "other tokens are trained, by template, tokenizer or limits")
            found += _differences("data", key, a, b, kept)
    val_a, val_b = _fingerprints(a, "data.val"), _fingerprints(b, "data.val")
    if val_a != val_b:
        found.append(Difference("data", "data.val", val_a, val_b, "harmless", "val/ curves are of other rows"))
    return found, []


def _fingerprints(one: Evidence, key: str) -> list[str]:
    return [str(source.get("fingerprint"))[:12] for source in _at(one.env, key) or [] if isinstance(source, dict)]


def _model(a: Evidence, b: Evidence) -> Differences:
    found: list[Difference] = []
    unknown = []
    looks: tuple[tuple[EvidencePart, str, str, str], ...] = (
        ("weights", "model.weights", "the initial weights", "training starts elsewhere"),
        ("tokenizer", "model.tokenizer", "the tokenizer", "the same text is other tokens"),
        ("tokenizer", "model.template", "the chat template", "prompts are written in another form"),
    )
    for part, key, subject, effect in looks:
        # No template is a fact too; no checksum is none.
        told = [_has(one.env, key) if key == "model.template" else bool(_at(one.env, key)) for one in (a, b)]
        if all(told):
            found += _differences(part, key, a, b, Effect("blocks", effect))
        else:
            unknown.append(_silent(f"{subject} (fingerprint)", told))
    return found, unknown


def _versions(a: Evidence, b: Evidence) -> Differences:
    found, unknown = [], []
    code = Effect("matters", "other code: what it computes may differ")
    for key in ("lockstep", "git_commit"):
        found += _differences("versions", key, a, b, code)
    packages = [_at(one.env, "packages") for one in (a, b)]
    if all(isinstance(one, dict) for one in packages):
        for name in sorted({*packages[0], *packages[1]}):
            effect = code if name in _COMPUTING else Effect("harmless", "not a part of the computation")
            found += _differences("versions", f"packages.{name}", a, b, effect)
    else:
        unknown.append(_silent("the versions of packages", packages))
    unused = Effect("harmless", "not a part of the computation")
    for key in ("python", "platform"):
        found += _differences("versions", key, a, b, unused)
    return found, unknown


def _engine(a: Evidence, b: Evidence) -> Differences:
    """The program that generated; its name is in the recipe. Engines of ours have the versions of the packages."""
    versions = Effect("matters", "another program generates: the same distribution by other kernels")
    number = Effect("harmless", "how many servers share the requests")
    return [
        *_differences("engine", "engine.version", a, b, versions),
        *_differences("engine", "engine.servers", a, b, number),
    ], []


def _determinism(a: Evidence, b: Evidence) -> Differences:
    switches = [_at(one.env, "determinism") for one in (a, b)]
    if not all(isinstance(one, dict) for one in switches):
        return [], [_silent("the switches for determinism", [isinstance(one, dict) for one in switches])]
    effect = "one side repeats itself to the bit, the other may not"
    return [
        Difference("determinism", name, switches[0].get(name), switches[1].get(name), "matters", effect)
        for name in sorted({*switches[0], *switches[1]})
        if switches[0].get(name) != switches[1].get(name)
    ], []


def _device(a: Evidence, b: Evidence) -> Differences:
    facts = [_at(one.env, "device") for one in (a, b)]
    if not all(isinstance(one, dict) for one in facts):
        return [], [_silent("the device", facts)]
    found = []
    for name in [name for name in {**facts[0], **facts[1]} if name not in _PASSING]:
        found += _differences("device", f"device.{name}", a, b, _DEVICE)
    found += _differences("device", "machine", a, b, _DEVICE)
    shared = Effect("harmless", "how an update is shared out; there is one division over all processes")
    return found + _differences("device", "world_size", a, b, shared), []


def _resumed(log: Log, evidence: Evidence) -> Iterator[str]:
    """What the run's history tells: how often it was resumed, with which other keys and models."""
    earlier = evidence.env.get("before_resume")
    if earlier:
        yield f"{log.source} was continued {len(earlier)} times: what is compared is the environment of its last part"
    for last in sorted(evidence.earlier):
        before, after = evidence.earlier[last], evidence.recipe_at(last + 1)
        changes = [f"{key} from {old!r} to {new!r}" for key, old, new in _unlike(before, after)]
        if changes:
            yield f"{log.source} was resumed after step {last} with other keys: {', '.join(changes)}"
    parts = [*(earlier if isinstance(earlier, list) else []), evidence.env]
    steps = [_at(part, "resumed.after_step", 0) for part in parts]
    for number, part in enumerate(parts):
        if any(later <= steps[number] for later in steps[number + 1 :]):
            continue  # what it trained was trained again
        for key, files in (_at(part, "resumed.accepted_models") or {}).items():
            changed = f"although the model of {key} had changed: {', '.join(files)}"
            yield f"{log.source} was resumed after step {steps[number]} {changed}"


def _holes(log: Log) -> Iterator[str]:
    """A run logs a line a step."""
    steps = {int(step) for series in log.metrics.values() for step in series.steps}
    if lost := missing_steps(steps, max(steps, default=0)):
        yield f"{log.source}: its metrics.jsonl has a hole, the metrics of steps {lost} are lost"


class _Sides:
    """Both recipes, asked by key; a key that is not written has its default."""

    def __init__(self, a: Values, b: Values) -> None:
        self._recipes = (a, b)

    def get(self, key: str) -> tuple[Any, Any]:
        a, b = (_value(recipe, key) for recipe in self._recipes)
        return a, b


def _value(recipe: Values, key: str) -> Any:
    found = _at(recipe, key, _ABSENT)
    return defaults().get(key) if found is _ABSENT else found


def _unlike(a: Any, b: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """The keys at which two nested values differ. What only one side writes counts where it is not the default."""
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
    """Another secret in an address is no difference between two runs."""
    if isinstance(value, list):
        return [comparable(one) for one in value]
    return comparable(value, key.rpartition(".")[2])


def _only_one(key: str, a: Any, b: Any) -> Iterator[tuple[str, Any, Any]]:
    """A group that one side leaves out has its defaults; a key without one is not there."""
    there, swap = (a, False) if b is _ABSENT else (b, True)
    if isinstance(there, dict):
        yield from _unlike(*(({}, there) if swap else (there, {})), key)
    elif there is not None:
        yield (key, None, there) if swap else (key, there, None)


def _tables(values: list[Any]) -> bool:
    return bool(values) and all(isinstance(value, dict) for value in values)


@cache
def defaults() -> dict[str, Any]:
    """Every key of a recipe that has a default, flat."""
    fields = [(key, field) for key, field in leaves(Recipe) if not field.is_required()]
    return {key: field.get_default(call_default_factory=True) for key, field in fields}


def leaves(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every key of a group with its field, those of inner groups by their dotted names."""
    for name, field in section.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def _differences(part: EvidencePart, key: str, a: Evidence, b: Evidence, effect: Effect) -> list[Difference]:
    left, right = _at(a.env, key), _at(b.env, key)
    return [Difference(part, key, left, right, *effect)] if left != right else []


def _at(values: Any, key: str, missing: Any = None) -> Any:
    """The value under a dotted key."""
    for part in key.split("."):
        if not isinstance(values, Mapping) or part not in values:
            return missing
        values = values[part]
    return values


def _has(env: Values, key: str) -> bool:
    return _at(env, key, _ABSENT) is not _ABSENT


def _silent(what: str, told: list[Any]) -> str:
    who = "neither side tells" if not any(told) else f"side {'b' if told[0] else 'a'} does not tell"
    return f"{what}: {who}"
