"""Fixtures: the embedded model and small rows, made once."""

from __future__ import annotations

import gc
import json
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from commands import end_warm_server
from daily import mark_slow_cases
from draws import draws

# Several workers share the cores; threads that wait for each other on a taken core cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# In the background of a shell Ctrl-C is ignored, by all that is started from there too; some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What architectures passed their check is remembered for these tests alone, and by all workers together.
OWN_CACHE = None if "LOCKSTEP_CACHE" in os.environ else tempfile.mkdtemp(prefix="lockstep-cache-")
os.environ.setdefault("LOCKSTEP_CACHE", OWN_CACHE or "")


# Nothing that is imported or collected goes away; the collector need not look for it.
gc.disable()

# A slow example is no wrong one; and examples that share a temporary folder write over what is there.
UNASKED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile("unhurried", deadline=None, suppress_health_check=UNASKED, max_examples=draws(40, 100))
settings.load_profile("unhurried")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> Iterator[None]:
    """Tests that share what a fixture made for their module go to one worker, which makes it once.

    pytest-xdist 3.8 tells a test's group by its name, in a place where pytest looks no more since 9.2: without this
    the tests of a group are dealt out one by one, and each process sets up what they share."""
    mark_slow_cases(items, config)
    for item in items:
        if item.get_closest_marker("xdist_group") is None and shares_with_its_module(item):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    yield
    for item in items:
        named = vars(item).get("_nodeid")
        if named is not None and named != item.nodeid:
            item._id = type(item.id).parse(named)  # type: ignore[attr-defined]


@cache
def has_nvidia_device() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    """A test without the marker `cuda` finds no NVIDIA device: neither in this process nor in those that it starts.
    `device: auto` is the CPU there on any machine. This is a hook and no fixture, because the fixtures of a module or
    a session are made before those of a test."""
    if item.get_closest_marker("cuda") is not None or "torch" not in sys.modules or not has_nvidia_device():
        return (yield)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        patch.setattr("torch.cuda.is_available", lambda: False)
        patch.setattr("torch.cuda.device_count", lambda: 0)
        return (yield)


def shares_with_its_module(item: pytest.Item) -> bool:
    info = getattr(item, "_fixtureinfo", None)
    return info is not None and any(made[-1].scope == "module" for made in info.name2fixturedefs.values())


def pytest_collection_finish() -> None:
    """What is imported by now stays: no collection need look at it again, and no process that a test forks copy it."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 100)
    gc.enable()


def pytest_unconfigure() -> None:
    """Workers get the cache of the process that starts them; it removes the folder when all of them have ended."""
    end_warm_server()
    if OWN_CACHE is not None:
        shutil.rmtree(OWN_CACHE, ignore_errors=True)


@pytest.fixture(autouse=True)
def same_arithmetic() -> Iterator[None]:
    """Where a bf16 product fails torch gives oneDNN up for the rest of the process, and later tests round otherwise."""
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].backends.mkldnn.enabled = True


@pytest.fixture(autouse=True, scope="session")
def written_without_waiting() -> Iterator[None]:
    """Files are not waited for until they are on the disk: that they outlive a power cut is nothing a test can see, and
    a run waits two dozen times. The commands that tests start do wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


@pytest.fixture(autouse=True, scope="session")
def command_line_built_once() -> Iterator[None]:
    """typer builds all verbs anew at each call, which takes longer than many a call itself."""
    import typer.main

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", cache(typer.main.get_command))
        yield


@pytest.fixture
def nothing_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No architecture has passed its check yet, in this process or before it."""
    from lockstep.model import trials

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    trials._verified_here.cache_clear()
    yield
    trials._verified_here.cache_clear()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lockstep.model.tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder, hidden=64, layers=2)
    return folder


@pytest.fixture(scope="session")
def tape(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run folder of a recipe with a tape of three steps, recorded when it is first asked for. Modules that share
    the tapes have the group "tapes", so that one worker runs all of them."""
    from taped_runs import recorder

    return recorder(tmp_path_factory.mktemp("tapes"), steps=3)


def chat_rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Sums with answers of very different lengths."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        answer = "so " * draw.randrange(0, 25) + f"#### {a + b}"
        rows.append({"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": answer}]})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def write_sft_recipe(folder: Path, model: Path) -> Path:
    """A small complete recipe whose rows and runs lie in the folder."""
    rows = write_jsonl(folder / "train.jsonl", chat_rows(48))
    val = write_jsonl(folder / "val.jsonl", chat_rows(10, seed=1))
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
method: sft
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 6}}
model: {{path: {model}}}
data: {{train: {rows}, val: {val}}}
batch: {{rows_per_update: 8, tokens: 256}}
optim: {{lr: 1e-3, warmup: 2}}
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_folder: Path) -> Path:
    return write_sft_recipe(tmp_path, tiny_folder)


def run(*words: object) -> int:
    """The real entry point of the command in this process; its exit code. What it does not catch is raised."""
    from lockstep import cli

    before = sys.argv
    sys.argv = ["lockstep", *map(str, words)]
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        sys.argv = before
    return 0


REWARD = '''
"""Rewards different letters: a random model earns different scores, and there is something to learn."""


def letters(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 20


def picky(data_source, solution_str, ground_truth, extra_info):
    if solution_str and ord(solution_str[0]) > 128:
        raise ValueError("cannot judge this")
    return len(set(solution_str)) / 20
'''


def question_rows(count: int) -> list[dict[str, object]]:
    """Rows of the RL schema whose prompts have different lengths."""
    return [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{'so ' * (a % 5)}{a}+{a}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(2 * a)},
            "extra_info": {"index": a},
        }
        for a in range(count)
    ]


def write_online_recipe(folder: Path, model: Path) -> Path:
    """A small complete online recipe with a reward function of its own."""
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    train = write_jsonl(folder / "prompts.jsonl", question_rows(20))
    path = folder / "online.yaml"
    path.write_text(
        f"""
method: grpo
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 4}}
model: {{path: {model}}}
data: {{train: {train}}}
batch: {{prompts: 4, tokens: 512}}
rollout: {{n: 3, max_tokens: 12}}
reward: {{function: "{folder / "reward.py"}:letters", workers: 1}}
optim: {{lr: 1e-3, eps: 1e-4, schedule: constant}}
""",
        encoding="utf-8",
    )
    return path


@pytest.fixture
def online_file(tmp_path: Path, tiny_folder: Path) -> Path:
    return write_online_recipe(tmp_path, tiny_folder)
