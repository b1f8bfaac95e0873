"""Resolves `model.path` (a folder, run, checkpoint, adapter, GGUF file or hub id) to a local Hugging Face folder."""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from lockstep.errors import Problem, Refusal, first_line, unwritten
from lockstep.model.export_check import Verification
from lockstep.model.export_folder import export_checkpoint, merge_adapter
from lockstep.model.fingerprint import model_files
from lockstep.model.gguf import MAGIC, import_gguf
from lockstep.model.load_folder import ModelFolders
from lockstep.model.lora import CONFIG
from lockstep.model.streamed import weight_files
from lockstep.recipe.schema import Lora, Model
from lockstep.run import checkpoint as checkpoints
from lockstep.run.caches import FOLDERS, MadeFolder, cache_home, folders_bound, make_room
from lockstep.run.files import aside_of, checksum, written_aside
from lockstep.run.output import write
from lockstep.version import __version__

# A hub id has the form `owner/name`, or is a name without owner.
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
# Files to download from the hub: settings, tokenizer and safetensors weights. Pickle files and code are not downloaded.
FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.tiktoken"]
# Time limit of a hub request, including DNS resolution.
SECONDS = 4.0
_OFF = ("1", "ON", "YES", "TRUE")
_silent: dict[str, str] = {}
"""Hub addresses that this process could not reach, with the reason."""


def looks_like_hub(path: str) -> bool:
    """Returns whether the path has the form `owner/name` of a hub model."""
    return _NAME.fullmatch(path) is not None and path.count("/") == 1


