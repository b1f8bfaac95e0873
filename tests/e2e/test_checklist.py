"""The checklist on recorded runs: every item passes on a clean replay and fails with a matching fault."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fault_scene import wrap
from hang import HANG
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.parity.checklist.checklist import CheckItem, Checklist, as_json, run_checklist, show
from lockstep.reward.scorer import Scorer
from lockstep.run.console import Console
from lockstep.train.training import Training
from taped_runs import record

Fault = Callable[[Training, pytest.MonkeyPatch], None]

ENGINE = ["first tokens", "rewards", "weight sync", "prefill and decode"]
ALWAYS = ["starting weights", "first loss and gradient", "learning rate 0", "padding and packing", "repeatability"]


@pytest.fixture(scope="module")
def grpo(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return record(tmp_path_factory.mktemp("checklist"), tiny_folder, "grpo", steps=1)


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    return record(tmp_path_factory.mktemp("checklist"), tiny_folder, "sft", steps=1)


def checked(run: Path, fault: Fault | None = None, *words: str, loading: Fault | None = None) -> dict[str, CheckItem]:
    """The items by name. `fault` is put in once the recorded weights are, `loading` before that."""
    with pytest.MonkeyPatch.context() as patch:

        class Faulty(Checklist):
            def restore(self, training: Training, step: int) -> None:
                first = self.bench is None
                if first and loading is not None:
                    loading(training, patch)
                super().restore(training, step)
                if first and fault is not None:
                    fault(training, patch)

        patch.setattr("lockstep.parity.checklist.checklist.Checklist", Faulty)
        return {item.name: item for item in run_checklist(run, words, Console.silent())}


def having(items: dict[str, CheckItem], passed: bool | None) -> list[str]:
    return [item.name for item in items.values() if item.passed is passed]


# -- clean


def test_every_item_passes_on_a_clean_online_replay(grpo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    items = checked(grpo)
    assert sorted(having(items, True)) == sorted([*ENGINE, *ALWAYS])
    assert "16 of 16" in items["first tokens"].measured
    assert "16 of 16" in items["rewards"].measured
    written = json.loads((grpo / "replays" / "checklist-1" / "checklist.json").read_text())
    assert written == as_json(list(items.values()))
    assert written["passed"] is True
    show(list(items.values()), Console.open(plain=True))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "checklist: 9 passed, 0 failed, 0 without result"
    assert max(map(len, lines)) <= 80


@pytest.mark.slow
def test_an_offline_replay_says_what_does_not_apply(sft: Path) -> None:
    items = checked(sft)
    assert sorted(having(items, True)) == sorted(ALWAYS)
    assert sorted(having(items, None)) == sorted(ENGINE)
    assert {items[name].means for name in ENGINE} == {"an offline method generates nothing"}


@pytest.mark.slow
def test_other_micro_batches_and_half_precision_pass(grpo: Path) -> None:
    assert having(checked(grpo, None, "model.dtype=bf16", "batch.tokens=null", "batch.micro_batch_size=3"), False) == []


@pytest.mark.slow
def test_a_tape_without_weights_starts_from_the_model_folder(sft: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(sft, run, ignore=shutil.ignore_patterns("weights_*", "replays", "checkpoints"))
    assert sorted(having(checked(run), True)) == sorted(ALWAYS)


# -- the start


@pytest.mark.slow
def test_another_model_folder_is_named(sft: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "other", hidden=64, layers=2, seed=1)
    items = checked(sft, None, f"model.path={tmp_path / 'other'}")
    assert having(items, False) == ["starting weights"]
    # 7 matrices in each of 2 layers, and the embedding; norms and biases start at 1 and 0.
    assert items["starting weights"].measured.startswith("other weights; 15 weights differ")


@pytest.mark.slow
def test_weights_that_were_loaded_wrongly_are_named(sft: Path) -> None:
    def loading(training: Training, patch: pytest.MonkeyPatch) -> None:
        weights = dict(training.models.trained.module.named_parameters())
        weights["model.model.layers.1.mlp.up_proj.weight"].data[3, 5] += 1e-6

    items = checked(sft, loading=loading)
    assert having(items, False) == ["starting weights"]
    assert items["starting weights"].measured == "1 weights differ, the first is model.layers.1.mlp.up_proj.weight"


# -- generation and rewards


def sampling(**changes: Any) -> Fault:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        wrap(
            training.generator.engine,
            "generate",
            lambda original, requests, how: original(requests, replace(how, **changes)),
        )

    return fault


@pytest.mark.slow
def test_other_noise_gives_other_first_tokens(grpo: Path) -> None:
    items = checked(grpo, sampling(seed=1))
    assert having(items, False) == ["first tokens"]
    assert "sampling (seed" in items["first tokens"].means


@pytest.mark.slow
def test_another_reward_is_distinguished_from_other_faults(grpo: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        original = Scorer._sum

        def total(scorer: Scorer, *given: Any) -> Any:
            score = original(scorer, *given)
            return replace(score, total=score.total + 0.5)  # type: ignore[type-var]

        patch.setattr(Scorer, "_sum", total)

    items = checked(grpo, fault)
    assert having(items, False) == ["rewards"]
    assert items["rewards"].measured.startswith("0 of 16")


# -- the update


@pytest.mark.slow
def test_a_doubled_loss_is_seen_in_loss_and_gradient(sft: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        def doubled(original: Any, batches: Any, loss: Any, divisor: Any = None) -> Any:
            return original(batches, loss, 0.5 * (divisor or sum(len(batch.targets_K) for batch in batches)))

        wrap(training.models.trained, "forward_backward", doubled)

    items = checked(sft, fault)
    assert having(items, False) == ["first loss and gradient"]
    # Twice the number is off by once the number.
    assert items["first loss and gradient"].measured.count("by 1, ") == 2
    assert "train loss and train gradient norm" in items["first loss and gradient"].means


@pytest.mark.slow
def test_a_lost_gradient_is_seen_in_the_norm_alone(sft: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        def norm(original: Any, scale: float = 1.0) -> Any:
            training.models.trained.optimizer.trained["model.layers.1.mlp.down_proj.weight"].grad = None
            return original(scale)

        wrap(training.models.trained.optimizer, "gradient_norm", norm)

    item = checked(sft, fault)["first loss and gradient"]
    assert item.passed is False
    assert "backward pass" in item.means


# -- the engine's weights


@pytest.mark.slow
def test_stale_weights_in_the_engine_are_seen_after_an_update(grpo: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        training.generator.engine.policy = copy.deepcopy(training.models.module)  # type: ignore[attr-defined]

    items = checked(grpo, fault)
    assert having(items, False) == ["weight sync"]
    assert "weights from before the update" in items["weight sync"].means


@pytest.mark.slow
def test_a_single_stale_layer_is_seen_too(grpo: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        live: Any = training.models.module
        handed = copy.copy(live.causal_lm.model.layers)
        stale = copy.deepcopy(live)
        stale.causal_lm.model.layers = torch.nn.ModuleList([stale.causal_lm.model.layers[0], *handed[1:]])
        stale.causal_lm.model.embed_tokens = live.causal_lm.model.embed_tokens
        stale.causal_lm.model.norm = live.causal_lm.model.norm
        stale.causal_lm.lm_head = live.causal_lm.lm_head
        training.generator.engine.policy = stale  # type: ignore[attr-defined]

    items = checked(grpo, fault)
    assert having(items, False) == ["weight sync"]
    assert "neither with the new weights" in items["weight sync"].means


@pytest.mark.slow
def test_an_update_that_moves_nothing_proves_nothing(grpo: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        wrap(
            training.models.trained.optimizer,
            "step",
            lambda original, lr, norm: training.models.trained.optimizer.forget(),
        )

    items = checked(grpo, fault)
    assert having(items, None) == ["weight sync"]
    assert items["weight sync"].means.startswith("proves nothing: no update")


@pytest.mark.slow
def test_weights_that_move_at_rate_0(sft: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        wrap(training.models.trained.optimizer, "step", lambda original, lr, norm: original(max(lr, 1e-5), norm))

    items = checked(sft, fault)
    assert having(items, False) == ["learning rate 0"]
    assert "learning rate 0: master weights" in items["learning rate 0"].means


@pytest.mark.slow
def test_an_engine_that_wears_out_at_rate_0(grpo: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        def step(original: Any, lr: float, norm: Any) -> None:
            original(lr, norm)
            if lr == 0:
                sampling(temperature=1.0)(training, patch)

        wrap(training.models.trained.optimizer, "step", step)

    items = checked(grpo, fault)
    assert items["learning rate 0"].passed is False
    assert "outputs by 0 " in items["learning rate 0"].measured
    assert items["learning rate 0"].means.startswith("engine and trainer drift")
    assert items["weight sync"].passed is True


# -- prefill and decode


def after_each(method: str) -> Fault:
    """What a pass of this kind has put into the cache is changed when it is done."""

    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        def made(original: Any, *args: Any) -> Any:
            runner = original(*args)
            if not hasattr(runner, "worn"):
                runner.worn = True
                wrap(runner, method, lambda run, work: worn(runner, run(work)))
            return runner

        def worn(runner: Any, result: Any) -> Any:
            with torch.inference_mode():
                for tensor in runner.cache.tensors:
                    tensor.mul_(1.01)
            return result

        wrap(training.generator.engine, "_runner", made)

    return fault


@pytest.mark.slow
def test_a_fault_of_prefill_is_named(grpo: Path) -> None:
    item = checked(grpo, after_each("prefill"))["prefill and decode"]
    assert item.passed is False
    assert item.means.startswith("prefill differs")


@pytest.mark.slow
def test_a_decode_fault_is_distinguished_from_prefill(grpo: Path) -> None:
    item = checked(grpo, after_each("decode"))["prefill and decode"]
    assert item.passed is False
    assert item.means.startswith("decode differs")


# -- what else


@pytest.mark.slow
def test_padded_rows_at_wrong_positions(sft: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        def forward(original: Any, batch: Any) -> Any:
            return original(batch if batch.packed else replace(batch, position_ids_NT=2 * batch.position_ids_NT))

        wrap(training.models.trained.module, "forward", forward)

    assert having(checked(sft, fault), False) == ["padding and packing"]


@pytest.mark.slow
def test_a_step_that_does_not_repeat_is_information(sft: Path) -> None:
    def fault(training: Training, patch: pytest.MonkeyPatch) -> None:
        calls: list[int] = []

        def hook(module: Any, given: Any, output: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return output * (1 + 1e-7 * (len(calls) % 5))

        training.models.module.get_submodule("model.model.norm").register_forward_hook(hook)

    items = checked(sft, fault)
    assert having(items, False) == []
    assert items["repeatability"].passed is None
    assert "tensors differ" in items["repeatability"].measured


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_processes_pass_what_one_recorded(grpo: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    before = set((grpo / "replays").glob("checklist-*"))
    subprocess.run([*command, "-m", "lockstep", "replay", str(grpo), "--checklist"], timeout=HANG, check=True)
    (folder,) = set((grpo / "replays").glob("checklist-*")) - before
    items = json.loads((folder / "checklist.json").read_text())["items"]
    assert {item["passed"] for item in items} == {True}


def test_a_run_without_a_tape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="there is no tape"):
        run_checklist(tmp_path, [], Console.silent())
