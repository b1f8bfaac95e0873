"""The run folder: everything a run did, in one place, with one writing process; and the environment it ran in."""

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

import lockstep
from lockstep.errors import Refusal, unwritten
from lockstep.masking import masked_tree, masked_words
from lockstep.run.files import atomic_write_text

if TYPE_CHECKING:
    from lockstep.recipe import Recipe

# What a run ran on, told without importing any of it.

# Device facts (driver, accelerator packages) come from the device classes, through the caller.
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
    """Versions, platform and command line. The host's name is left out: run folders are shared."""
    return {
        "lockstep": lockstep.__version__,
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
    """Asked once in a process: what it has imported does not follow a later checkout."""
    return checkout_commit(Path(lockstep.__file__).parent)


def checkout_commit(folder: Path) -> str | None:
    """The commit that `folder`'s own code is at, with `-dirty` when it was changed; None outside a checkout."""
    # A virtual environment inside somebody else's repository must not report that repository's commit.
    if _git(folder, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None  # no git here, or not a repository: both mean that there is no commit to tell
    return answer.stdout.strip()


# The run folder: everything a run did, in one place, and one process at a time writing it.


@dataclass(frozen=True)
class RunFolder:
    """The names of what a run leaves behind, under `path`."""

    path: Path

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    def earlier_recipe(self, last: int) -> Path:
        """Of a run that went on with other keys: what held up to the step `last`."""
        return self.path / f"recipe.to_step_{last}.yaml"

    def earlier_recipes(self) -> dict[int, Path]:
        """The recipes before the present one, by the last step that each of them trained."""
        found = [re.fullmatch(r"recipe\.to_step_(\d+)\.yaml", file.name) for file in self.path.glob("recipe.to_step_*")]
        return {last: self.earlier_recipe(last) for last in sorted(int(match[1]) for match in found if match)}

    @property
    def template(self) -> Path:
        """The chat template of a run that has another than its model's."""
        return self.path / "chat_template.jinja"

    @property
    def env(self) -> Path:
        return self.path / "env.json"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples(self) -> Path:
        return self.path / "samples.jsonl"

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
        """What the names of the files begin with that keep the last lines of a process's reward workers."""
        return worker_output(self.path / "rewards", rank)

    @property
    def trackers(self) -> Path:
        """The run's ids at outside trackers, so that a resumed run continues there under the same id."""
        return self.path / "trackers.json"

    def create(self) -> None:
        """Makes the folder; one that is already there is left as it is."""
        try:
            self.checkpoints.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal.at(
                f"run folder {self.path}", f"cannot be made: {error.strerror}", "choose a folder you can write to"
            ) from error

    def write_recipe(self, text: str, step: int = 0) -> None:
        """Writes the recipe that holds after `step`. Those that trained the steps before it stay beside it.

        Steps after `step` do not count: a run that goes back to an earlier checkpoint trains them anew.
        """
        known = {last: path.read_text(encoding="utf-8") for last, path in self.earlier_recipes().items()}
        parts = [(last, _without_secrets(held)) for last, held in known.items()]
        if self.recipe.is_file():
            parts.append((step, _without_secrets(self.recipe.read_text(encoding="utf-8"))))
        kept: dict[int, str] = {}
        for last, held in parts:
            if (end := min(last, step)) > max(kept, default=0):
                kept[end] = held
        if kept.get(step) == text:
            del kept[step]  # it goes on
        # New files first, the old ones last: a kill in between leaves too many, which the next start mends.
        for last, held in kept.items():
            if known.get(last) != held:
                atomic_write_text(self.earlier_recipe(last), held, private=True)
        atomic_write_text(self.recipe, text, private=True)
        for last in known.keys() - kept.keys():
            self.earlier_recipe(last).unlink()

    def read_env(self) -> dict[str, Any]:
        """What env.json tells; nothing where there is none yet."""
        if not self.env.exists():
            return {}
        return read_object(self.env, "it only tells of the run's earlier parts: remove it to go on without them")

    def write_env(self, extra: dict[str, Any]) -> None:
        """Writes env.json. Where a resumed run already had one, the earlier ones stay, under `before_resume`."""
        facts = describe_environment()
        if taken := sorted(facts.keys() & extra.keys()):
            raise ValueError(f"env facts given twice: {', '.join(taken)}")
        facts.update(extra)
        earlier = self.read_env()
        if earlier:
            before = earlier.pop("before_resume", [])
            facts["before_resume"] = masked_tree([*(before if isinstance(before, list) else [before]), earlier])
        atomic_write_text(self.env, json.dumps(facts, indent=2) + "\n", private=True)

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the folder for this process. The kernel frees it when the process ends, however it ends."""
        try:
            file = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise unwritten(f"run folder {self.path}", error, "a run writes to its folder") from error
        try:
            _lock_or_refuse(file, self.path)
            with contextlib.suppress(OSError):  # the number only helps whoever comes next; a full disk is told later
                os.ftruncate(file, 0)
                os.pwrite(file, str(os.getpid()).encode(), 0)
            _held.add(file)
            yield
        finally:
            # The file stays: removing it would let two processes lock two different files of the same name.
            _held.discard(file)
            os.close(file)


def _without_secrets(recipe: str) -> str:
    """The text of a recipe, where an earlier version stored secrets without them."""
    values = yaml.load(recipe, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    clean = masked_tree(values)
    return recipe if clean == values else yaml.safe_dump(clean, sort_keys=False, allow_unicode=True)


def read_object(path: Path, remedy: str = "restore the file") -> dict[str, Any]:
    """The JSON object in a file of the run folder; anything else is refused."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise Refusal.at(path, f"cannot be read: {error}", remedy) from error
    if not isinstance(values, dict):
        raise Refusal.at(path, f"holds {type(values).__name__}, not a JSON object", remedy)
    return values


def refuse_unwritable(path: Path, option: str) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    if path.is_dir():
        raise Refusal.at(f"{option} {path}", "is a folder", "name a file")
    if not path.parent.is_dir():
        raise Refusal.at(f"{option} {path}", f"there is no folder {path.parent}", "make it, or name another file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise Refusal.at(f"{option} {path}", "cannot be written to", "name another file")


def _lock_or_refuse(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, 32, 0).decode(errors="replace").strip()
        raise Refusal.at(
            f"run folder {path}",
            f"process {holder} is working in it" if holder else "another process is working in it",
            "wait for it, stop it, or give this run another folder",
        ) from None
    except OSError as error:
        raise Refusal.at(
            f"run folder {path}",
            f"its file system cannot lock files ({error.strerror}), so two runs could mix in it",
            "put the run folder on a file system with flock, such as a local disk",
        ) from error


# A forked child shares its parent's lock and would keep it after the parent is killed (a data worker, for instance),
# so children let go of theirs at once.
_held: set[int] = set()


def _release_in_child() -> None:
    for file in _held:
        os.close(file)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


def worker_output(folder: Path, rank: int) -> Path:
    """As `RunFolder.reward_output`, in a folder of any name."""
    return folder / ("worker" if rank == 0 else f"rank{rank}-worker")


def run_folder(recipe: Recipe) -> RunFolder:
    return RunFolder(Path(recipe.run.folder) / recipe.run.name)
