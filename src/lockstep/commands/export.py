"""`lockstep export`: writes a checkpoint or a merged adapter as a Hugging Face folder, optionally pushed to the hub."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import Refusal, first_line, unwritten
from lockstep.model.export_check import Verification
from lockstep.model.export_folder import merge_adapter
from lockstep.model.lora import CONFIG
from lockstep.model.resolve import ask_hub, base_of, hub_errors, looks_like_hub, model_folder
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.measure import best_measure
from lockstep.run import checkpoint as checkpoints
from lockstep.run.files import written_aside
from lockstep.run.folder import RunFolder
from lockstep.run.output import write
from lockstep.train.checkpointing import write_export

REMEDY = "push from a machine that can reach the hub; the exported folder can be copied there"


def refuse_no_hub(name: str) -> None:
    """Checks that a push is possible before a model is written."""
    from huggingface_hub import get_token

    where = f"--push {name}"
    if not looks_like_hub(name):
        raise Refusal.at(where, "is not a hub name", "write OWNER/NAME", code="invalid-name")
    status = ask_hub(name, where, "nothing was pushed", REMEDY)
    if get_token() is None:
        raise Refusal.at(where, "the hub needs a token", "set HF_TOKEN, or run: hf auth login", code="hub-access")
    if status in (401, 403):
        why = f"the hub rejects this token ({status})"
        raise Refusal.at(where, why, "use a token with write access", code="hub-access")


def push_folder(folder: Path, name: str, message: str, *, private: bool, kept: bool) -> str:
    """Pushes a folder as one commit, to a new repository if needed. `kept` says whether the folder stays after the
    push."""
    from huggingface_hub import HfApi, constants

    api = HfApi(endpoint=constants.ENDPOINT)
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        done = api.upload_folder(repo_id=name, folder_path=folder, commit_message=message)
    except hub_errors() as error:
        state = f"the model is in {folder}" if kept else "the run is unchanged"
        remedy = f"{state}; retry, or upload the folder: hf upload {name} DIR"
        raise Refusal.at(
            f"--push {name}", f"the push failed: {first_line(error)}", remedy, code="hub-failed"
        ) from error
    return f"pushed to {done.commit_url}"


@dataclass(frozen=True)
class ExportOrder:
    """The options of `lockstep export`: `adapter` writes only the adapter, `merge` merges it into its base model."""

    step: int | None = None
    best: bool = False
    adapter: bool = False
    merge: bool = False
    base: str | None = None
    push: str | None = None
    private: bool = False


def export_to(source: Path, out: Path | None, order: ExportOrder) -> list[str]:
    """Writes the exported folder and optionally pushes it; returns lines that describe what was done."""
    if order.adapter and order.merge:
        raise Refusal.at(
            "--merge", "cannot be combined with --adapter", "remove one of the two", code="conflicting-keys"
        )
    if order.push is None:
        if out is None:
            raise Refusal.at("DIR", "must be set", "give the folder to write, or --push OWNER/NAME", code="not-set")
        return [_written(source, out, order)]
    refuse_no_hub(order.push)
    with tempfile.TemporaryDirectory() as place:
        folder = out or Path(place) / "model"
        message = _written(source, folder, order)
        return [message, push_folder(folder, order.push, message, private=order.private, kept=out is not None)]


def _written(source: Path, out: Path, order: ExportOrder) -> str:
    if (source / CONFIG).is_file():
        return _merged(source, out, order)
    if order.base is not None:
        raise Refusal.at(
            "--base", f"{source} is not an adapter; a run already knows its base model", "remove it", code="unused-key"
        )
    run, step = source, order.step
    if (source / checkpoints.STATE).is_file() and source.parent.name == "checkpoints":
        if step is not None or order.best:
            raise Refusal.at(source, "is already a single checkpoint", "remove --step and --best", code="unused-key")
        run, step = source.parent.parent, int(source.name.removeprefix("step_"))
    if order.merge and _recipe_of(run).model.lora is None:
        raise Refusal.at(
            "--merge", "the run trained all weights and has no adapter", "export without --merge", code="no-adapter"
        )
    return export_run(run, out, step=step, best=order.best, adapter=order.adapter)


def _merged(source: Path, out: Path, order: ExportOrder) -> str:
    if order.adapter:
        raise Refusal.at("--adapter", f"{source} is already an adapter", "use --merge", code="unused-key")
    if order.step is not None or order.best:
        raise Refusal.at(source, "is an adapter and has no steps", "remove --step and --best", code="unused-key")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise Refusal.at(out, "is not empty", "choose a new folder", code="not-empty")
    base = model_folder(order.base, "--base") if order.base else model_folder(base_of(source, str(source)))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with written_aside(out, over=True) as aside:
            verified = merge_adapter(source, base, aside, str(source))
    except OSError as error:
        raise unwritten(out, error) from error
    return _with_verification(f"merged {source} into {base}: {out}", out, verified)


def _with_verification(message: str, out: Path, verified: Verification) -> str:
    if not verified.done:
        write(f"warning: {out}: {verified.sentence}", error=True)
    return f"{message}; {verified.sentence}"


def _recipe_of(run: Path) -> Recipe:
    if not RunFolder(run).recipe.is_file():
        raise Refusal.at(
            str(run), "is not a run folder: it has no recipe.yaml", "give a folder in runs/", code="not-a-run"
        )
    return load_recipe(str(RunFolder(run).recipe), stored=True)


def export_run(run: Path, out: Path, *, step: int | None, best: bool, adapter: bool) -> str:
    """Writes the model of a run and returns a description."""
    folder, recipe = RunFolder(run), _recipe_of(run)
    steps = checkpoints.steps_in(folder.checkpoints)
    if not steps:
        raise Refusal.at(
            str(run), "has no checkpoint yet", "continue the training, or set checkpoint.every", code="no-checkpoint"
        )
    if best:
        measure = best_measure(recipe)
        found_best = checkpoints.best_step(folder.checkpoints, measure)
        if found_best is None:
            why = f"none of the checkpoints has a {measure.name}"
            raise Refusal.at("--best", why, "set checkpoint.best and checkpoint.keep_best", code="no-checkpoint")
        step = found_best[0]
    step = steps[-1] if step is None else step
    if step not in steps:
        raise Refusal.at(
            "--step",
            f"{run} has no checkpoint of step {step}",
            f"choose a step of this run: it has {', '.join(map(str, steps))}",
            code="no-checkpoint",
        )
    path = checkpoints.folder_of(folder.checkpoints, step)
    damage = checkpoints.damage_of(path)
    if damage is not None:
        others = [str(other) for other in steps if other != step]
        raise Refusal.at(
            str(path),
            f"is damaged: {damage}",
            f"export another step: {', '.join(others) or 'none left'}",
            code="damaged-checkpoint",
        )
    found = checkpoints.read(path)
    _, verified = write_export(recipe, found, out, folder, adapter=adapter)
    message = f"exported step {found.state.step} of {run} to {out}" + (" (adapter)" if adapter else "")
    return _with_verification(message, out, verified)
