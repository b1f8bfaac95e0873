"""The documents say what the code does: links lead somewhere, the reference is current, marked commands really run.

A comment before a fenced block marks it:

    <!-- file: NAME -->   the block is written to NAME
    <!-- run -->          the block is run by `sh -eu`
    <!-- shows -->        the run just before printed these lines, in this order; `...` stands for anything

The blocks of a page run in one empty folder that holds `model`, a tiny model.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import typer.main

from commands import search_path
from hang import HANG
from lockstep.cli import app
from lockstep.model.tiny import write_tiny

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / name for name in ("README.md", "CONTRIBUTING.md"))])
FENCE = re.compile(r"(?:^<!-- (run|shows|file: \S+) -->\n+)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


class Block(NamedTuple):
    mark: str
    language: str
    text: str


def blocks(page: Path) -> list[Block]:
    return [Block(*found) for found in FENCE.findall(page.read_text(encoding="utf-8"))]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name)


@pytest.mark.parametrize(
    ("tool", "page"),
    [("recipe_reference.py", "recipe.md"), ("error_codes.py", "errors.md"), ("step_figure.py", "grpo-step.svg")],
)
def test_the_references_are_current(tool: str, page: str) -> None:
    printed = subprocess.run([sys.executable, ROOT / "tools" / tool], capture_output=True, text=True, check=True).stdout
    assert printed == (ROOT / "docs" / page).read_text(encoding="utf-8"), "run `make docs`"


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for target in LINK.findall(text):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path) if path else page
        assert found.exists(), f"{name(page)} links to {target}"
        if anchor:
            titles = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert anchor in slugs, f"{name(page)} links to {target}"


def test_the_readme_links_to_every_page() -> None:
    linked = set(LINK.findall((ROOT / "README.md").read_text(encoding="utf-8")))
    pages = {name(page) for page in PAGES if not page.name.endswith(".zh.md")}
    assert pages - linked == {"README.md"}


@every_page
def test_commands_and_keys_exist(page: Path) -> None:
    """Also in blocks that are not run: verbs of `lockstep`, targets of `make`, keys of the recipe."""
    keys = set(re.findall(r"^\| `([\w.]+)` \|", (ROOT / "docs" / "recipe.md").read_text(encoding="utf-8"), re.M))
    keys.add("tape")  # short for tape.record
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    verbs = set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
    for block in blocks(page):
        if block.language != "sh":
            continue
        for line in block.text.splitlines():
            command, *words = line.partition("#")[0].split() or [""]
            if command == "lockstep":
                assert words[0] in verbs, line
                given = [word.partition("=")[0] for word in words[1:] if re.match(r"[\w.]+=", word)]
                assert set(given) <= keys, line
            elif command == "make":
                assert set(words) <= targets, line


@every_page
def test_modules_and_folders_exist(page: Path) -> None:
    """`train/step.py`, `src/lockstep/data/`, `tools/structure.py`: what is named as a file of ours is one."""
    package = ROOT / "src" / "lockstep"
    ours = {path.name for root in (ROOT, package) for path in root.iterdir() if path.is_dir()}
    for found in re.findall(r"`(?:src/lockstep/)?((?:\w+/)+(?:\w+\.py)?)`", page.read_text(encoding="utf-8")):
        if found.split("/")[0] in ours - {"runs"}:
            assert (package / found).exists() or (ROOT / found).exists(), f"{name(page)} names {found}"


@every_page
def test_plain_and_true(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert not re.findall(r"(?<![\w.])/(?:work|root|home|tmp)/", text), "a path of somebody's machine"
    if re.search(r"\b(ascend|npu|hccl)\b", text, re.IGNORECASE):
        assert "Not yet run on Ascend hardware" in " ".join(text.split())


# Their numbers are those of the embedded model as `lockstep tiny` makes it. The others run with a smaller one.
OF_ITS_SIZE = ("docs/life-of-a-sample.md",)
runnable = [page for page in PAGES if any(block.mark == "run" for block in blocks(page))]


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded") / "model"
    write_tiny(folder)
    return folder


# Pages whose commands train several times.
LONG = [
    f"docs/{page}.md"
    for page in (
        *("extending", "environments", "compare", "checklist", "replay", "several-processes", "distillation"),
        *("grpo", "reward-models", "from-verl", "dpo", "sampling"),
    )
]


@pytest.mark.parametrize(
    "page", [pytest.param(p, id=name(p), marks=pytest.mark.slow if name(p) in LONG else ()) for p in runnable]
)
def test_marked_commands_run(page: Path, tmp_path: Path, embedded: Path, tiny_folder: Path) -> None:
    shutil.copytree(embedded if name(page) in OF_ITS_SIZE else tiny_folder, tmp_path / "model")
    printed = ""
    for block in blocks(page):
        kind, _, file = block.mark.partition(": ")
        if kind == "file":
            (tmp_path / file).write_text(block.text, encoding="utf-8")
        elif kind == "run":
            done = subprocess.run(
                ["sh", "-eu", "-c", block.text],
                cwd=tmp_path,
                env={**os.environ, "PATH": search_path(), "COLUMNS": "80"},
                capture_output=True,
                text=True,
                check=False,
                timeout=HANG,
            )
            assert done.returncode == 0, done.stderr
            printed = done.stdout
        elif kind == "shows":
            assert_shows(printed, block.text)


def assert_shows(printed: str, wanted: str) -> None:
    lines = iter(printed.splitlines())
    for line in wanted.splitlines():
        pattern = ".*".join(re.escape(part) for part in line.split("..."))
        assert any(re.fullmatch(pattern, candidate) for candidate in lines), f"{line!r} is not in\n{printed}"


def test_the_life_of_a_sample_has_the_real_numbers(embedded: Path, tmp_path: Path) -> None:
    import torch

    from lockstep.algorithms.token_losses import nll
    from lockstep.data.batching import micro_batch
    from lockstep.data.dataset import Dataset, RowRequest, load_rows
    from lockstep.data.encode.sft_rows import SupervisedRows
    from lockstep.model.load import load_policy, load_tokenizer
    from lockstep.preflight.batch_plan import make_loader
    from lockstep.recipe import load_recipe

    page = ROOT / "docs" / "life-of-a-sample.md"
    files = {block.mark.removeprefix("file: "): block.text for block in blocks(page) if block.mark.startswith("file")}
    (tmp_path / "rows.jsonl").write_text(files["rows.jsonl"], encoding="utf-8")
    (tmp_path / "life.yaml").write_text(files["life.yaml"], encoding="utf-8")
    paths = [f"model.path={embedded}", f"data.train={tmp_path / 'rows.jsonl'}"]
    recipe = load_recipe(str(tmp_path / "life.yaml"), paths)
    data = load_rows(
        RowRequest(Dataset, SupervisedRows, recipe.data.train, recipe.data, load_tokenizer(str(embedded)), 256)
    )
    loader = make_loader(recipe, data)
    ours, other = loader.take(0)
    batch = micro_batch([other, ours], packed=True, pad_id=0)
    with torch.no_grad():
        logprobs = load_policy(recipe.model, torch.device("cpu"), "sdpa", seed=0)(batch).logprobs_K
    text = " ".join(page.read_text(encoding="utf-8").replace("**", "").split())
    ids = " ".join(map(str, ours.ids))
    assert ids in text
    assert (len(ours), ours.targets, len(other), other.targets) == (31, 7, 52, 18)
    counts = data.counts
    assert f"{counts.rows} rows, {counts.tokens} tokens, {counts.trained_tokens} trained" in text
    visited = [[example.origin.row for example in loader.take(step)] for step in range(3)]
    assert visited == [[1, 2], [3, 1], [3, 2]]
    assert batch.predictors_K.tolist() == [*range(32, 50), *range(74, 81)]
    assert " | ".join(f"{value:.3f}" for value in logprobs[-7:].tolist()) in text
    assert f"is {nll(logprobs).loss.item():.3f}" in text
    assert f"the row contributes {nll(logprobs[-7:]).loss.item():.3f}" in text
