"""Checks whether a run may resume from a checkpoint, and starts a run from another run (`--resume-from`)."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import Problem, Refusal, refuse_all, unwritten
from lockstep.masking import comparable
from lockstep.model.fingerprint import differing_files, folder_fingerprint
from lockstep.model.resolve import adapter_folder, model_folder
from lockstep.preflight.model_checks import has_critic
from lockstep.recipe import Recipe
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.loader import resolved
from lockstep.recipe.measure import facts_of, is_default
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.run import checkpoint as checkpoints
from lockstep.run.checkpoint import State
from lockstep.run.files import checksum, written_aside
from lockstep.run.folder import RunFolder, read_object
from lockstep.run.metrics import rewind_lines
from lockstep.train.optim import Optimizer, learning_rate

Fingerprints = dict[str, dict[str, Any]]
"""For each recipe key that names a model: the `path` of the model as in the recipe, and a digest of each of its
`files`."""


@dataclass(frozen=True)
class Changed:
    """A recipe key whose value changed since the checkpoint."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} changed from {self.before!r} to {self.now!r}"


def flatten(values: Any, prefix: str = "") -> dict[str, Any]:
    """Converts nested mappings and lists to one mapping with dotted keys."""
    if isinstance(values, dict):
        pairs = values.items()
    elif isinstance(values, list):
        pairs = {str(i): value for i, value in enumerate(values)}.items()
    else:
        return {prefix.rstrip("."): values}
    return {k: v for name, value in pairs for k, v in flatten(value, f"{prefix}{name}.").items()}


def changed_keys(before: dict[str, Any], now: dict[str, Any]) -> list[Changed]:
    # A checkpoint of an earlier lockstep version may not have all groups of keys. If the keys of a missing group may
    # change at a resume, the missing group is not reported as a change.
    unknown = {name: group for name, group in now.items() if name not in before and facts_of(name).resumable}
    # Secrets are masked before the comparison.
    old, new = (_without_secrets(flatten(values)) for values in ({**unknown, **before}, now))
    # Earlier lockstep versions do not have newer keys. The default of a newer key is the behaviour of these versions.
    newer = {key for key in new.keys() - old.keys() if is_default(key, new[key])}
    unlike = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key) and key not in newer]
    return [Changed(key, old.get(key), new.get(key)) for key in unlike]


def _without_secrets(values: dict[str, Any]) -> dict[str, Any]:
    return {key: comparable(value, key.rpartition(".")[2]) for key, value in values.items()}


def refuse_changed_recipe(state: State, now: dict[str, Any], roles: Iterable[str]) -> list[Changed]:
    """Raises `Refusal` for recipe changes with which a run cannot resume. Returns the other changes. `roles` are the
    recipe keys of the models of the run (`model_paths`). The path of a model may change if the checkpoint has a
    fingerprint of the model, because then the content of the model is compared."""
    changed = changed_keys(state.recipe, now)
    compared = _models_by_key(roles)
    same = {key for key, numbered in _models_by_key(state.models).items() if compared.get(key) == numbered}
    harmful = [
        one
        for one in changed
        if not (facts_of(one.key).resumable or _without_index(one.key) in same or _stopped_before(one))
    ]
    refuse_all(
        [
            Problem(
                one.key,
                f"the checkpoint was trained with {one.before!r}, the recipe now says {one.now!r}",
                "restore the old value, or start a new run with another run.name",
                code="changed-setting",
            )
            for one in harmful
        ]
    )
    return changed


def _stopped_before(change: Changed) -> bool:
    """Returns whether the old value is `error`, which stops a run at the first row that the new value would change. So
    the new value changes no row before the checkpoint. A run that streams its rows can continue after the row at which
    it stopped."""
    return change.key in ("data.overlong", "data.bad_rows") and change.before == "error"


