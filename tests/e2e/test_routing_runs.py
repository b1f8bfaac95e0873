"""Runs with `algorithm.routing_replay`: the same update however responses are packed, divided or recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import environment_classes
from commands import torchrun
from conftest import write_online_recipe
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.parity.replay.diverged_module import traces_of
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import Mode
from lockstep.parity.replay.replay_result import Replayed
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.tape.module_trace import FORWARD
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.online import train_online
from refusals import refuses
from runs import close, stored
from tiny_sizes import TINY

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "initializer_range": 0.4}
# Two updates per step, twice, with steps that are large enough for the routers to choose other experts.
UPDATES = ["run.steps=2", "batch.prompts_per_update=2", "algorithm.epochs=2", "optim.lr=1e-2"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_tiny(folder, hidden=64, layers=1)
    torch.manual_seed(0)
    sizes: dict[str, Any] = {**TINY, **EXPERTS, "max_position_embeddings": 512}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes)).save_pretrained(folder)
    return folder


@pytest.fixture
def recipe(tmp_path: Path, experts: Path) -> Path:
    return write_online_recipe(tmp_path, experts)


def train(recipe: Path, *words: str) -> None:
    train_online(load_recipe(str(recipe), ["run.export=false", *words]), Console.silent())


def metrics_of(folder: Path, name: str) -> list[dict[str, float]]:
    return [metrics for _, metrics in read_metrics(folder / "runs" / name / "metrics.jsonl")]


def weights(folder: Path, name: str, step: int = 2) -> Any:
    return stored(folder / "runs" / name, step)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rollout", pytest.param("old", marks=pytest.mark.slow)])
def test_micro_batches_do_not_change_the_update(recipe: Path, tmp_path: Path, mode: str) -> None:
    words = [*UPDATES, f"algorithm.routing_replay={mode}"]
    train(recipe, "run.name=packed", *words)
    train(recipe, "run.name=padded", "batch.tokens=null", "batch.micro_batch_size=1", *words)
    train(recipe, "run.name=plain", *UPDATES)
    assert close(weights(tmp_path, "packed"), weights(tmp_path, "padded"))
    assert not close(weights(tmp_path, "packed"), weights(tmp_path, "plain")), "the replay changed nothing"
    for one in metrics_of(tmp_path, "packed"):
        # The engine has the weights and the precision of the trainer. The routers move during the updates.
        assert (one["routing/flips"] == 0) == (mode == "rollout")
        layers = [one[f"routing/flips/layer_{number}"] for number in range(2)]
        assert one["routing/flips"] == pytest.approx(sum(layers) / 2)
    assert not any(name.startswith("routing/") for one in metrics_of(tmp_path, "plain") for name in one)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["rollout", "old"])
def test_two_ranks_make_the_update_of_one(recipe: Path, tmp_path: Path, mode: str) -> None:
    words = [*UPDATES, f"algorithm.routing_replay={mode}", "algorithm.kl.where=loss"]
    train(recipe, "run.name=one", *words)
    two = torchrun("train", recipe, "run.name=two", "run.export=false", *words)
    assert two.returncode == 0, two.stderr
    assert close(weights(tmp_path, "one"), weights(tmp_path, "two"))
    for one, other in zip(metrics_of(tmp_path, "one"), metrics_of(tmp_path, "two"), strict=True):
        assert other["routing/flips"] == pytest.approx(one["routing/flips"], abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("split", ["tensor_parallel", "context_parallel"])
@pytest.mark.parametrize("mode", ["rollout", "old"])
def test_divided_models_make_the_same_update(recipe: Path, tmp_path: Path, mode: str, split: str) -> None:
    # eps above the noise of the gradients: without replay, tensor-parallel rounding alone moves weights by 1.3e-5.
    words = [*UPDATES, "optim.eps=1e-3", f"algorithm.routing_replay={mode}"]
    train(recipe, "run.name=one", *words)
    two = torchrun("train", recipe, "run.name=two", "run.export=false", f"parallel.{split}=2", *words)
    assert two.returncode == 0, two.stderr
    assert close(weights(tmp_path, "one"), weights(tmp_path, "two"))


CONVERSING = [
    f"rollout.environment={environment_classes.__file__}:Scored",
    "rollout.environment_workers=1",
    "rollout.turn_tokens=10",
    "rollout.max_tokens=80",
    "batch.tokens=2048",
]


def test_every_turn_has_the_experts_with_which_it_was_sampled(recipe: Path, tmp_path: Path) -> None:
    """A route of a turn at the wrong place would be a flip, and another log-prob."""
    words = ["run.steps=2", "algorithm.routing_replay=rollout", "algorithm.kl.where=loss", "tape.record=true"]
    train(recipe, *words, *CONVERSING, "algorithm.rollout_correction.weight=token")
    for one in metrics_of(tmp_path, "run"):
        assert one["routing/flips"] == 0
        assert one["training/rollout_probs_diff_max"] < 1e-4
    tape = TapeFolder(tmp_path / "runs" / "run" / "tape")
    for rollout in rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path)):
        assert rollout.routes is not None
        assert len(rollout.turn_tokens) > 1
        [sequence] = rollout.sequences
        last = max(index for index, mask in enumerate(sequence.loss_mask) if mask)
        assert len(rollout.routes) == last


def replayed(run: Path, mode: Mode, *words: str) -> Replayed:
    found = replay(run, mode, words, Console.silent())
    assert found is not None
    return found


def traced_choices(run: Path) -> list[torch.Tensor]:
    """The digest of each layer's chosen experts in the trace of the first step."""
    [trace] = traces_of(TapeFolder(run / "tape").read_step(1)).values()
    return [trace.outputs(event)[-1] for event in trace.events if "Router" in event.kind and event.phase == FORWARD]


