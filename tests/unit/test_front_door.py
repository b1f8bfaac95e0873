"""What `import lockstep` offers, and that asking for nothing loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

import lockstep
from commands import warm_python
from lockstep.recipe.loader import recipe_with
from lockstep.recipe.schema import Recipe
from refusals import refuses


def fresh(code: str, python: Sequence[str] = (sys.executable,)) -> list[str]:
    """What a fresh interpreter prints, word by word."""
    done = subprocess.run([*python, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_lockstep_loads_neither_torch_nor_pydantic() -> None:
    code = "import sys, lockstep; dir(lockstep); print(*{name.split('.')[0] for name in sys.modules})"
    assert not {"torch", "pydantic", "transformers", "numpy", "yaml"} & set(fresh(code))


def test_every_name_is_there_whatever_was_imported_before() -> None:
    """Importing a module of `lockstep.train` binds that name to the package of the loops."""
    ask = "print(*[name for name in lockstep.__all__ if not callable(getattr(lockstep, name))])"
    first = "from lockstep import train, load; print(train.__class__.__call__.__name__)"
    assert fresh(f"{first}; import lockstep; {ask}") == ["__call__"]
    assert fresh(f"import lockstep.train.step, lockstep; {ask}", warm_python()) == []
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        lockstep.lode  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_checker_is_told_that_there_are_types() -> None:
    """What it then sees is in tests/typing/front_door.py, which `make lint` checks."""
    assert (Path(lockstep.__file__).parent / "py.typed").is_file()


def file_with(tmp_path: Path, **values: Any) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump({"model": {"path": "m"}, "data": {"train": "rows.jsonl"}, **values}))
    return path


def test_overrides_are_groups_or_dotted_keys(tmp_path: Path) -> None:
    path = file_with(tmp_path, optim={"lr": 1e-3, "clip": 2.0})
    recipe = recipe_with(path, {"optim": {"lr": 1e-4}, "run.steps": 5, "data.train": tmp_path / "other.jsonl"})
    assert (recipe.optim.lr, recipe.optim.clip, recipe.run.steps) == (1e-4, 2.0, 5)
    assert recipe.data.train[0].path == str(tmp_path / "other.jsonl")
    again = recipe_with(recipe, {"optim.lr": 1e-5})
    assert (again.optim.lr, again.optim.clip, again.run.steps) == (1e-5, 2.0, 5)


def test_a_recipe_of_python_gets_the_defaults_of_its_method() -> None:
    made = Recipe(method="grpo", model={"path": "m"}, data={"train": "rows.jsonl"})  # type: ignore[arg-type]
    assert recipe_with(made, {}).algorithm.kl.where == "loss"
    with refuses("rollout.n", "out-of-range", "grpo"):
        recipe_with(made, {"rollout": {"n": 1}})
    with refuses("optim.lrate", "unknown-key"):
        recipe_with(made, {"optim.lrate": 1.0})


def test_train_and_compare_from_python(tiny_folder: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{i}+1=", "response": str(i + 1)}) + "\n" for i in range(8)))
    keys: dict[str, Any] = {
        "model": {"path": tiny_folder},
        "data": {"train": rows},
        "batch.rows_per_update": 4,
        "run": {"folder": tmp_path, "steps": 3, "export": False},
        "device": "cpu",
    }
    first, second = (lockstep.train(file_with(tmp_path), **{**keys, "run.name": name}) for name in ("a", "b"))
    assert first == tmp_path / "a"
    assert len((first / "metrics.jsonl").read_text().splitlines()) == 3
    assert lockstep.compare(first, second).verdict == "in step"
    other = lockstep.train(first / "recipe.yaml", **{"run.name": "c", "optim.lr": 1e-2})
    assert lockstep.compare(first, other).verdict != "in step"
