"""Trajectories of several rows (`rollout.history: as_template`) with on-policy distillation, asynchronous training and
a serving engine: the trainer computes the log-probs that the engine had for every row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conftest import question_rows, write_jsonl
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.run.metrics import read_metrics
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.start import train
from lockstep.types import Rollout
from sglang_server import Server, serving

# Two or three turns. The template renders earlier turns differently, so every turn has a row of its own.
GAME = """
from lockstep.environments import Start, Turn

class Game:
    def reset(self, row, seed):
        self.turn, self.last = 0, 2 + seed % 2
        return Start([{"role": "user", "content": "say letters"}])

    def step(self, reply):
        self.turn += 1
        done = self.turn == self.last
        messages = [] if done else [{"role": "user", "content": "again"}]
        return Turn(messages, len(set(reply.text)) / 10, done)
"""
CHANGED = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' and not loop.last -%}
{{ '<|im_start|>assistant\\n(earlier) ' + message.content + '<|im_end|>\\n' }}
{%- else -%}
{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


def trained(folder: Path, model: Path, *more: str, **keys: Any) -> tuple[dict[int, dict[str, float]], list[Rollout]]:
    """Trains two steps. Returns the metrics by step, and the rollouts of the first step."""
    (folder / "game.py").write_text(GAME, encoding="utf-8")
    (folder / "changed.jinja").write_text(CHANGED, encoding="utf-8")
    values = {
        "method": "grpo",
        "device": "cpu",
        "run": {"name": "run", "folder": str(folder / "runs"), "steps": 2, "export": False},
        "model": {"path": str(model)},
        "data": {
            "train": str(write_jsonl(folder / "train.jsonl", question_rows(12))),
            "template": str(folder / "changed.jinja"),
        },
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "batch": {"prompts": 2, "tokens": 2048},
        "rollout": {
            "n": 2,
            "max_tokens": 300,
            "turn_tokens": 8,
            "environment": f"{folder}/game.py:Game",
            "environment_workers": 1,
            "history": "as_template",
        },
        "tape": {"record": True},
        **keys,
    }
    recipe = folder / "recipe.yaml"
    recipe.write_text(json.dumps(values), encoding="utf-8")
    train(load_recipe(str(recipe), list(more)))
    done = folder / "runs" / "run"
    tape = TapeFolder(done / "tape")
    rollouts = rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path))
    return dict(read_metrics(done / "metrics.jsonl")), rollouts


def check(steps: dict[int, dict[str, float]], rollouts: list[Rollout], *, stale: bool = False) -> None:
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        assert metrics["environment/rows"] == metrics["environment/turns"] >= 2
        assert metrics["reward/failed"] == 0
        assert metrics["actor/grad_norm"] > 0
        if not stale:  # stale tokens have the log-probs of older weights
            assert metrics["training/rollout_probs_diff_max"] < 1e-5
    assert steps[1]["training/rollout_probs_diff_max"] < 1e-5
    for one in rollouts:
        assert one.trajectory is not None
        assert len(one.rows) == len(one.trajectory.turns) >= 2
        assert sum(one.loss_mask) == sum(turn.stop - turn.start for turn in one.trajectory.turns)
        for row in one.rows:
            assert sum(row.loss_mask) > 0


@pytest.mark.slow
def test_on_policy_distillation(tiny_folder: Path, tmp_path: Path) -> None:
    """The teacher scores every row behind the prompt that the student saw. A student that is its own teacher has
    nothing to learn, so the divergence is 0 if the rows of student and teacher are the same tokens."""
    write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=1)
    words = ("method=on_policy_distill", "rollout.n=2")
    steps, rollouts = trained(tmp_path, tiny_folder, *words, f"algorithm.kl.reference={tmp_path / 'teacher'}")
    check(steps, rollouts)
    assert steps[1]["actor/reward_kl_penalty"] > 0.01
    own = tmp_path / "own"
    own.mkdir()
    steps, _ = trained(own, tiny_folder, *words, f"algorithm.kl.reference={tiny_folder}", "run.steps=1")
    assert steps[1]["actor/reward_kl_penalty"] == pytest.approx(0.0, abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_asynchronous_training(tiny_folder: Path, tmp_path: Path, staleness: int) -> None:
    steps, rollouts = trained(tmp_path, tiny_folder, f"rollout.max_staleness={staleness}")
    check(steps, rollouts, stale=staleness > 0)
    for one in rollouts:
        assert len(one.versions) == len(one.ids)


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with serving(tiny_folder, "--enable-deterministic-inference", "--dtype", "float32") as server:
        yield server


@pytest.mark.slow
def test_a_server(tiny_folder: Path, tmp_path: Path, server: Server) -> None:
    steps, rollouts = trained(tmp_path, tiny_folder, "rollout.engine=sglang", f"rollout.url={server.url}")
    check(steps, rollouts)