@pytest.mark.slow
@pytest.mark.parametrize("turns", [[], CONVERSING], ids=["rows", "turns"])
def test_a_replay_uses_the_experts_of_the_tape(recipe: Path, tmp_path: Path, turns: list[str]) -> None:
    """In bf16 the routers choose other experts for some tokens. The recorded ones are used, and the replay agrees."""
    words = ["run.steps=2", "algorithm.routing_replay=rollout", "algorithm.kl.where=loss", "tape.record=true"]
    train(recipe, *words, *turns)
    run = tmp_path / "runs" / "run"
    tape = TapeFolder(run / "tape")
    # The passes that trace the modules count no choices.
    assert not any(metrics["routing/flips"] for metrics in metrics_of(tmp_path, "run"))
    for changed in ("model.dtype=bf16", "model.attention=sdpa"):
        found = replayed(run, "chained", changed)
        assert found.steps == [1, 2]
        for step in found.steps:
            own = TapeFolder(found.folder / "tape").read_step(step).tensors
            assert torch.equal(own["fed/routes"], tape.read_step(step).tensors["fed/routes"])
        flips = [metrics["routing/flips"] for _, metrics in read_metrics(found.folder / "metrics.jsonl")]
        assert (max(flips) > 0) == (changed == "model.dtype=bf16")
        # Also the traces of the modules.
        ours, theirs = (traced_choices(folder) for folder in (found.folder, run))
        assert len(ours) == 2
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    # Other experts on the tape give other log-probs, in the replay's own precision.
    assert replayed(run, "chained").in_step
    rows = tape.read_table(tape.rollouts_file(1))
    for row in rows:
        row["routes"] = bytes((expert + 1) % EXPERTS["num_experts"] for expert in row["routes"])
    tape.write_table(tape.rollouts_file(1), rows)
    assert replayed(run, "chained").stage == "log-probs"


@pytest.mark.slow
def test_an_adapter_and_its_reference_replay(recipe: Path, tmp_path: Path) -> None:
    """At the first step, the adapter is zero: policy and reference agree, and with the engine too."""
    words = ["model.lora.rank=2", "algorithm.kl.where=loss", "algorithm.routing_replay=rollout", "run.steps=2"]
    train(recipe, *words)
    first, second = metrics_of(tmp_path, "run")
    assert first["actor/kl"] == pytest.approx(0, abs=1e-6)
    assert second["actor/kl"] > 0
    assert first["routing/flips"] == second["routing/flips"] == 0


def test_a_dense_model_is_refused(online_file: Path) -> None:
    with refuses("algorithm.routing_replay", "unsupported-model", "Qwen2ForCausalLM has no experts"):
        train(online_file, "algorithm.routing_replay=rollout")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["rollout.engine=hf"], "engine hf does not return the experts"),
        (["rollout.engine=sglang"], "engine sglang does not return the experts"),
        (["rollout.function=turns.py:talk"], "rollout.function returns tokens"),
        (["rollout.agent=agents.py:talk"], "rollout.agent returns tokens"),
        (["model.aux_loss_coef=0.01"], "load-balancing loss"),
        (["method=on_policy_distill", "algorithm.kl.reference=teacher"], "the teacher"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_by_name(recipe: Path, words: list[str], why: str) -> None:
    with pytest.raises(Refusal, match=why) as caught:
        load_recipe(str(recipe), ["algorithm.routing_replay=rollout", *words])
    assert any(problem.where == "algorithm.routing_replay" for problem in caught.value.problems)
