"""Runs with an environment: rewards and metrics by turn, samples by speaker, validation, tape and replay, ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch

import lockstep
from conftest import question_rows, run, write_jsonl
from lockstep.functions import run_file
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import Mode
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.online import train_online
from runs import samples, stored

# A game of two or three turns. The reward of a turn counts letters of the model; the environment's own text has many
# letters, which must not count. Every call leaves a line in a file, so that a test sees whether the game was played.
GAME = """
from pathlib import Path
from lockstep.environments import Start, Turn

class Game:
    def __init__(self, calls):
        self.calls, self.turn, self.info = calls, 0, {}

    def _note(self, word):
        with Path(self.calls).open("a") as file:
            file.write(word + chr(10))

    def reset(self, row, seed):
        self._note("reset")
        self.last = 2 + seed % 2
        return Start([{"role": "user", "content": "say letters"}], anchor="start")

    def step(self, reply):
        self._note("step")
        self.turn += 1
        done = self.turn == self.last
        messages = [] if done else [{"role": "user", "content": "zyxwvutsrq again"}]
        reward = len(set(reply.text)) / 10
        return Turn(messages, reward, done, metrics={"success": float(done)}, anchor=f"turn {self.turn}")

    def score(self, trajectory):
        self.info = {"turns": len(trajectory.turns)}
        return {"long": 0.5 * (len(trajectory.turns) == 3), "score": 0.25}

    @classmethod
    def score_group(cls, trajectories):
        return [float(len(one.turns) == 3) for one in trajectories]
"""
REWARD = """
def spoken(data_source, solution_str, ground_truth, extra_info):
    assert "again" not in solution_str or "zyxwvutsrq" not in solution_str
    roles = [one["role"] for one in extra_info["messages"]]
    assert roles.count("assistant") == extra_info["info"]["turns"]
    return float(roles.count("user"))