def learning_rate_changes(state: State, steps: int, recipe: Recipe) -> list[str]:
    """Returns warnings if changed recipe keys change the learning rate of the next step."""
    before, step = state.planned, state.step
    if before is None or step >= steps:
        return []
    stored = state.recipe.get("optim", {})
    valid = {key: value for key, value in stored.items() if key in Optim.model_fields}
    earlier = Optim.model_validate({**recipe.optim.model_dump(), **valid})
    pairs = {"learning rate": (earlier, recipe.optim)}
    if has_critic(recipe):
        rates = state.recipe.get("critic", {}).get("lr", recipe.critic.lr), recipe.critic.lr
        critics = [one.model_copy(update={"lr": lr}) for one, lr in zip((earlier, recipe.optim), rates, strict=True)]
        pairs["critic's learning rate"] = critics[0], critics[1]
    found = []
    for name, (old, new) in pairs.items():
        now = learning_rate(step, steps, new)
        if step < before and now == learning_rate(step, before, old):
            continue
        was = f"{learning_rate(step, before, old):.3g}" if step < before else "none, the run was finished"
        rates_text = f"step {step + 1} has {now:.3g} (without the change: {was})"
        if before == steps:
            found.append(f"the {name} after step {step} changes, because recipe keys have changed: {rates_text}")
        else:
            found.append(
                f"the {name} schedule up to step {step} was computed for {before} steps, and after this step for "
                f"{steps}: {rates_text}; it differs from the schedule of a run of {steps} steps"
            )
    return found


def model_paths(recipe: Recipe) -> dict[str, str]:
    """Returns the path of each model of the run, by recipe key. Reward models have numbered keys, such as
    `reward.model.0`."""
    paths = {"model.path": recipe.model.path}
    if recipe.model.lora is not None and recipe.model.lora.adapter is not None:
        paths["model.lora.adapter"] = recipe.model.lora.adapter
    if has_critic(recipe):
        paths["critic.path"] = recipe.critic.path or recipe.model.path
    if reference_kind(recipe) != "none":
        key = "algorithm.kl.reference" if recipe.method in ONLINE else "preference.reference"
        paths[key] = reference_folder(recipe)
    if recipe.distill.teacher is not None:
        paths["distill.teacher"] = recipe.distill.teacher
    if recipe.method in ONLINE:
        named = recipe.reward.model or []
        models = [named] if isinstance(named, str) else named
        paths |= {f"reward.model.{number}": path for number, path in enumerate(models)}
        if recipe.reward.process is not None:
            paths["reward.process"] = recipe.reward.process
    return paths


def model_fingerprints(paths: dict[str, str], progress: Callable[[str], None]) -> Fingerprints:
    """Returns the fingerprint of each model folder. If several recipe keys name the same folder, the folder is read
    once."""
    read: dict[str, dict[str, str]] = {}
    found: Fingerprints = {}
    for key, path in paths.items():
        base = _without_index(key)
        folder = adapter_folder(path, key) if base == "model.lora.adapter" else model_folder(path, base)
        if folder not in read:
            read[folder] = folder_fingerprint(folder, progress)
        found[key] = {"path": path, "files": read[folder]}
    return found


def refuse_changed_models(before: Fingerprints, now: Fingerprints, *, accepted: bool) -> dict[str, list[str]]:
    """Raises `Refusal` if the files of a model have changed since the checkpoint. With `accepted`, returns the changed
    files by recipe key."""
    changes = {
        key: differing
        for key, one in now.items()
        if key in before and (differing := differing_files(before[key]["files"], one["files"]))
    }
    if not accepted:
        refuse_all(
            [
                Problem(
                    f"{key} {now[key]['path']}",
                    f"the model has changed since the checkpoint: {_first(differing)}",
                    "restore the files, resume with --accept-changed, or start a new run with another run.name",
                    code="changed-model",
                )
                for key, differing in changes.items()
            ]
        )
    return changes


def weight_decay_changes(state: State, optimizers: Sequence[Optimizer], optim: Optim) -> list[str]:
    """Returns warnings about parameters whose weight decay was different in the lockstep version that saved the
    checkpoint."""
    if state.decay_rule or not optim.weight_decay:
        return []
    if optim.decay_all:
        offloaded = state.recipe.get("parallel", {}).get("offload", "none") != "none"
        return [_DECAYED_NOW] if offloaded else []
    every = [(name, one) for one in optimizers for name, p in one.parameters.items() if p.ndim >= 2]
    names = [name for name, one in every if not one.decays[name]]
    if not names:
        return []
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return [
        f"resuming although weight decay skips {names[0]}{more} from now on: these are biases or norms with two "
        "dimensions, to which the version that saved the checkpoint applied weight decay"
    ]


