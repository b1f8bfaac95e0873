"""What has a name is a row and a file: the examples of docs/extending.md and of examples/plugins are added as plug-ins,
and each trains.

The files in which one of ours is named are counted, so that an addition stays that small.
"""

from __future__ import annotations

import ast
import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from math import e
from pathlib import Path
from statistics import median_low
from typing import Any

import pytest

import lockstep
from commands import FORKS, WarmServer, completed
from commands import lockstep as command
from hang import HANG
from lockstep.algorithms import advantage
from lockstep.algorithms import policy_loss as policy
from lockstep.device import select
from lockstep.methods import METHODS
from lockstep.recipe import methods
from lockstep.recipe import registry as rows
from lockstep.recipe.loader import recipe_with
from lockstep.run.metrics import read_metrics
from source_trees import nodes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "lockstep"
PAGE = ROOT / "docs" / "extending.md"
TABLES: list[dict[str, Any]] = [
    advantage.ESTIMATORS,
    policy.LOSSES,
    METHODS,
    methods.OFFLINE,
    select.DEVICES,
    rows.ESTIMATORS,
    rows.LOSSES,
    rows.ENGINES,
    rows.TRACKERS,
]
FILE = re.compile(r"^<!-- file: (\S+) -->\n+^```\w+\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXAMPLES: dict[str, str] = {
    **dict(FILE.findall(PAGE.read_text(encoding="utf-8"))),
    **{file.name: file.read_text(encoding="utf-8") for file in sorted((ROOT / "examples" / "plugins").glob("*.py"))},
}
Plug = Callable[[str], None]


@pytest.fixture
def plug(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plug]:
    """Imports an example of the page from a folder outside of the package; its rows go when the test ends."""
    folder = tmp_path / "plugins"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    before = [dict(table) for table in TABLES]
    imported: list[str] = []

    def bring(name: str) -> None:
        (folder / f"{name}.py").write_text(EXAMPLES[f"{name}.py"], encoding="utf-8")
        imported.append(name)
        importlib.import_module(name)

    yield bring
    for table, rows_before in zip(TABLES, before, strict=True):
        table.clear()
        table.update(rows_before)
    for name in imported:
        del sys.modules[name]


def trained(recipe: Path, **overrides: Any) -> Path:
    short = {"run.steps": 1, "run.export": False, "log.samples": 99, "optim.warmup": 0}
    return lockstep.train(recipe, **{**short, **overrides})


