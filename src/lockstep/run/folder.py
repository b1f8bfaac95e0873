"""The run folder: its files, its lock, and the description of the software environment."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lockstep.errors import Refusal, unwritten
from lockstep.masking import masked_tree, masked_words
from lockstep.run.files import atomic_write_text
from lockstep.version import PACKAGE_FOLDER, __version__

if TYPE_CHECKING:
    from lockstep.recipe import Recipe

# The packages whose versions env.json lists. The caller adds driver and accelerator packages, which the device classes
# report.
PACKAGES = (
    "torch",
    "transformers",
    "peft",
    "numpy",
    "safetensors",
    "tokenizers",
    "pyarrow",
    "pydantic",
    "triton",
    "ray",
    "vllm",
    "sglang",
)


def describe_environment() -> dict[str, Any]:
    """Returns versions, platform and command line. The host name is omitted, because run folders may be shared."""
    return {
        "lockstep": __version__,
        "git_commit": own_commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := installed_version(name))},
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "command": masked_words(sys.argv),
    }


@cache
def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def own_commit() -> str | None:
    """Returns the git commit of this package. The commit is cached, because a later checkout does not change imported
    code."""
    return checkout_commit(PACKAGE_FOLDER)


def checkout_commit(folder: Path) -> str | None:
    """Returns the git commit of `folder`, with `-dirty` if files were changed, or None outside a checkout."""
    # If the package is installed in a virtual environment inside another git repository, the function must not return
    # the commit of that repository.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no git, or not a repository
    return answer.stdout.strip()


@dataclass(frozen=True)
class RunFolder:
    """The paths of the files of a run, and the lock of the run folder."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    def earlier_recipe(self, last: int) -> Path:
        """Returns the path of the recipe that applied up to step `last`. A run that is resumed with changed keys keeps
        its earlier recipes."""
        return self.path / f"recipe.to_step_{last}.yaml"

    def earlier_recipes(self) -> dict[int, Path]:
        """Returns the paths of the earlier recipes of a resumed run, by the last step to which each recipe applied."""
        found = [re.fullmatch(r"recipe\.to_step_(\d+)\.yaml", file.name) for file in self.path.glob("recipe.to_step_*")]
        return {last: self.earlier_recipe(last) for last in sorted(int(match[1]) for match in found if match)}

    @property
    def template(self) -> Path:
        """The path of the chat template file, which exists only if the run does not use the chat template of the
        model."""
        return self.path / "chat_template.jinja"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def migration(self) -> Path:
        """The path of the table of a converted command, which exists only if the recipe has `run.migration`."""
        return self.path / "migration.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

    @property
    def images(self) -> Path:
        """The folder with the images of the prompts in samples.jsonl."""
        return self.path / "images"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def export(self) -> Path:
        return self.path / "export"

    @property
    def tape(self) -> Path:
        return self.path / "tape"

    def reward_output(self, rank: int) -> Path:
        """Returns the path prefix of the files that contain the last output lines of the reward workers of this
        rank."""
        return worker_output(self.path / "rewards", rank)

    @property
    def trackers(self) -> Path:
        """The path of the file with the run ids of the experiment trackers, such as wandb. A resumed run reuses the
        stored run ids."""
        return self.path / "trackers.json"

    def create(self) -> None:
        """Creates the folder if it does not exist."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal.at(
                f"run folder {self.path}",
                f"cannot be created: {error.strerror}",
                "choose a writable folder",
                code="unwritable",
            ) from error

    def write_recipe(self, text: str, step: int = 0) -> None:
        """Writes the recipe that applies to the steps after `step`. The recipes of earlier steps are kept.

        Recipes of later steps are deleted, because a run that returns to an earlier checkpoint repeats these steps.
        """
        earlier = {last: path.read_text(encoding="utf-8") for last, path in self.earlier_recipes().items()}
        parts = [(last, _current_recipe(content)) for last, content in earlier.items()]
        if self.recipe.is_file():
            parts.append((step, _current_recipe(self.recipe.read_text(encoding="utf-8"))))
        kept: dict[int, str] = {}
        for last, content in parts:
            if (end := min(last, step)) > max(kept, default=0):
                kept[end] = content
        if kept.get(step) == text:
            del kept[step]  # This recipe is unchanged.
        # New files are written before old files are deleted. After a kill, extra files may remain; the next start
        # removes them.
        for last, content in kept.items():
            if earlier.get(last) != content:
                atomic_write_text(self.earlier_recipe(last), content, private=True)
        atomic_write_text(self.recipe, text, private=True)
        for last in earlier.keys() - kept.keys():
            self.earlier_recipe(last).unlink()

    def read_env(self) -> dict[str, Any]:
        """Returns the content of env.json, or an empty dict if the file does not exist."""
        if not self.env.exists():
            return {}
        return read_object(self.env, "remove the file to resume without the history of earlier starts")

    def write_env(self, extra: dict[str, Any]) -> None:
        """Writes env.json. The content of earlier starts of the run is kept under the key `before_resume`."""
        facts = describe_environment()
        if taken := sorted(facts.keys() & extra.keys()):
            raise ValueError(f"env.json already has these keys: {', '.join(taken)}")
        facts.update(extra)
        earlier = self.read_env()
        if earlier:
            before = earlier.pop("before_resume", [])
            facts["before_resume"] = masked_tree([*(before if isinstance(before, list) else [before]), earlier])
        atomic_write_text(self.env, json.dumps(facts, indent=2) + "\n", private=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Locks the folder for this process. The kernel releases the lock when the process ends."""
        try:
            file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise unwritten(f"run folder {self.path}", error, "the run folder must be writable") from error
        try:
            _lock_or_refuse(file, self.path)
            with contextlib.suppress(OSError):  # the process id is only for information
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
            _held.add(file)
            yield
        finally:
            # The lock file is not removed, because two processes could then each lock a different file with this name.
            _held.discard(file)
            os.close(file)