_DECAYED_NOW = (
    "resuming although weight decay now applies to biases and norms, because optim.decay_all is set: the version that "
    "saved the checkpoint did not decay them if the optimizer was offloaded"
)


def refuse_unlike_machines(every: list[Fingerprints | None]) -> None:
    """Raises `Refusal` if the files of a model differ between machines."""
    ranks = [(rank, one) for rank, one in enumerate(every) if one is not None]
    first, wanted = ranks[0]
    problems = []
    for rank, one in ranks[1:]:
        for key, model in one.items():
            shared = [name for name in model["files"] if name in wanted[key]["files"]]
            unlike = [name for name in shared if model["files"][name] != wanted[key]["files"][name]]
            if unlike:
                why = f"{_first(unlike)} differs between the machines of rank {rank} and rank {first}"
                problems.append(
                    Problem(f"{key} {model['path']}", why, "copy the folder to every machine", code="not-shared")
                )
    refuse_all(problems)


def _models_by_key(roles: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for role in sorted(roles):
        found.setdefault(_without_index(role), []).append(role)
    return found


def _without_index(key: str) -> str:
    """Returns `reward.model` for `reward.model.1`."""
    return re.sub(r"(\.\d+)+$", "", key)


def _first(names: list[str], most: int = 3) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def refuse_changed_data(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Raises `Refusal` if the training rows have changed, because the run resumes at a position in these rows. Returns
    warnings about changed validation rows."""
    unlike = {
        part: _differences(before.get(part, []), now.get(part, []))
        for part in ("train", "val")
        if _fingerprints(before, now, part) != _fingerprints(now, before, part)
    }
    problems = [
        Problem(
            "data.train", difference, "restore the file, or start a new run with another run.name", code="changed-data"
        )
        for difference in unlike.get("train", [])
    ]
    if not problems and before["kept"] != now["kept"]:
        problems.append(
            Problem(
                "data.max_tokens",
                f"the checkpoint was trained on {_kept(before)}, but the row length limit now keeps {_kept(now)}",
                "restore the old value of data.max_tokens, or of batch.tokens if data.max_tokens is not set",
                code="changed-data",
            )
        )
    refuse_all(problems)
    return [f"data.val: {one}; val/ metrics before and after are not comparable" for one in unlike.get("val", [])]


def _fingerprints(data: dict[str, Any], other: dict[str, Any], part: str) -> list[str]:
    """Returns the fingerprints of the sources, and of their image files if both runs have them: older versions stored
    none."""
    found, others = [], other.get(part, [])
    for number, source in enumerate(data.get(part, [])):
        found.append(source["fingerprint"])
        if "images" in source and number < len(others) and "images" in others[number]:
            found.append(source["images"]["fingerprint"])
    return found


def _kept(data: dict[str, Any]) -> str:
    kept = data["kept"]
    limit = f"streamed rows of up to {kept['limit']:,} tokens, of which the first are " if "limit" in kept else ""
    return f"{limit}{kept['rows']:,} rows with {kept['tokens']:,} tokens"


def _size(file: dict[str, Any]) -> str:
    return f"{file['bytes']} bytes" if file["rows"] is None else f"{file['rows']} rows and {file['bytes']} bytes"


def _differences(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[str]:
    before = [file for source in old for file in source["files"]]
    now = [file for source in new for file in source["files"]]
    found = [
        f"{b['name']} had {_size(b)}, {n['name']} now has {_size(n)}"
        + (" (same size, other content)" if b["bytes"] == n["bytes"] else "")
        for b, n in zip(before, now, strict=False)
        if b["sha256"] != n["sha256"]
    ]
    if len(before) != len(now):
        found.append(f"the checkpoint was trained on {len(before)} files, now there are {len(now)}")
    old_images, new_images = (
        {path: digest for source in sources for path, digest in source.get("images", {}).get("files", {}).items()}
        for sources in (old, new)
    )
    changed = [path for path, digest in new_images.items() if old_images.get(path, digest) != digest]
    if changed:
        found.append(f"the image {_first(changed)} has other content")
    elif not found and [source["fingerprint"] for source in old] == [source["fingerprint"] for source in new]:
        found.append("an image file of the rows has other content")
    return found or ["the order or the grouping of the files has changed"]


# `lockstep train --resume-from` creates a new run folder with a copy of a checkpoint of another run. The new folder
# also gets the metrics, samples and recipes up to that checkpoint. Training continues in the new folder from the copied
# checkpoint. The source run is not changed.

ORIGIN = "resumed_from.json"
"""A file in the new run folder that contains the path and the step of the source run."""


def adopt(recipe: Recipe, path: Path) -> str | None:
    """Creates the new run folder. Returns a message, or None if the folder already exists and starts from this
    checkpoint."""
    found = checkpoint_at(path)
    step, target = int(found.name.removeprefix("step_")), RunFolder(Path(recipe.run.folder) / recipe.run.name)
    source = RunFolder(found.parent.parent)
    if target.path.exists() and target.path.samefile(source.path):
        newer = [other for other in checkpoints.steps_in(target.checkpoints) if other > step]
        if newer:
            why = f"the run has reached step {newer[-1]}: resuming from an earlier step would discard the later steps"
            raise Refusal.at(
                f"--resume-from {path}", why, "set another run.name to start a new run", code="already-exists"
            )
        return None
    origin = {"run": str(source.path), "step": step, "manifest": checksum(found / checkpoints.MANIFEST)}
    if target.path.exists():
        file = target.path / ORIGIN
        if file.is_file() and read_object(file).get("manifest") == origin["manifest"]:
            return None
        why = f"{target.path} exists and does not start from this checkpoint"
        raise Refusal.at(
            f"--resume-from {path}", why, "choose another run.name, or remove --resume-from", code="already-exists"
        )
    refuse_changed_recipe(checkpoints.read(found).state, resolved(recipe), model_paths(recipe))
    try:
        target.path.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(target.path) as aside:
            _copy(source, found, step, RunFolder(aside))
            (aside / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise unwritten(target.path, error) from error
    return f"{target.path} starts from {found}"


def checkpoint_at(path: Path) -> Path:
    """Returns the checkpoint at `path`. If `path` is a run folder, returns its newest checkpoint."""
    where = f"--resume-from {path}"
    if (path / checkpoints.STATE).is_file() and path.name.startswith("step_"):
        found = path
    else:
        steps = checkpoints.steps_in(RunFolder(path).checkpoints)
        if not steps:
            why = "this path is neither a checkpoint nor a run folder with a checkpoint"
            raise Refusal.at(
                where,
                why,
                "use runs/NAME or runs/NAME/checkpoints/step_N; to load only weights, use --init-from",
                code="no-checkpoint",
            )
        found = checkpoints.folder_of(RunFolder(path).checkpoints, steps[-1])
    damage = checkpoints.damage_of(found)
    if damage is not None:
        raise Refusal.at(where, f"{found} is damaged: {damage}", "name another checkpoint", code="damaged-checkpoint")
    return found.resolve()


def _copy(source: RunFolder, found: Path, step: int, target: RunFolder) -> None:
    target.checkpoints.mkdir(parents=True)
    shutil.copytree(found, checkpoints.folder_of(target.checkpoints, step), copy_function=_linked)
    for file in (source.metrics, source.samples, source.env):
        if file.is_file():
            shutil.copyfile(file, target.path / file.name)
    for file in (target.metrics, target.samples):
        rewind_lines(file, step)
    # The file name of an earlier recipe has the last step that was trained with it.
    parts = {last: file for last, file in source.earlier_recipes().items() if last < step}
    for last, file in parts.items():
        shutil.copyfile(file, target.earlier_recipe(last))
    later = [file for last, file in source.earlier_recipes().items() if last >= step]
    held = later[0] if later else source.recipe
    if held.is_file():
        shutil.copyfile(held, target.recipe)


def _linked(source: str, target: str) -> None:
    """Creates a hard link to a file. A link is enough, because checkpoint files are never changed."""
    try:
        os.link(source, target)
    except OSError:  # the file system has no hard links, or the target is on another file system
        shutil.copyfile(source, target)
