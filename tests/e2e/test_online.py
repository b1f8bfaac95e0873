"""The online loop as a whole: methods, invariances, failures of rewards, kills and several processes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import lockstep, torchrun
from conftest import question_rows, write_jsonl, write_online_recipe
from kills import Moment, interrupted, killed, lines
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import LOSSES, loss_row
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.online import train_online
from runs import close, facts, stored


def train(recipe: Path, *overrides: str) -> None:
    train_online(load_recipe(str(recipe), ["run.export=false", *overrides]), Console.silent())


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [metrics for _, metrics in read_metrics(run / "metrics.jsonl")]


def samples_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def weights_of(run: Path, step: int = 4, part: str = "weights") -> Mapping[str, torch.Tensor]:
    return stored(run, step, part)


@pytest.mark.daily("ppo", "grpo", "reinforce_pp", "gspo", "dapo", "on_policy_distill")
@pytest.mark.parametrize("method", ONLINE)
def test_every_method_trains_with_finite_numbers(online_file: Path, tmp_path: Path, method: str) -> None:
    words = [f"method={method}", "algorithm.overlong.buffer=4", "algorithm.entropy=0.01"]
    if method == "on_policy_distill":
        write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=1)
        words.append(f"algorithm.kl.reference={tmp_path / 'teacher'}")
    grouped = "rollout.n=3" if load_recipe(str(online_file), words).rollout.n > 1 else "rollout.n=1"
    exported = method in ("grpo", "ppo")
    train(online_file, "run.steps=2", f"run.export={exported}", grouped, *words)
    run = tmp_path / "runs" / "run"
    for metrics in metrics_of(run):
        assert all(math.isfinite(value) for value in metrics.values())
        assert metrics["training/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/grad_norm"] > 0
    (stored, *_) = samples_of(run)
    assert stored["kind"] == "train"
    assert {"function", "overlong"} <= set(stored["parts"])
    tokens = stored["token_details"]
    assert len(tokens["texts"]) == len(tokens["logprobs"]) == stored["tokens"]
    assert all(value <= 0 for value in tokens["logprobs"])
    told = tokens.get("advantages", [stored["advantage"]] * stored["tokens"])
    assert (len(told), told[0]) == (stored["tokens"], pytest.approx(stored["advantage"], rel=1e-3))
    assert (run / "export" / "model.safetensors").is_file() == exported


@pytest.mark.daily("clip", "clip_cov")
@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("dppo_tv", "dro", "importance")])
def test_every_loss_trains_with_as_many_updates_a_step_as_it_may(online_file: Path, tmp_path: Path, loss: str) -> None:
    several = [] if not loss_row(loss).ratio else ["algorithm.epochs=2", "batch.prompts_per_update=2"]
    train(online_file, f"algorithm.loss={loss}", "run.steps=2", *several)
    assert all(math.isfinite(value) for metrics in metrics_of(tmp_path / "runs" / "run") for value in metrics.values())


PEERS = {
    "token baseline": ["algorithm.advantage=optimal_token_baseline", "algorithm.rollout_correction.weight=token"],
    "bypass": [
        "algorithm.rollout_correction.bypass=true",
        "algorithm.rollout_correction.reject=[{over: mean, by: k3, high: 1.0}, {by: ratio, low: 0.5, high: 2.0}]",
        "algorithm.loss=importance",
        "algorithm.ratio_of=sequence",
        "algorithm.aggregation=token_sum",
        "algorithm.overlong.mask_truncated=true",
        "batch.prompts_per_update=2",
        "optim.lr=1e-5",
    ],
    "pf_ppo": ["method=ppo", "rollout.n=2", "algorithm.pf_ppo.method=max_random"],
    "gdpo": [
        "algorithm.advantage=gdpo",
        "algorithm.kl={where: loss, estimator: k3+, weighted: true}",
        "algorithm.epochs=2",
        "algorithm.dynamic_sampling={max_gen_batches: 2, metric: function}",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
def test_algorithms_of_the_peers_learn_the_same_however_a_step_is_cut(
    online_file: Path, tmp_path: Path, name: str
) -> None:
    cuts = {"packed": "batch={tokens: 4096}", "padded": "batch={tokens: null, micro_batch_size: 1}"}
    runs = {}
    for cut, words in cuts.items():
        train(online_file, f"run.name={cut}", "run.steps=2", words, *PEERS[name])
        runs[cut] = metrics_of(tmp_path / "runs" / cut)
    assert len(runs["packed"]) == 2
    for ours, theirs in zip(*runs.values(), strict=True):
        assert ours["actor/grad_norm"] > 0
        for key in ("actor/loss", "actor/grad_norm", "critic/advantages/max", "critic/score/mean"):
            assert math.isfinite(ours[key])
            assert theirs[key] == pytest.approx(ours[key], rel=1e-3, abs=1e-5), key


class Heard(Console):
    """What a run says, in its order."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def warn(self, text: str) -> None:
        self.said.append(text)

    def step(self, step: int, metrics: dict[str, float]) -> None:
        self.said.append(f"step {step}")