"""


def write_recipe(folder: Path, model: Path, method: str = "grpo", **keys: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "game.py").write_text(GAME, encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = write_jsonl(folder / "train.jsonl", question_rows(12))
    values = {
        "method": method,
        "device": "cpu",
        "run": {"name": "run", "folder": str(folder / "runs"), "steps": 2, "export": False},
        "model": {"path": str(model)},
        "data": {"train": str(rows)},
        "optim": {"lr": 1e-3, "schedule": "constant"},
        "batch": {"prompts": 2, "tokens": 2048},
        "rollout": {
            "n": 1 if method == "ppo" else 2,
            "max_tokens": 200,
            "turn_tokens": 8,
            "environment": f"{folder}/game.py:Game",
            "environment_args": {"calls": str(folder / "calls.txt")},
            "environment_workers": 1,
        },
        "reward": {
            "function": f"{folder}/reward.py:spoken",
            "workers": 1,
            "weights": {"environment": 2.0, "score": 1.0, "group": 4.0, "function": 0.5},
        },
        **keys,
    }
    path = folder / "recipe.yaml"
    path.write_text(json.dumps(values), encoding="utf-8")
    return path


def train(recipe: Path) -> Path:
    settings = load_recipe(str(recipe), [])
    train_online(settings, Console.silent())
    return Path(settings.run.folder) / settings.run.name


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """A run with a tape, validation and credit per turn. Returns its folder."""
    folder = tmp_path_factory.mktemp("environment")
    val = write_jsonl(folder / "val.jsonl", question_rows(3))
    keys = {
        "val": {"questions": str(val), "every": 1, "max_new_tokens": 200},
        "algorithm": {"advantage": "gigpo", "turn_discount": 0.9},
        "tape": {"record": True},
        "log": {"samples": 8},
    }
    return train(write_recipe(folder, tiny_folder, **keys))


def test_rewards_and_metrics(recorded: Path) -> None:
    told = dict(read_metrics(recorded / "metrics.jsonl"))
    metrics = told[1]
    for name in ("environment", "score", "score/long", "group", "function"):
        assert f"reward/{name}/mean" in metrics
    assert metrics["reward/score/mean"] == 0.25
    assert 2.0 <= metrics["environment/turns"] <= 3.0
    assert {"environment/stop/completed", "environment/stop/max_tokens"} & metrics.keys()
    assert sum(value for name, value in metrics.items() if name.startswith("environment/stop/")) == 1.0
    assert metrics["val/success"] == 1.0
    assert 2.0 <= metrics["val/turns"] <= 3.0
    assert sum(value for name, value in metrics.items() if name.startswith("val/stop/")) == 1.0


def test_the_prompt_tokens_of_a_step_are_those_of_its_own_trajectories(recorded: Path) -> None:
    """Validation before the step is not counted: at most what is new in each conversation is computed."""
    tape = TapeFolder(recorded / "tape")
    rollouts = rollouts_of(tape.read_table(tape.rollouts_file(2)), TapeImages(tape.path))
    new = sum(len(one.prompt.ids) + list(one.loss_mask).count(0) for one in rollouts)
    assert 0 < dict(read_metrics(recorded / "metrics.jsonl"))[2]["rollout/prefill_tokens"] <= new


def test_the_score_is_the_weighted_sum_of_its_parts(recorded: Path) -> None:
    trained = [one for one in lines(recorded) if one["kind"] == "train"]
    assert trained
    for one in trained:
        parts = one["parts"]
        total = 2 * parts["environment"] + parts["score"] + 4 * parts["group"] + 0.5 * parts["function"]
        assert one["score"] == pytest.approx(total)
        turns = one["turns"]
        assert parts["environment"] == pytest.approx(sum(turn["reward"] for turn in turns))
        assert parts["group"] == float(len(turns) == 3)
        assert parts["function"] == len(turns), "one message of the user before each turn of the model"


def test_samples_have_the_conversation(recorded: Path) -> None:
    for one in lines(recorded):
        turns, spoken = one["turns"], [message for message in one["conversation"] if message["role"] == "assistant"]
        assert [message["turn"] for message in spoken] == list(range(len(turns)))
        assert "zyxwvutsrq" not in one["response"]
        assert sum("zyxwvutsrq" in message["content"] for message in one["conversation"]) == len(turns) - 1
        if "token_details" not in one:
            continue
        logprobs = one["token_details"]["logprobs"]
        assert all(value is not None for turn in turns for value in logprobs[turn["start"] : turn["stop"]])
        # What the game wrote is not trained.
        assert sum(value is not None for value in logprobs) == sum(turn["stop"] - turn["start"] for turn in turns)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["forced", "chained"])
def test_a_replay_uses_the_recorded_observations(recorded: Path, mode: Mode) -> None:
    """The game is not played again. A forced replay generates the turns of the model after the recorded observations,
    and they are the recorded turns."""
    tape = TapeFolder(recorded / "tape")
    rollouts = rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path))
    for one in rollouts:
        assert one.trajectory is not None
        assert sum(one.loss_mask) == sum(turn.stop - turn.start for turn in one.trajectory.turns)
        assert one.trajectory.info == {"turns": len(one.trajectory.turns)}
    calls = recorded.parent.parent / "calls.txt"
    before = calls.read_text()
    found = replay(recorded, mode, [], Console.silent())
    assert calls.read_text() == before
    assert found is not None
    assert found.in_step, found.cause or found.module
    checks = {check.stage: check for check in found.checks}
    assert {"reward", "advantages", "loss", "weights"} <= checks.keys()
    if mode == "forced":
        assert "0 of 4 responses diverge" in checks["generation"].what


@pytest.mark.slow
def test_a_forced_replay_after_dynamic_sampling(tiny_folder: Path, tmp_path: Path) -> None:
    """Dynamic sampling replaces groups whose trajectories have equal scores. The turns of the prompts that remain are
    sampled again with the noise of their own prompts."""
    keys = {
        "run": {"name": "run", "folder": str(tmp_path / "runs"), "steps": 1, "seed": 1, "export": False},
        "algorithm": {"dynamic_sampling": {"max_gen_batches": 3}},
        "reward": {"weights": {"environment": 0.0, "score": 0.0, "group": 1.0}},
        "tape": {"record": True},
    }
    done = train(write_recipe(tmp_path, tiny_folder, **keys))
    assert dict(read_metrics(done / "metrics.jsonl"))[1]["train/uniform_groups"] > 0, "no prompt was replaced"
    found = replay(done, "forced", [], Console.silent())
    assert found is not None
    checks = {check.stage: check for check in found.checks}
    assert "0 of 4 responses diverge" in checks["generation"].what


@pytest.mark.slow
def test_eval_and_sample_play(recorded: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """`lockstep eval` reports success and turns, and `lockstep sample` stores conversations; both end their hosts."""
    folder = recorded.parent.parent
    calls = tmp_path / "calls.txt"
    words = ["--environment", f"{folder}/game.py:Game", "--environment-arg", f"calls={calls}", "--device", "cpu"]
    out = tmp_path / "eval.jsonl"
    data = folder / "val.jsonl"
    assert run("eval", tiny_folder, data, *words, "--max-new-tokens", 60, "--out", out) == 0
    told = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(told) == 3
    for one in told:
        assert one["environment_stop"] == "completed" or one["stop"] == "length"
        assert {"environment", "score", "group"} <= one["parts"].keys()
        assert one["score"] == pytest.approx(sum(one["parts"][name] for name in ("environment", "score", "group")))
    assert calls.read_text().count("reset") == 3
    sampled = tmp_path / "samples.parquet"
    assert run("sample", tiny_folder, data, sampled, "-n", 2, *words, "--max-new-tokens", 60) == 0
    rows = pq.read_table(sampled).to_pylist()
    assert len(rows) == 6
    for row in rows:
        turns = json.loads(row["conversation"])["turns"]
        assert json.loads(row["rewards"])["environment"] == pytest.approx(sum(turn["reward"] for turn in turns))
    assert run("pairs", sampled, tmp_path / "pairs.jsonl", "--kind", "pairs") == 2


def test_options_that_do_not_fit_are_refused(tiny_folder: Path, recorded: Path, capsys: Any) -> None:
    data = recorded.parent.parent / "val.jsonl"
    assert run("eval", tiny_folder, data, "--max-turns", 3, "--device", "cpu") == 2
    assert "--max-turns" in capsys.readouterr().err
    assert run("eval", tiny_folder, data, "--environment", "nowhere.py:Game", "--device", "cpu") == 2
    assert "--environment" in capsys.readouterr().err


@pytest.mark.slow
def test_a_class_as_environment(recorded: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """`lockstep.train(recipe, rollout={"environment": Game})` is the same run as with the class as a path."""
    file = write_recipe(tmp_path, tiny_folder)
    game = run_file(tmp_path / "game.py").Game
    first = lockstep.train(file, **{"run.name": "path", "run.steps": 1})
    second = lockstep.train(file, **{"run.name": "class", "run.steps": 1, "rollout.environment": game})
    assert samples(first) == samples(second)
    with pytest.raises(lockstep.Refusal, match="each trajectory needs its own object"):
        lockstep.train(file, **{"run.name": "object", "rollout.environment": game(tmp_path / "calls.txt")})

    class Local(game):
        pass

    with pytest.raises(lockstep.Refusal, match="put the class into a file"):
        lockstep.train(file, **{"run.name": "local", "rollout.environment": Local})


# A template that renders earlier turns of the model differently from the turn that it sampled.
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


@pytest.mark.slow
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_trajectories_of_several_rows(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    """Each turn of the game is a row of its own. The trainer computes the log-probs of the engine for every turn, and a
    replay generates the same turns."""
    (tmp_path / "changed.jinja").write_text(CHANGED, encoding="utf-8")
    file = write_recipe(tmp_path, tiny_folder, method, tape={"record": True})
    values = json.loads(file.read_text())
    values["data"]["template"] = str(tmp_path / "changed.jinja")
    values["rollout"] |= {"history": "as_template", "max_tokens": 300}
    if method == "ppo":  # a group of one response has no group reward
        values["reward"] = {"weights": {"environment": 1.0}}
    file.write_text(json.dumps(values), encoding="utf-8")
    done = train(file)
    tape = TapeFolder(done / "tape")
    for one in rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path)):
        assert one.trajectory is not None
        assert len(one.rows) == len(one.trajectory.turns) >= 2
        for turn in one.trajectory.turns:
            assert all(one.loss_mask[turn.start : turn.stop])
        assert sum(one.loss_mask) == sum(turn.stop - turn.start for turn in one.trajectory.turns)
    metrics = dict(read_metrics(done / "metrics.jsonl"))[1]
    assert metrics["training/rollout_probs_diff_max"] < 1e-5
    found = replay(done, "forced", [], Console.silent())
    assert found is not None
    assert found.in_step, found.cause or found.module
    assert [check.what for check in found.checks if check.stage == "generation" and "(0 of" not in check.what] == []


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run(tiny_folder: Path, tmp_path: Path) -> None:
    """Bit by bit, because the environment is deterministic."""
    file = write_recipe(tmp_path, tiny_folder, algorithm={"advantage": "gigpo", "turn_discount": 0.9})
    whole = lockstep.train(file, **{"run.name": "whole"})
    lockstep.train(file, **{"run.name": "parts", "run.steps": 1})
    parts = lockstep.train(file, **{"run.name": "parts"})
    assert samples(parts) == samples(whole)
    one, other = stored(parts, 2), stored(whole, 2)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
