"""Runs whose updates change nothing: they warn, name the cause, and stop with a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commands import torchrun
from conftest import write_jsonl
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.online_async import train_online_async
from lockstep.train.start import run_recipe
from refusals import refuses

# A random model never satisfies the rule, so that all rewards are equal.
EQUAL = ["reward={}", "run.export=false", "algorithm.kl.where=none"]


class Heard(Console):
    """A console that keeps the warnings."""

    def __init__(self) -> None:
        silent = Console.silent()
        self.__dict__.update(silent.__dict__)
        self.warnings: list[str] = []

    def warn(self, text: str) -> None:
        self.warnings.append(text)


def train(monkeypatch: pytest.MonkeyPatch, file: Path, *words: str) -> list[str]:
    """Train with the loop that the recipe asks for; the warnings of the run."""
    heard = Heard()
    monkeypatch.setattr("lockstep.train.start.Console.open", lambda *args, **named: heard)
    try:
        run_recipe(load_recipe(str(file), list(words)))
    finally:
        train.warnings = heard.warnings  # type: ignore[attr-defined]
    return heard.warnings


def refused(monkeypatch: pytest.MonkeyPatch, file: Path, *words: str) -> tuple[str, str]:
    """Why the run stopped, and the remedy."""
    with pytest.raises(Refusal) as stopped:
        train(monkeypatch, file, *words)
    (problem,) = stopped.value.problems
    assert problem.where == "run.max_idle_updates"
    return problem.why, problem.remedy


def idle_warnings() -> list[str]:
    return [one for one in train.warnings if "trains nothing" in one]  # type: ignore[attr-defined]


def gradients(run: Path, name: str = "actor") -> list[float]:
    return [metrics[f"{name}/grad_norm"] for _, metrics in read_metrics(run / "metrics.jsonl")]


def test_the_default_is_ten_and_can_be_switched_off(online_file: Path) -> None:
    assert load_recipe(str(online_file), []).run.max_idle_updates == 10
    assert load_recipe(str(online_file), ["run.max_idle_updates=null"]).run.max_idle_updates is None


def test_equal_rewards_stop_an_online_run_with_a_checkpoint(
    online_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*EQUAL, "run.steps=20", "run.max_idle_updates=3", "algorithm.epochs=2"]
    why, remedy = refused(monkeypatch, online_file, *words)
    assert "last 3 steps" in why
    assert "every advantage is zero" in why
    assert "same reward (mean 0)" in why
    assert "samples.jsonl" in remedy
    assert "a worked example in the prompts" in remedy
    assert "run.max_idle_updates=0" in remedy
    (warning,) = idle_warnings()
    assert re.search(r"after 3 .*\(run.max_idle_updates\)", warning)
    run = tmp_path / "runs" / "run"
    assert gradients(run) == [0.0, 0.0, 0.0]
    assert (run / "checkpoints" / "step_3" / "state.json").is_file()
    # The same run continues where the limit is off.
    train(monkeypatch, online_file, *words, "run.steps=5", "run.max_idle_updates=0")
    assert len(gradients(run)) == 5


def test_a_divergence_alone_does_not_hide_equal_rewards(online_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kl = ["algorithm.kl.where=loss", "algorithm.entropy=0.01"]
    why, _ = refused(monkeypatch, online_file, *EQUAL, *kl, "run.steps=4", "run.max_idle_updates=2")
    assert "earned the same reward" in why


@pytest.mark.slow
def test_dynamic_sampling_that_finds_nothing_is_idle_too(online_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        *EQUAL,
        "method=dapo",
        "algorithm.dynamic_sampling.max_gen_batches=2",
        "run.steps=4",
        "run.max_idle_updates=2",
    ]
    assert "earned the same reward" in refused(monkeypatch, online_file, *words)[0]


def test_responses_that_are_all_truncated_and_skipped_stop_the_run(
    online_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["rollout.max_tokens=1", "algorithm.overlong.mask_truncated=true", "run.steps=4", "run.max_idle_updates=2"]
    why, remedy = refused(monkeypatch, online_file, "run.export=false", *words)
    assert "every response is truncated" in why
    assert "algorithm.overlong.mask_truncated" in why
    assert "raise rollout.max_tokens" in remedy


TURNS = '''
def short_turns(prompt, generate):
    """Two turns of at most 4 tokens each, well below rollout.max_tokens=12."""
    first = generate(prompt.ids, max_tokens=4)
    second = generate([*prompt.ids, *first.ids], max_tokens=4)
    ids = first.ids + second.ids
    return ids, [1] * len(ids)
'''


@pytest.mark.slow
def test_short_turns_are_not_skipped_as_truncated(
    online_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "turns.py").write_text(TURNS, encoding="utf-8")
    function = f"rollout.function={tmp_path / 'turns.py'}:short_turns"
    train(
        monkeypatch, online_file, function, "algorithm.overlong.mask_truncated=true", "run.steps=2", "run.export=false"
    )
    run = tmp_path / "runs" / "run"
    assert all(norm > 0 for norm in gradients(run))
    for _, metrics in read_metrics(run / "metrics.jsonl"):
        assert metrics["response/skipped_ratio"] == metrics["response_length/clip_ratio"] == 0.0


@pytest.mark.slow
def test_a_learning_rate_of_nothing_and_a_warm_critic_are_not_idle(
    online_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["run.steps=3", "run.max_idle_updates=1", "run.export=false", "optim.lr=1e-30", "optim.warmup=2"]
    assert train(monkeypatch, online_file, *words) is not None
    assert idle_warnings() == []
    train(monkeypatch, online_file, "method=ppo", "rollout.n=1", "critic.warmup=2", "run.name=ppo", *words)
    assert idle_warnings() == []


@pytest.mark.slow
def test_a_useful_step_starts_the_count_again(
    online_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two idle steps, a useful one, two idle ones: never three in a row."""
    (tmp_path / "by_row.py").write_text(
        "def reward(data_source, solution_str, ground_truth, extra_info):\n"
        "    useful = 8 <= extra_info['index'] < 12\n"
        "    return len(set(solution_str)) / 20 if useful or not solution_str else 0.5\n",
        encoding="utf-8",
    )
    words = [f"reward.function={tmp_path / 'by_row.py'}:reward", "run.steps=5", "run.max_idle_updates=3"]
    train(monkeypatch, online_file, *words, "data.shuffle=false", "run.export=false", "algorithm.kl.where=none")
    assert [norm > 0 for norm in gradients(tmp_path / "runs" / "run")] == [False, False, True, False, False]
    assert len(idle_warnings()) == 1