def test_what_to_expect_of_the_rewards_is_said_before_the_first_step(online_file: Path, tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text("def short(**given): return -len(given['solution_str'])\n", encoding="utf-8")
    words, heard = [f"reward.function={tmp_path / 'reward.py'}:short", "run.steps=1"], Heard()
    train_online(load_recipe(str(online_file), words), heard)
    assert "empty answer scores higher than a right one" in heard.said[0]
    assert heard.said.index("step 1") > 0


def test_a_student_that_follows_its_teacher_alone_has_no_rewards_that_could_be_equal(
    online_file: Path, tmp_path: Path
) -> None:
    write_tiny(tmp_path / "teacher", hidden=64, layers=2, seed=1)
    words = ["method=on_policy_distill", "rollout.n=3", f"algorithm.kl.reference={tmp_path / 'teacher'}"]
    heard = Heard()
    train_online(load_recipe(str(online_file), [*words, "reward.function=null", "run.steps=1"]), heard)
    assert heard.said[-1] == "step 1"
    assert not any("the same reward" in line for line in heard.said)


def same_run(a: Path, b: Path, step: int = 4) -> None:
    """The same responses and rewards exactly; losses and weights up to rounding."""
    assert [s["response"] for s in samples_of(a)] == [s["response"] for s in samples_of(b)]
    assert [s["score"] for s in samples_of(a)] == [s["score"] for s in samples_of(b)]
    for one, two in zip(metrics_of(a), metrics_of(b), strict=True):
        for name in ("critic/rewards/mean", "actor/pg_loss", "actor/grad_norm", "actor/entropy", "actor/kl_loss"):
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert close(weights_of(a, step), weights_of(b, step))


SEVERAL_UPDATES = ["log.samples=99", "algorithm.epochs=2", "batch.prompts_per_update=2", "run.steps=2"]


SMALL_CACHE = ["rollout.block_tokens=4", "rollout.cache_gb=0.00004"]


@pytest.fixture(scope="module")
def several_updates(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("several-updates")
    train(write_online_recipe(folder, tiny_folder), *SEVERAL_UPDATES)
    return folder / "runs" / "run"


@pytest.mark.parametrize(
    "other",
    [
        # Every day all of them at once; one by one they tell which it was.
        ["batch.tokens=96", "rollout.max_sequences=2", "rollout.prefill_tokens=5", *SMALL_CACHE, "reward.workers=3"],
        # Also of invariance/test_recipes.py.
        pytest.param(["batch.tokens=null", "batch.micro_batch_size=5", "rollout.engine=hf"], marks=pytest.mark.slow),
        pytest.param(["batch.tokens=96"], marks=pytest.mark.slow),
        pytest.param(["batch.tokens=null", "batch.micro_batch_size=5"], marks=pytest.mark.slow),
        pytest.param(["rollout.max_sequences=2"], marks=pytest.mark.slow),
        pytest.param(["rollout.prefill_tokens=5", "rollout.block_tokens=4"], marks=pytest.mark.slow),
        pytest.param(SMALL_CACHE, marks=pytest.mark.slow),
        pytest.param(["rollout.engine=hf"], marks=pytest.mark.slow),
        pytest.param(["reward.workers=3"], marks=pytest.mark.slow),
    ],
    ids=lambda words: " ".join(words),
)
@pytest.mark.xdist_group("several updates")
def test_limits_and_engine_change_nothing(
    several_updates: Path, online_file: Path, tmp_path: Path, other: list[str]
) -> None:
    """fp32: samples and rewards are equal, weights within 1e-5."""
    train(online_file, *SEVERAL_UPDATES, *other)
    same_run(several_updates, tmp_path / "runs" / "run", step=2)


@pytest.mark.slow
def test_one_update_a_step_needs_no_old_log_probabilities(online_file: Path, tmp_path: Path) -> None:
    """Detached current ones are the old ones: forcing the extra pass changes nothing, and costs its time."""
    train(online_file, "run.name=a")
    # A correction that corrects nothing asks for them.
    train(online_file, "run.name=b", "algorithm.rollout_correction.mask=token", "algorithm.rollout_correction.low=1e-6")
    a, b = tmp_path / "runs" / "a", tmp_path / "runs" / "b"
    same_run(a, b)
    assert "timing_s/old_log_prob" not in metrics_of(a)[0]
    assert "timing_s/old_log_prob" in metrics_of(b)[0]
    assert metrics_of(b)[0]["rollout_corr/masked_share"] == 0.0


def test_the_first_update_of_a_step_is_exactly_on_policy(online_file: Path, tmp_path: Path) -> None:
    """Old and new log-probabilities come from the same micro-batches: no ratio but 1, whatever the packing."""
    train(online_file, "batch.prompts_per_update=4", "algorithm.epochs=2", "run.steps=1", "optim.lr=1e-30")
    (metrics,) = metrics_of(tmp_path / "runs" / "run")
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_lora_takes_the_policy_without_its_adapter_as_reference(online_file: Path, tmp_path: Path) -> None:
    train(online_file, "run.name=lora", "model.lora.rank=4", "optim.lr=1e-2", "algorithm.kl.coefficient=0.1")
    history = metrics_of(tmp_path / "runs" / "lora")
    # A fresh adapter changes nothing, so the divergence starts at 0 and grows with the first update.
    assert history[0]["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert history[1]["actor/kl_loss"] > 1e-6


@pytest.mark.slow
def test_the_divergence_in_the_reward_is_taken_off_it(online_file: Path, tmp_path: Path) -> None:
    train(online_file, "algorithm.kl.where=reward", "algorithm.kl.estimator=k2", "algorithm.kl.coefficient=0.5")
    for metrics in metrics_of(tmp_path / "runs" / "run"):
        lost = metrics["critic/score/mean"] - metrics["critic/rewards/mean"]
        penalty = 0.5 * metrics["actor/reward_kl_penalty"] * metrics["response_length/mean"]
        assert lost == pytest.approx(penalty, rel=1e-4, abs=1e-9)


@pytest.mark.slow
def test_the_coefficient_adapts_to_its_target(online_file: Path, tmp_path: Path) -> None:
    """Far over the target each step multiplies by 1 + 0.2 x sequences / horizon."""
    words = ["algorithm.kl.target=1e-9", "algorithm.kl.horizon=12", "algorithm.kl.coefficient=0.1", "optim.lr=1e-2"]
    train(online_file, *words)
    used = [metrics["actor/kl_coef"] for metrics in metrics_of(tmp_path / "runs" / "run")]
    # The first step measures a divergence of 0, far under the target.
    assert used == pytest.approx([0.1, 0.1 * 0.8, 0.1 * 0.8 * 1.2, 0.1 * 0.8 * 1.2**2])


def test_failed_rewards_are_counted_and_left_out(online_file: Path, tmp_path: Path) -> None:
    function = f"reward.function={tmp_path / 'reward.py'}:picky"
    train(online_file, function, "reward.max_failures=0.9", "log.samples=99", "run.steps=2")
    run = tmp_path / "runs" / "run"
    lines = samples_of(run)
    failed = [line for line in lines if line["kind"] == "failed"]
    scored = [line for line in lines if line["kind"] == "train"]
    assert failed, "the rows must hold responses that cannot be judged"
    assert all("cannot judge this" in str(line["failure"]) and line["score"] is None for line in failed)
    assert sum(metrics["reward/failed"] for metrics in metrics_of(run)) == len(failed)
    for step in (1, 2):
        scores = [line["score"] for line in scored if line["step"] == step]
        assert len(scores) == 12 - len([line for line in failed if line["step"] == step])
        assert metrics_of(run)[step - 1]["critic/score/mean"] == pytest.approx(sum(scores) / len(scores))  # type: ignore[arg-type]


def test_a_failed_reward_is_shown_with_its_sample(online_file: Path, tmp_path: Path) -> None:
    function = f"reward.function={tmp_path / 'reward.py'}:picky"
    done = lockstep("train", online_file, function, "reward.max_failures=0.9", "run.steps=2")
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert "responses could not be scored" in said
    assert "function: ValueError: cannot judge this" in said


def test_too_many_failed_rewards_stop_the_run(online_file: Path, tmp_path: Path) -> None:
    function = f"reward.function={tmp_path / 'reward.py'}:picky"
    with pytest.raises(Refusal) as refused:
        train(online_file, function, "reward.max_failures=0.01")
    assert "cannot judge this" in str(refused.value)
    assert "reward.max_failures" in str(refused.value)


def test_dynamic_sampling_replaces_groups_that_agree(online_file: Path, tmp_path: Path) -> None:
    """A rule that a random model never satisfies: all groups agree, the rounds are used up and the step is filled."""
    train(
        online_file,
        "method=dapo",
        "reward={}",
        "algorithm.dynamic_sampling.max_gen_batches=3",
        "run.steps=2",
    )
    for metrics in metrics_of(tmp_path / "runs" / "run"):
        assert metrics["train/num_gen_batches"] == 3
        assert metrics["train/uniform_groups"] == 12
        assert metrics["train/filled_groups"] == 4
        assert metrics["critic/mixed_groups"] == 0
    state = json.loads((tmp_path / "runs" / "run" / "checkpoints" / "step_2" / "state.json").read_text())
    assert state["carried"]["position"] == 24


def test_engine_and_trainer_that_differ_too_much_stop_the_run(online_file: Path) -> None:
    with pytest.raises(Refusal, match="engine and trainer differ"):
        train(online_file, "rollout.max_probs_diff=1e-12")


def test_truncated_sampling_is_scored_truncated(online_file: Path, tmp_path: Path) -> None:
    train(
        online_file,
        "rollout.top_k=20",
        "rollout.top_p=0.9",
        "rollout.truncated_sampling=mask",
        "rollout.temperature=0.8",
    )
    for metrics in metrics_of(tmp_path / "runs" / "run"):
        assert metrics["training/rollout_probs_diff_max"] < 1e-4


PPO = [
    "method=ppo",
    "rollout.n=1",
    "batch.prompts=8",
    "batch.prompts_per_update=4",
    "checkpoint.every=2",
    "critic.lr=1e-3",
    "model.lora.rank=4",
    "model.lora.dropout=0.1",
    "log.samples=8",
    "algorithm.kl.target=0.01",
]


@pytest.mark.parametrize(
    ("steps", "ended_after"),
    [
        pytest.param(4, [3], id="once, in a checkpoint"),
        pytest.param(8, [2, 3, 7], id="again and again", marks=pytest.mark.slow),
    ],
)
def test_killed_and_resumed_is_bit_identical_critic_and_rollouts_included(
    online_file: Path, tmp_path: Path, steps: int, ended_after: list[int]
) -> None:
    val = write_jsonl(tmp_path / "val.jsonl", question_rows(5))
    words = [*PPO, f"run.steps={steps}", f"val.questions={val}", "val.every=3", "val.max_new_tokens=6"]
    words.append("val.at_start=true")
    runs = tmp_path / "runs"
    whole = lockstep("train", online_file, "run.name=whole", *words)
    assert whole.returncode == 0, whole.stderr
    folder = runs / "killed"
    metrics = folder / "metrics.jsonl"
    for count in ended_after:
        writing = [Moment(f"{folder}/checkpoints/.writing-*")] if count == 3 else []
        moments = [*writing, lines(metrics, count)]
        killed(["train", online_file, "run.name=killed", *words], *moments)
    done = lockstep("train", online_file, "run.name=killed", *words)
    assert done.returncode == 0, done.stderr
    assert facts(folder) == facts(runs / "whole")
    assert (folder / "samples.jsonl").read_text() == (runs / "whole" / "samples.jsonl").read_text()
    for part in ("weights", "critic", "optimizer", "critic_optimizer"):
        one, two = (weights_of(run, steps, part) for run in (folder, runs / "whole"))
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one), part


# Keys whose numbers are over all responses of a step, or of an update, wherever they are.
OVER_THE_STEP = (
    "algorithm.rollout_correction.weight=sequence",
    "algorithm.rollout_correction.normalize=true",
    "algorithm.overlong.mask_truncated=true",
    f"rollout.stop_ids={list(range(20))}",  # so that some responses end before the limit
    "algorithm.pf_ppo.method=max_random",
    "algorithm.aggregation=seq_mean_token_mean",
    "algorithm.penalty_aggregation=token_mean",
    "critic.aggregation=seq_mean_token_sum",
)


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("method", ["ppo", *(pytest.param(name, marks=pytest.mark.slow) for name in ("grpo", "remax"))])
def test_two_processes_sample_and_train_what_one_does(online_file: Path, tmp_path: Path, method: str) -> None:
    n = "rollout.n=3" if method == "grpo" else "rollout.n=1"
    words = [f"method={method}", n, "log.samples=99", "reward.workers=2", "run.export=false"]
    words += ["batch.prompts_per_update=2"] if method != "remax" else []
    words += ["critic.lr=1e-3", *OVER_THE_STEP] if method == "ppo" else []
    # Room for the samples of one prompt: the others of a share are begun one by one, by whoever is first.
    words += ["rollout.max_sequences=3"] if method == "grpo" else []
    train(online_file, "run.name=one", *words)
    two = torchrun("train", online_file, "run.name=two", *words)
    assert two.returncode == 0, two.stderr
    single, double = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert [s["response"] for s in samples_of(single)] == [s["response"] for s in samples_of(double)]
    assert [s["score"] for s in samples_of(single)] == [s["score"] for s in samples_of(double)]
    assert close(weights_of(single), weights_of(double))
    told = {name for metrics in metrics_of(double) for name in metrics}
    assert {"perf/gen_straggler", "perf/gen_taken_prompts"} <= told
    if method == "ppo":
        assert close(weights_of(single, part="critic"), weights_of(double, part="critic"))
        for one, other in zip(metrics_of(single), metrics_of(double), strict=True):
            for name in ("actor/filtered_share", "response/skipped_ratio", "rollout_corr/weight_mean"):
                assert other[name] == pytest.approx(one[name], rel=1e-6), name
        assert any(0 < one["response/skipped_ratio"] < 1 for one in metrics_of(single))
        assert any(0 < one["actor/filtered_share"] < 1 for one in metrics_of(single))


@pytest.mark.slow
@pytest.mark.torchrun
def test_an_update_with_fewer_responses_than_processes(online_file: Path, tmp_path: Path) -> None:
    """One response a step: the second process has none to generate, and none for the policy and for the critic."""
    words = [
        "method=ppo",
        "rollout.n=1",
        "batch.prompts=1",
        "algorithm.kl.where=none",
        "critic.lr=1e-3",
        "run.steps=2",
        "run.export=false",
    ]
    train(online_file, "run.name=one", *words)
    two = torchrun("train", online_file, "run.name=two", *words)
    assert two.returncode == 0, two.stderr
    single, double = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    assert [s["response"] for s in samples_of(single)] == [s["response"] for s in samples_of(double)]
    for part in ("weights", "critic"):
        assert close(weights_of(single, 2, part), weights_of(double, 2, part)), part


@pytest.mark.slow
def test_ctrl_c_saves_and_says_how_to_go_on(online_file: Path, tmp_path: Path) -> None:
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    status, said = interrupted(["train", online_file, "run.steps=100000"], lines(metrics, 2))
    assert status == 130, said
    assert "the same command" in said
    assert "Traceback" not in said
    step = metrics_of(tmp_path / "runs" / "run")
    assert (tmp_path / "runs" / "run" / "checkpoints" / f"step_{len(step)}").is_dir()