def hub_folder(name: str, where: str, hint: str = "") -> str:
    """Returns the local folder of a hub model; downloads the model if necessary. `hint` begins the remedy in error
    messages."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        local = snapshot_download(name, allow_patterns=FILES, local_files_only=True)
        # The local copy is used only if it is complete.
        if (Path(local) / "config.json").is_file() and weight_files(local) is not None:
            return local
    except (LocalEntryNotFoundError, OSError):
        pass  # not downloaded yet
    remedy = f"{hint}give a folder on this machine, or download the model where there is a network and copy it here"
    status = ask_hub(name, where, "there is no such folder", remedy)
    if status in (401, 403, 404):
        why = f"there is no such folder, and the hub has no readable model of that name ({status})"
        raise Refusal.at(
            where, why, f"{hint}check the name; for a private or gated model set HF_TOKEN", code="hub-access"
        )
    try:
        return snapshot_download(name, allow_patterns=FILES, endpoint=constants.ENDPOINT)
    except hub_errors() as error:
        why = f"cannot be fetched from the hub: {first_line(error)}"
        raise Refusal.at(where, why, "try again: downloaded files are kept", code="hub-failed") from error


def hub_errors() -> tuple[type[Exception], ...]:
    """Returns the classes of errors that the hub client, file access and HTTP connections may raise."""
    from huggingface_hub.errors import HfHubHTTPError

    return (*HfHubHTTPError.__bases__, OSError, ValueError, RuntimeError)


def ask_hub(name: str, where: str, so: str, remedy: str, kind: str = "models") -> int:
    """Asks the hub for a model or data set (`kind`) and returns the HTTP status. If the hub cannot be reached, raises
    `Refusal` with a message that begins with the text `so`."""
    from huggingface_hub import constants, get_token

    for switch in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if os.environ.get(switch, "").upper() in _OFF:
            raise Refusal.at(
                where, f"{so}, and access to the hub is disabled ({switch} is set)", remedy, code="hub-failed"
            )
    address = f"{constants.ENDPOINT}/api/{kind}/{name}"
    if address in _silent:  # this address did not answer before: do not wait again
        raise Refusal.at(where, f"{so}, {_silent[address]}", remedy, code="hub-failed")
    request = urllib.request.Request(address)
    if token := get_token():
        request.add_header("Authorization", f"Bearer {token}")
    answers: list[int | str] = []
    # The request runs in a daemon thread, because a hanging DNS resolution cannot be interrupted.
    thread = threading.Thread(target=lambda: answers.append(_status_of(request)), daemon=True)
    thread.start()
    thread.join(SECONDS)
    answer = answers[0] if answers else f"no answer in {SECONDS:g} s"
    if isinstance(answer, str):
        _silent[address] = f"and the hub ({constants.ENDPOINT}) cannot be reached: {answer}"
        raise Refusal.at(where, f"{so}, {_silent[address]}", remedy, code="hub-failed")
    return answer


def _status_of(request: urllib.request.Request) -> int | str:
    """Returns the HTTP status of the answer, or the error text if there was no answer."""
    try:
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        return first_line(error.reason) if isinstance(error.reason, Exception) else str(error.reason)
    except (OSError, ValueError) as error:
        return first_line(error)


def folders_of(settings: Model) -> ModelFolders:
    """Returns the local folders of `model.path` and of the adapter that training starts from."""
    return ModelFolders(model_folder(settings.path), stored_adapter(settings.lora))


def stored_adapter(settings: Lora | None) -> str | None:
    """Returns the PEFT folder of `model.lora.adapter`, or None if the key is not set."""
    if settings is None or settings.adapter is None:
        return None
    return adapter_folder(settings.adapter, "model.lora.adapter")


def image_folder(settings: Model) -> str | None:
    """Returns the folder whose image processor reads the images of rows, or None without `model.vision`."""
    return None if settings.vision is None else model_folder(settings.path)


def model_folder(path: str, key: str = "model.path") -> str:
    """Returns the local Hugging Face folder of the model `path`. `key` is the recipe key for error messages.

    A Hugging Face folder is returned unchanged. For a run, its exported model is used, or its newest checkpoint if
    there is no export. A checkpoint, a PEFT adapter and a GGUF file are converted and cached. A path that does not
    exist may be the id of a hub model.
    """
    folder, where = Path(path), f"{key} {path}"
    if folder.is_file():
        return _of_file(folder, where)
    if not folder.is_dir():
        return _elsewhere(path, where)
    if (folder / CONFIG).is_file() and weight_files(path) is None:
        return _merged(folder, where)
    if (folder / "config.json").is_file():
        return path
    if (folder / checkpoints.STATE).is_file():
        return _of_checkpoint(folder, where)
    if (folder / "recipe.yaml").is_file():
        return _of_run(folder, where)
    usual = "give the path of a Hugging Face model folder, a run, a checkpoint or an adapter"
    raise Refusal.at(where, "the folder has no config.json", _inside(folder) or usual, code="missing-file")


def _inside(folder: Path) -> str:
    """Returns a remedy that names models inside this folder, or an empty string if it contains none."""
    steps = checkpoints.steps_in(folder)
    if steps and (checkpoints.folder_of(folder, steps[-1]) / checkpoints.STATE).is_file():
        return f"use one of its checkpoints: {checkpoints.folder_of(folder, steps[-1])}"
    files = sorted(folder.glob("*.gguf"))
    if files:
        return f"use the file: {files[0]}" + (f", or another of its {len(files)} .gguf files" if len(files) > 1 else "")
    models = sorted(one.parent for name in ("recipe.yaml", "config.json", CONFIG) for one in folder.glob(f"*/{name}"))
    names = list(dict.fromkeys(map(str, models)))
    return f"use a model inside this folder: {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}" if names else ""


def adapter_folder(path: str, key: str) -> str:
    """Returns the PEFT folder of `path`, which is a PEFT folder itself, or a LoRA run or checkpoint."""
    folder, where = Path(path), f"{key} {path}"
    if (folder / CONFIG).is_file():
        return path
    if (folder / "recipe.yaml").is_file():
        folder = _newest(folder, where)
    if (folder / checkpoints.STATE).is_file():
        return _of_checkpoint(folder, where, adapter=True)
    raise Refusal.at(
        where,
        f"{CONFIG} does not exist",
        "give the path of a PEFT folder, or of a run that trained an adapter",
        code="no-adapter",
    )


def _elsewhere(path: str, where: str) -> str:
    """Resolves the id of a hub model, or raises `Refusal` for a missing local path."""
    folder = Path(path)
    # The documentation and the example recipes use these paths for the embedded tiny model.
    if where.startswith("model.path ") and (folder.parts[:1] == ("quickstart",) or path == "model"):
        raise Refusal.at(
            where,
            "no such folder",
            f"make the embedded tiny model with: lockstep tiny {quote(path)}",
            code="no-such-file",
        )
    if looks_like_hub(path) and not folder.parent.exists():
        near = _near(folder)
        return hub_folder(path, where, f"did you mean the folder {near}? Else " if near else "")
    if folder.is_symlink():
        raise Refusal.at(where, "is a broken symbolic link", "give the path of the model folder", code="no-such-file")
    if folder.suffix == ".gguf":
        raise Refusal.at(where, "no such file", code="no-such-file")
    if near := _near(folder):
        raise Refusal.at(where, "no such folder", f"did you mean {near}?", code="no-such-file")
    raise Refusal.at(where, "no such folder", "give the path of a model, a run or a checkpoint", code="no-such-file")


def _near(path: Path) -> str:
    """Returns the existing path with the most similar name, or an empty string."""
    while not path.parent.exists():
        path = path.parent
    if not path.parent.is_dir():
        return ""
    found = get_close_matches(path.name, (one.name for one in path.parent.iterdir()), n=1, cutoff=0.75)
    return str(path.with_name(found[0])) if found else ""


def _of_file(file: Path, where: str) -> str:
    with file.open("rb") as opened:
        if opened.read(len(MAGIC)) != MAGIC:
            raise Refusal.at(
                where,
                "is a file, but not a GGUF file",
                "give the path of a model folder or a .gguf file",
                code="unsupported-format",
            )
    facts = file.stat()
    key = ["gguf", str(file.resolve()), facts.st_size, facts.st_mtime_ns]

    def convert(out: Path) -> None:
        for line in import_gguf(file, out)[1:]:
            write(f"{file}: {line}", error=True)

    return converted(str(file), key, convert)


def _of_run(folder: Path, where: str) -> str:
    if (folder / "export" / "config.json").is_file():
        return str(folder / "export")
    return _of_checkpoint(_newest(folder, where), where)


def _newest(run: Path, where: str) -> Path:
    steps = checkpoints.steps_in(run / "checkpoints")
    if not steps:
        raise Refusal.at(
            where,
            "this run has neither exported its model nor saved a checkpoint yet",
            "train it further",
            code="no-checkpoint",
        )
    return checkpoints.folder_of(run / "checkpoints", steps[-1])


def _of_checkpoint(folder: Path, where: str, *, adapter: bool = False) -> str:
    if not (folder / checkpoints.MANIFEST).is_file():
        raise Refusal.at(
            where,
            f"{folder} is damaged: it has no {checkpoints.MANIFEST}",
            "name another checkpoint",
            code="damaged-checkpoint",
        )
    found = checkpoints.read(folder)
    if not found.state.kind:
        why = "was saved by an earlier version of lockstep, which did not record the kind of model"
        raise Refusal.at(where, why, "lockstep export RUN DIR --step N", code="unsupported-version")
    settings = Model.model_validate(found.state.recipe["model"])
    if adapter and settings.lora is None:
        raise Refusal.at(
            where, "the run trained all weights, so it has no adapter", "set model.path to it", code="no-adapter"
        )
    base = model_folder(settings.path, f"{where}: its model.path")
    key = ["checkpoint", adapter, checksum(folder / checkpoints.MANIFEST), settings.model_dump(), model_files(base)]

    def convert(out: Path) -> None:
        # The checksums are checked only before a conversion, because the check reads every byte of the checkpoint.
        if damage := checkpoints.damage_of(folder):
            raise Refusal.at(
                where, f"{folder} is damaged: {damage}", "name another checkpoint", code="damaged-checkpoint"
            )
        folders = ModelFolders(base, stored_adapter(settings.lora))
        _report(folder, export_checkpoint(settings, found, out, folders=folders, adapter=adapter))

    return converted(str(folder), key, convert)


def _merged(folder: Path, where: str) -> str:
    """Returns a cached folder in which the PEFT adapter is merged into its base model."""
    base = _base_folder(folder, where)
    key = ["adapter", model_files(str(folder)), model_files(base)]
    return converted(str(folder), key, lambda out: _report(folder, merge_adapter(folder, base, out, where)))


def _report(folder: Path, verified: Verification) -> None:
    if not verified.done:
        write(f"{folder}: {verified.sentence}", error=True)


def _base_folder(folder: Path, where: str) -> str:
    try:
        return model_folder(base_of(folder, where), f"{where}: its base")
    except Refusal as refusal:
        # The remedy says how to give the base model, because it may be available under another name.
        problems = [
            one if _GIVE in one.remedy else Problem(one.where, one.why, _given(folder), code=one.code)
            for one in refusal.problems
        ]
        raise Refusal(problems) from refusal


_GIVE = "set model.path to the base model and model.adapter to this folder"


def _given(folder: Path) -> str:
    return f"{_GIVE}, or merge it with: lockstep export {quote(str(folder))} DIR --merge --base BASE"


def base_of(folder: Path, where: str) -> str:
    """Returns the base model of an adapter: an existing path, a folder next to the adapter, or the id of a hub
    model."""
    remedy = _given(folder)
    try:
        base: Any = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise Refusal.at(
            where, f"{CONFIG} cannot be read: {first_line(error)}", "give the path of a PEFT folder", code="unreadable"
        ) from error
    if not isinstance(base, str) or not base:
        raise Refusal.at(where, f"{CONFIG} does not name the base model", remedy, code="no-base-model")
    for place in (Path(base), folder / base, folder.parent / Path(base).name):
        if place.exists():
            return str(place)
    if looks_like_hub(base):
        return base
    raise Refusal.at(where, f"its base model {base} was not found", remedy, code="no-base-model")


VERSION = 2
"""Version of the code that converts models. A new version invalidates the cached folders."""


def converted(what: str, facts: Any, convert: Callable[[Path], object]) -> str:
    """Returns the folder that `convert` wrote, from the cache if possible. `facts` is the cache key. `what` names the
    source in messages."""
    text = json.dumps([VERSION, __version__, facts], sort_keys=True, default=str)
    try:
        folder = cache_home() / FOLDERS / hashlib.sha256(text.encode()).hexdigest()[:24]
    except RuntimeError as error:
        why = "must be converted to a model folder, but there is no home directory for the cache"
        raise Refusal.at(what, why, "set LOCKSTEP_CACHE to a folder", code="no-home") from error
    made = MadeFolder(folder)
    advice = "the variable LOCKSTEP_CACHE names the folder of the cache"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        made.hold()
        if folder.is_dir():
            return str(folder)
        folders_bound()  # refuse before the conversion
        with made.alone():
            if not folder.is_dir():
                write(f"converting {what} to a model folder: {folder}", error=True)
                # The conversion must run on the CPU, but the caller may have set the meta device as default.
                with written_aside(folder) as aside, torch.device("cpu"):
                    convert(aside)
                made.label(str(Path(what).absolute()))
        for line in make_room(made):
            write(line, error=True)
    except OSError as error:
        raise unwritten(folder, error, advice) from error
    except Refusal as refusal:
        if refusal.problems[0].where != str(aside_of(folder)):
            raise
        raise Refusal.at(folder, refusal.problems[0].why, advice, code=refusal.problems[0].code) from refusal
    return str(folder)
