"""`bench/gsm8k_tools.py`: its prompts and recipes, and with the tiny model the whole measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from hang import HANG
from lockstep.data.prepare.agent_rows import TEMPLATE
from lockstep.recipe import load_recipe
from lockstep.reward.rules import rule_for

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))

gsm8k_tools: Any = import_module("gsm8k_tools")


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """Rows in the form of GSM8K."""
    for split, count in (("train", 4), ("test", 8)):
        rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(count)]
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return tmp_path


def arguments(monkeypatch: pytest.MonkeyPatch, *words: str) -> object:
    monkeypatch.setattr(sys, "argv", ["gsm8k_tools.py", *words])
    return gsm8k_tools._arguments()


@pytest.mark.parametrize("side", ["plain", "python"])
def test_both_sides_ask_the_same_questions(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side: str
) -> None:
    args = arguments(monkeypatch, "coder", str(raw), "optim.lr=1e-6", "--side", side, "--rows", "8", "--device", "cpu")
    folder = tmp_path / "made"
    gsm8k_tools.write_questions(folder, args)
    rows = [json.loads(line) for line in (folder / "test.jsonl").read_text().splitlines()]
    assert [row["reward_model"]["ground_truth"] for row in rows] == [str(n + 1) for n in range(8)]
    *shots, asked = rows[3]["prompt"]
    assert asked["content"].startswith("What is 3 + 1? ")
    # The solved example is right.
    truth = str(eval(gsm8k_tools.CODE.removeprefix("print")))
    assert rule_for("openai/gsm8k")(shots[-1]["content"], truth) == 1
    assert [shot["content"] for shot in shots if shot["role"] == "tool"] == ([] if side == "plain" else [truth])
    recipe = load_recipe("grpo-gsm8k-lora", gsm8k_tools.recipe_words(folder, args))
    assert (recipe.rollout.tools, recipe.optim.lr, recipe.model.lora) == (
        [] if side == "plain" else ["python"],
        1e-6,
        None,
    )


@pytest.mark.slow
@pytest.mark.parametrize("side", ["plain", "python"])
def test_the_whole_measurement(raw: Path, tmp_path: Path, tiny_folder: Path, side: str) -> None:
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    words = [f"--side={side}", "--steps=1", "--prompts=2", "--n=2", "--rows=8", "--max-tokens=16", "--workers=1"]
    words += ["--device=cpu", "--dtype=fp32", f"--out={tmp_path / 'result.json'}"]
    command = [sys.executable, BENCH / "gsm8k_tools.py", tiny_folder, raw, *words]
    keys = [f"data.template={tmp_path / 'template.jinja'}"]
    subprocess.run([*command, *keys], check=True, timeout=2 * HANG, cwd=tmp_path)
    record = json.loads((tmp_path / "result.json").read_text())
    assert set(record["before"]) == set(record["after"]) >= {"accuracy", "answered"}
    assert ("tool_calls" in record["after"]) == ("isolation" in record) == (side == "python")
