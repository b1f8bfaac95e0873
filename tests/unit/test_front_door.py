"""What `import lockstep` offers, and that asking for nothing loads nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lockstep
from lockstep.errors import Refusal
from lockstep.recipe.load import recipe_with
from lockstep.recipe.schema import Recipe


def fresh(code: str) -> list[str]:
    """What a fresh interpreter prints, word by word."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_importing_lockstep_loads_neither_torch_nor_pydantic() -> None:
    code = "import sys, lockstep; dir(lockstep); print(*{name.split('.')[0] for name in sys.modules})"
    assert not {"torch", "pydantic", "transformers", "numpy", "yaml"} & set(fresh(code))


def test_every_name_is_there_whatever_was_imported_before() -> None:
    """Importing a module of `lockstep.train` binds that name to the package of the loops."""
    ask = "print(*[name for name in lockstep.__all__ if not callable(getattr(lockstep, name))])"
    assert fresh(f"import lockstep; {ask}") == []
    assert fresh(f"import lockstep.train.step, lockstep; {ask}") == []
    assert fresh("from lockstep import train, load; print(train.__class__.__call__.__name__)") == ["__call__"]
    with pytest.raises(AttributeError, match="has no attribute 'lode'"):
        lockstep.lode  # type: ignore[attr-defined]  # noqa: B018


def test_a_type_checker_sees_the_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (Path(lockstep.__file__).parent / "py.typed").is_file()
    file = tmp_path / "user.py"
    file.write_text(
        "import lockstep\nfrom pathlib import Path\n"
        "run: Path = lockstep.train('sft-arithmetic', run={'steps': 1})\n"
        "texts: list[str] = [r.text for r in lockstep.load('m').sample(['a'], n=2)]\n"
        "verdict: str = lockstep.compare('a', 'b').verdict\n"
        "x: int = lockstep.load('m')\ny: int = lockstep.train('r')\n"
    )
    command = [sys.executable, "-m", "mypy", "--follow-imports=silent", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(lockstep.__file__).parents[2])
    wrong = [line.split(":")[1] for line in done.stdout.splitlines() if "error:" in line]
    assert wrong == ["6", "7"], done.stdout + done.stderr


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
    with pytest.raises(Refusal, match=r"rollout.n: grpo compares the samples of a prompt"):
        recipe_with(made, {"rollout": {"n": 1}})
    with pytest.raises(Refusal, match=r"optim.lrate: no such key"):
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