def _current_recipe(recipe: str) -> str:
    """Converts a stored recipe of an earlier lockstep version: masks secrets and renames keys."""
    # The import is here, so that commands that only list runs do not load the recipe schema.
    from lockstep.recipe.renamed_keys import stored_recipe

    values = yaml.load(recipe, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    clean = stored_recipe(masked_tree(values))
    return recipe if clean == values else yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)


def read_object(path: Path, remedy: str = "restore the file") -> dict[str, Any]:
    """Reads a JSON object from a file; raises `Refusal` for any other content."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal.at(path, f"cannot be read: {error}", remedy, code="unreadable") from error
    if not isinstance(values, dict):
        raise Refusal.at(path, f"contains {type(values).__name__}, not a JSON object", remedy, code="damaged-file")
    return values


def refuse_unwritable(path: Path, option: str) -> None:
    """Raises `Refusal` if an output file cannot be written. Commands call this function before they start the work."""
    if path.is_dir():
        raise Refusal.at(f"{option} {path}", "is a folder", "give the path of a file", code="not-a-file")
    if not path.parent.is_dir():
        raise Refusal.at(
            f"{option} {path}",
            f"folder {path.parent} does not exist",
            "create the folder, or give another path",
            code="no-such-file",
        )
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Refusal.at(f"{option} {path}", "cannot be written to", "give another path", code="unwritable")


def _lock_or_refuse(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip()
        raise Refusal.at(
            f"run folder {path}",
            f"process {holder} is using it" if holder else "another process is using it",
            "wait for that process, stop it, or use another run folder",
            code="folder-in-use",
        ) from None
    except OSError as error:
        raise Refusal.at(
            f"run folder {path}",
            f"its file system cannot lock files ({error.strerror}), so two runs could write to it at the same time",
            "put the run folder on a file system with flock, such as a local disk",
            code="no-file-locks",
        ) from error


# A forked child process, such as a data worker, inherits the lock of its parent. A child would keep the lock after its
# parent is killed, so child processes close the lock file immediately.
_held: set[int] = set()


def _release_in_child() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


def worker_output(folder: Path, rank: int) -> Path:
    """Returns the path prefix of the output files of the reward workers of this rank."""
    return folder / ("worker" if rank == 0 else f"rank{rank}-worker")


def run_folder(recipe: Recipe) -> RunFolder:
    return RunFolder(Path(recipe.run.folder) / recipe.run.name)