def numbers(run: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, without what was timed."""
    return {
        step: {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))}
        for step, metrics in read_metrics(run / "metrics.jsonl")
    }


def samples(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]


def problem(recipe: Path, **overrides: Any) -> str:
    with pytest.raises(lockstep.Refusal) as refused:
        recipe_with(recipe, overrides)
    (found,) = refused.value.problems
    return f"{found.where} [{found.code}]: {found.why}; {found.remedy}"


def test_an_estimator(online_file: Path, plug: Plug) -> None:
    name = {"algorithm.advantage": "median"}
    assert "algorithm.advantage [invalid-value]: must be 'gae'" in problem(online_file, **name)
    plug("median")
    lines = samples(trained(online_file, **name))
    groups: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault(line["origin"], []).append(line)
    assert [len(group) for group in groups.values()] == [3] * 4
    for group in groups.values():
        middle = median_low([line["score"] for line in group])
        for line in group:
            assert line["advantage"] == pytest.approx(line["score"] - middle, abs=1e-6)
    assert len({line["advantage"] for line in lines}) > 2
    # What it needs is asked of its row.
    assert "rollout.n [out-of-range]: median" in problem(online_file, **name, **{"rollout.n": 1})


def test_a_policy_loss(online_file: Path, plug: Plug) -> None:
    """Without bounds in reach it is PPO's loss; where they are reached a tenth is left, so the step is another."""
    plug("leaky")
    twice = {"algorithm.epochs": 2, "optim.lr": 1e-2, "algorithm.dual_clip": None}
    wide = {**twice, "algorithm.clip_low": 0.999, "algorithm.clip_high": 1e6}
    narrow = {**twice, "algorithm.clip_low": 0.01, "algorithm.clip_high": 0.01}

    def loss(name: str, keys: dict[str, Any], run: str) -> float:
        return numbers(trained(online_file, **keys, **{"algorithm.loss": name, "run.name": run}))[1]["actor/pg_loss"]

    ours = loss("clip", wide, "clip")
    assert loss("leaky", wide, "leaky") == pytest.approx(ours, rel=1e-5)
    assert abs(loss("leaky", narrow, "narrow") - ours) > 1e-3 * abs(ours)


def test_a_policy_loss_of_a_handle(tiny_folder: Path, plug: Plug) -> None:
    """Old log-probs one below give the ratio e, of which 1.3 and a tenth of the rest count: 1.3 + 0.1 (e - 1.3)."""
    plug("leaky")
    model = lockstep.load(str(tiny_folder), device="cpu")
    rollouts, gained = model.sample("Hello", n=2, max_tokens=3), (0.5, -2.0)
    said = model.logprobs(rollouts)
    data = [r.datum(advantage=a, old=own - 1) for r, a, own in zip(rollouts, gained, said, strict=True)]
    mean = sum(-a * len(own) for a, own in zip(gained, said, strict=True)) / sum(map(len, said))
    loss = model.forward_backward(data, "leaky", clip_high=0.3)["loss"]
    assert loss == pytest.approx(mean * (1.3 + 0.1 * (e - 1.3)), rel=1e-5)
    with pytest.raises(lockstep.Refusal, match="sapo_positive"):
        model.forward_backward(data, "leaky", sapo_positive=1.0)


def test_an_offline_method(tmp_path: Path, tiny_folder: Path, recipe_file: Path, plug: Plug) -> None:
    pairs = [("2+2=", "4"), ("1+2=", "it is 3"), ("say a", "a"), ("and b", "bbb")]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in pairs), encoding="utf-8")
    keys = {"method": "focal", "data": {"train": str(path), "val": []}, "batch.rows_per_update": 4}
    assert "method [invalid-value]: must be 'sft', 'rm'" in problem(recipe_file, **keys)
    plug("focal")
    found = numbers(trained(recipe_file, **keys))[1]

    model = lockstep.load(str(tiny_folder), device="cpu")
    said = [value for logprobs in model.logprobs([model.example(p, r) for p, r in pairs]) for value in logprobs]
    wanted = sum(-((1 - value.exp()) ** 2) * value for value in said) / len(said)
    assert found["train/loss"] == pytest.approx(float(wanted), rel=1e-5)
    assert found["train/nll"] == pytest.approx(-float(sum(said)) / len(said), rel=1e-5)
    # Its own defaults, and the groups of other methods, are asked of its row.
    assert methods.with_method_defaults({"method": "focal"})["optim"] == {"lr": 2e-4}
    assert problem(recipe_file, **keys, **{"rm.center_rewards_coef": 0.1}).startswith(
        "rm.center_rewards_coef [unused-key]: method focal"
    )


@pytest.mark.slow
def test_an_engine(online_file: Path, plug: Plug) -> None:
    """It draws the built-in engine's tokens, since the noise is the same, and may say what the trainer says only."""
    misspelt = {"rollout.engine": "naiv"}
    assert "rollout.engine [invalid-value]: must be 'native', 'hf', 'vllm' or 'sglang'" in problem(
        online_file, **misspelt
    )
    plug("naive")
    assert "did you mean naive?" in problem(online_file, **misspelt)
    native = trained(online_file)
    own = trained(online_file, **{"rollout.engine": "naive", "run.name": "own"})
    assert [line["response"] for line in samples(own)] == [line["response"] for line in samples(native)]
    assert numbers(own)[1]["actor/pg_loss"] == pytest.approx(numbers(native)[1]["actor/pg_loss"], abs=1e-5)
    assert numbers(own)[1]["training/rollout_probs_diff_max"] < 1e-4


def test_an_engine_that_says_other_logprobs_is_refused(
    online_file: Path, plug: Plug, monkeypatch: pytest.MonkeyPatch
) -> None:
    plug("naive")
    module = sys.modules["naive"]
    monkeypatch.setattr(module, "float", lambda value: float(value) - 0.5, raising=False)
    with pytest.raises(lockstep.Refusal, match=r"log-probabilities differ from the trainer's by 0\.5") as refused:
        trained(online_file, **{"rollout.engine": "naive"})
    assert refused.value.problems[0].remedy == "use the native engine"


def test_a_tracker(recipe_file: Path, plug: Plug) -> None:
    assert "log.track.0 [invalid-value]: must be 'tensorboard'" in problem(recipe_file, **{"log.track": ["table"]})
    plug("table")
    run = trained(recipe_file, **{"log.track": ["table"], "run.steps": 2})
    with (run / "losses.csv").open(encoding="utf-8") as file:
        table = [[float(cell) for cell in line] for line in csv.reader(file)]
    assert [int(line[0]) for line in table] == [1, 2]
    logged = numbers(run)
    assert [line[1] for line in table] == [logged[1]["train/loss"], logged[2]["train/loss"]]
    assert table[1][2] == logged[2]["val/loss"]