def test_an_offline_run_whose_loss_is_flat_stops(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one order of a pair the chosen response is the likelier one: there a sigmoid this steep is flat."""
    stopped: dict[str, str] = {}
    for name, (chosen, rejected) in {"one": ("yes", "no way"), "other": ("no way", "yes")}.items():
        rows = write_jsonl(tmp_path / f"{name}.jsonl", [{"prompt": "a?", "chosen": chosen, "rejected": rejected}] * 4)
        words = ["method=dpo", f"data.train={rows}", "data.val=[]", "preference.loss=simpo", "preference.beta=1e7"]
        words += ["run.steps=4", f"run.name={name}", "run.max_idle_updates=2", "batch.rows_per_update=1"]
        try:
            train(monkeypatch, recipe_file, *words, "run.export=false", "optim.lr=1e-12")
        except Refusal as refusal:
            stopped[name] = str(refusal)
    ((flat, said),) = stopped.items()
    assert "[idle-updates]" in said
    assert "gradient of the loss is exactly zero" in said
    assert gradients(tmp_path / "runs" / flat, "train") == [0.0, 0.0]
    steep = {"one": "other", "other": "one"}[flat]
    assert all(norm > 0 for norm in gradients(tmp_path / "runs" / steep, "train"))


@pytest.mark.slow
@pytest.mark.torchrun
def test_every_rank_stops_at_once(online_file: Path, tmp_path: Path) -> None:
    done = torchrun("train", online_file, *EQUAL, "run.steps=9", "run.max_idle_updates=2")
    assert done.returncode != 0
    assert (done.stdout + done.stderr).count("run.max_idle_updates [idle-updates]") >= 1
    assert (tmp_path / "runs" / "run" / "checkpoints" / "step_2").is_dir()
    assert not (tmp_path / "runs" / "run" / "checkpoints" / "step_3").exists()


@pytest.mark.slow
def test_an_asynchronous_run_stops_too(online_file: Path) -> None:
    words = [*EQUAL, "run.steps=9", "run.max_idle_updates=2", "rollout.max_staleness=1"]
    with refuses("run.max_idle_updates", "idle-updates", "every advantage is zero"):
        train_online_async(load_recipe(str(online_file), words), Console.silent())