@pytest.mark.slow
def test_plugins_through_the_command(tmp_path: Path, online_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file and an importable module; the run's evidence has their content, and so does the resumed part."""
    for name in ("median", "table"):
        (tmp_path / f"{name}.py").write_text(EXAMPLES[f"{name}.py"], encoding="utf-8")
    (tmp_path / "own.py").write_text("def reward(data_source, solution_str, **more):\n    return len(solution_str)\n")
    words = ("algorithm.advantage=median", "log.track=[table]", f"reward.function={tmp_path / 'own.py'}:reward")
    assert "(given: 'median')" in problem(online_file, **{"algorithm.advantage": "median"})
    with pytest.raises(lockstep.Refusal) as refused:
        recipe_with(online_file, {"run.plugins": ["no_such_module", "no/file.py"]})
    missing = "\n".join(str(found) for found in refused.value.problems)
    assert "run.plugins no_such_module [import-failed]" in missing
    assert "run.plugins [no-such-file]: file no/file.py " in missing
    # `python -m lockstep` finds modules in the current folder, so `table` needs no installation.
    monkeypatch.chdir(tmp_path)
    short = ("run.steps=1", "run.export=false", "optim.schedule=constant")
    done = command("train", online_file, *words, f"run.plugins=[{tmp_path / 'median.py'}, table]", *short)
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "run"
    assert (run / "losses.csv").read_text(encoding="utf-8").startswith("1")
    code = json.loads((run / "env.json").read_text(encoding="utf-8"))["own_code"]
    wanted = {
        "reward.function": "own.py",
        f"run.plugins.{tmp_path / 'median.py'}": "median.py",
        "run.plugins.table": "table.py",
    }
    assert {key: told["sha256"] for key, told in code.items()} == {
        key: sha256((tmp_path / file).read_bytes()).hexdigest() for key, file in wanted.items()
    }
    with (tmp_path / "own.py").open("a", encoding="utf-8") as file:
        file.write("# another file\n")
    files = f"run.plugins=[{tmp_path / 'median.py'}, {tmp_path / 'table.py'}]"
    resumed = command("train", online_file, *words, files, *short, "run.steps=2")
    assert resumed.returncode == 0, resumed.stderr
    told = " ".join((resumed.stdout + resumed.stderr).split())
    assert told.count("own.py:reward: the file has changed since") == 1


@pytest.mark.slow
def test_a_reward(tmp_path: Path, online_file: Path) -> None:
    (tmp_path / "own.py").write_text(EXAMPLES["own.py"], encoding="utf-8")
    lines = samples(trained(online_file, **{"reward.function": f"{tmp_path / 'own.py'}:reward"}))
    assert len(lines) == 12
    for line in lines:
        right = line["ground_truth"] in line["response"]
        assert line["score"] == pytest.approx(right + len(set(line["response"])) / 100)


@pytest.mark.slow
def test_a_device(recipe_file: Path, plug: Plug) -> None:
    plug("exact")
    run = trained(recipe_file, device="exact")
    facts = json.loads((run / "env.json").read_text(encoding="utf-8"))["device"]
    assert facts["name"] == "exact"
    cpu = numbers(trained(recipe_file, **{"run.name": "cpu"}))
    assert numbers(run)[1]["train/loss"] == cpu[1]["train/loss"]
    with pytest.raises(lockstep.Refusal, match="exact"):
        trained(recipe_file, device="exact", **{"model.dtype": "bf16", "run.name": "half"})


@pytest.mark.slow
def test_a_recipe_key(tmp_path: Path, online_file: Path) -> None:
    """In a copy of the package, changed as the page says: two files, and the key is read, checked and compared."""
    copy = tmp_path / "package"
    shutil.copytree(SOURCE, copy / "src" / "lockstep", ignore=shutil.ignore_patterns("__pycache__"))
    assert patched(EXAMPLES["bound.diff"], copy) == [
        "src/lockstep/recipe/keys_online.py",
        "src/lockstep/train/advantages.py",
    ]

    server = WarmServer(PYTHONPATH=str(copy / "src")) if FORKS else None
    python = [sys.executable] if server is None else server.python

    def command(*words: object) -> subprocess.CompletedProcess[str]:
        return completed([*python, "-m", "lockstep", *map(str, words)], HANG, {"PYTHONPATH": str(copy / "src")})

    keys = ("run.steps=1", "run.export=false", "algorithm.bound=0.25")
    done = command("train", online_file, *keys)
    assert done.returncode == 0, done.stderr
    metrics = numbers(tmp_path / "runs" / "run")[1]
    assert (metrics["critic/advantages/max"], metrics["critic/advantages/min"]) == (0.25, -0.25)
    refused = command("train", online_file, "algorithm.bound=-1")
    assert refused.returncode == 2
    assert "algorithm.bound" in refused.stderr
    changed = command("train", online_file, "run.steps=2", "algorithm.bound=0.5")
    assert changed.returncode == 2
    assert "algorithm.bound" in changed.stderr
    if server is not None:
        server.end()


def patched(diff: str, root: Path) -> list[str]:
    """Applies hunks by their text, wherever it stands; returns the files."""
    changed = []
    for part in re.split(r"^--- ", diff, flags=re.MULTILINE)[1:]:
        name, _, hunks = part.partition("\n")
        path = root / name
        text = path.read_text(encoding="utf-8")
        for hunk in hunks.split("@@\n")[1:]:
            lines = [line or " " for line in hunk.splitlines()]
            old = "".join(line[1:] + "\n" for line in lines if line[0] in " -")
            new = "".join(line[1:] + "\n" for line in lines if line[0] in " +")
            assert text.count(old) == 1, f"{name} has no longer\n{old}"
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
        changed.append(name)
    return changed


# -- how many files an addition touches --------------------------------------------------------------------------------


def naming(root: Path, name: str) -> set[str]:
    """Files that hold the name as a text of the program, define a function or class of that name, or are named so."""
    return {
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        # Tables of other projects' words for what we have: an addition need not be there.
        if path.relative_to(root).parts[0] != "compat"
        if name in texts_and_definitions(path) or path.stem == name
    }


@cache
def texts_and_definitions(path: Path) -> set[str]:
    texts = {node.value for node in nodes(path) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return texts | {node.name for node in nodes(path) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def reading(root: Path, key: str) -> set[str]:
    """Files that declare a key of the recipe or read it."""
    found = set()
    for path in root.rglob("*.py"):
        for node in nodes(path):
            declared = isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == key
            if declared or (isinstance(node, ast.Attribute) and node.attr == key):
                found.add(path.relative_to(root).as_posix())
    return found


TOUCHED = {
    # The last one has a key that only this estimator reads.
    "grpo_passk": {"algorithms/advantage.py", "recipe/registry.py", "recipe/keys_online.py"},
    "geo_mean": {"algorithms/policy_loss.py", "recipe/registry.py"},
    # The fourth has its checks; the last two choose or replace the teacher model.
    "distill": {
        *("methods/distill.py", "methods/__init__.py", "recipe/methods.py", "recipe/method_checks.py"),
        *("commands/init.py", "commands/smoke.py"),
    },
    "hf": {"rollout/hf.py", "recipe/registry.py"},
    "swanlab": {"run/trackers/swanlab.py", "recipe/registry.py"},
}


@pytest.mark.xdist_group("source trees")
@pytest.mark.parametrize("name", TOUCHED)
def test_ours_are_named_in_so_many_files(name: str) -> None:
    assert naming(SOURCE, name) == TOUCHED[name]


@pytest.mark.xdist_group("source trees")
def test_a_key_is_declared_and_read() -> None:
    # The third counts the memory that it keeps.
    assert reading(SOURCE, "free_cache") == {
        "recipe/keys_rollout.py",
        "rollout/native/native_engine.py",
        "preflight/memory_plan.py",
    }


def test_the_counts_can_fail(tmp_path: Path) -> None:
    files = {"a.py": "x = 'opo'", "b.py": "def opo(): ...", "opo.py": "", "d.py": "# opo\n'''about opo'''\nopossum = 1"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert naming(tmp_path, "opo") == {"a.py", "b.py", "opo.py"}
    (tmp_path / "e.py").write_text("class S:\n    n: int = 1\nprint(S.m)")
    assert (reading(tmp_path, "n"), reading(tmp_path, "m")) == ({"e.py"}, {"e.py"})


@pytest.mark.parametrize("path", [*(row.opener for row in rows.ENGINES.values()), *rows.TRACKERS.values()])
def test_every_row_leads_somewhere(path: str) -> None:
    assert callable(rows.imported(path))
