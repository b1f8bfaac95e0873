"""Runs with a tape: training is unchanged, the tape is bounded and complete, and replays are in step."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import torchrun
from conftest import REWARD, chat_rows, question_rows, write_jsonl
from kills import Moment, killed
from lockstep.errors import Refusal
from lockstep.parity.replay.diverged_module import traces_of
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import Mode, Replay, run_replay
from lockstep.parity.replay.replay_result import Replayed, judge
from lockstep.recipe import Recipe, load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.tape.digest import relative
from lockstep.tape.tape_format import StepRecord, TapeFolder
from lockstep.train.checkpointing import Checkpointer
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from preference_rows import METHODS as ROWS
from refusals import refuses

OFFLINE_KEYS = "batch: {rows_per_update: 6, tokens: 512}"
ONLINE_KEYS = "batch: {{prompts: 4, prompts_per_update: 2, tokens: 512}}\nrollout: {{n: {n}, max_tokens: 12}}"
REWARD_KEYS = '\nreward: {{function: "{file}:letters", workers: 1}}'


def write_recipe(folder: Path, model: Path, method: str) -> Path:
    """A small run of any method, with its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    if method in ONLINE:
        (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        keys = ONLINE_KEYS.format(n=1 if method == "ppo" else 3) + REWARD_KEYS.format(file=folder / "reward.py")
        rows = question_rows(20)
    else:
        keys, rows = OFFLINE_KEYS, chat_rows(24) if method == "sft" else ROWS[method](24, 0)
    path = folder / "recipe.yaml"
    path.write_text(
        f"""
method: {method}
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 2, export: false}}
model: {{path: {model}}}
data: {{train: {write_jsonl(folder / "train.jsonl", rows)}}}
optim: {{lr: 1.0e-3, eps: 1.0e-4, schedule: constant}}
{keys}
""",
        encoding="utf-8",
    )
    return path


def train(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(str(recipe_file), list(overrides))
    (train_online if recipe.method in ONLINE else train_offline)(recipe, Console.silent())
    return Path(recipe.run.folder) / recipe.run.name


def facts(run: Path) -> list[tuple[int, dict[str, float]]]:
    """The metrics but for the clocks."""
    return [
        (step, {name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))})
        for step, metrics in read_metrics(run / "metrics.jsonl")
    ]


def tape_of(run: Path) -> TapeFolder:
    return TapeFolder(run / "tape")


# -- keys


@pytest.mark.parametrize(
    "words",
    [
        ("tape=true", "tape.steps=2", "tape.every=3"),
        ("tape.steps=2", "tape.every=3", "tape=true"),
        ("tape.steps=2", "tape=true", "tape.every=3"),
        ("tape.record=true", "tape.steps=2", "tape.every=3"),
        ("tape=false", "tape.steps=2", "tape.every=3", "tape=true"),
    ],
)
def test_the_short_form_and_keys_stand_in_any_order(recipe_file: Path, words: tuple[str, ...]) -> None:
    tape = load_recipe(str(recipe_file), list(words)).tape
    assert (tape.record, tape.steps, tape.every) == (True, 2, 3)


def test_the_short_form_in_a_file(recipe_file: Path) -> None:
    recipe_file.write_text(recipe_file.read_text() + "tape: true\n")
    assert load_recipe(str(recipe_file), []).tape.record
    assert not load_recipe(str(recipe_file), ["tape=false"]).tape.record
    tape = load_recipe(str(recipe_file), ["tape.steps=7"]).tape
    assert (tape.record, tape.steps) == (True, 7)


def test_dropout_is_refused(recipe_file: Path) -> None:
    words = ["model.lora.rank=4", "model.lora.dropout=0.1"]
    load_recipe(str(recipe_file), words)
    with pytest.raises(Refusal, match=r"cannot reproduce dropout") as caught:
        load_recipe(str(recipe_file), [*words, "tape=true"])
    assert "model.lora.dropout=0" in caught.value.problems[0].remedy


def test_a_disk_too_small_for_the_weights_is_refused_first(
    recipe_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for a checkpoint, not for a thousand snapshots."""
    usage = shutil.disk_usage(tmp_path)
    small = type(usage)(usage.total, usage.total - 2**28, 2**28)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: small)
    words = ["run.steps=1000", "tape=true", "tape.steps=1000", "tape.every=1"]
    with pytest.raises(Refusal, match=r"\[disk-full\]: the tape with weights .*256 MiB"):
        train(recipe_file, *words)
    assert not (tmp_path / "runs" / "run" / "tape").exists()
    train(recipe_file, "run.steps=3", "tape=true", "run.export=false")


# -- a tape changes nothing

SETTINGS = {
    "sft": ["optim.warmup=1"],
    "sft padded": ["batch.micro_batch_size=2", "batch.tokens=null"],
    "sft lora": ["model.lora.rank=4"],
    "sft bf16": ["model.dtype=bf16"],
    "sft recomputed": ["model.gradient_checkpointing=true"],
    "grpo": ["algorithm.kl.where=loss", "algorithm.kl.coefficient=0.1"],
    "ppo": ["algorithm.kl.where=reward", "algorithm.kl.coefficient=0.1"],
}


@pytest.mark.daily("grpo")
@pytest.mark.parametrize("kind", SETTINGS)
def test_a_tape_changes_nothing(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, kind.split()[0])
    words = [*SETTINGS[kind], "run.steps=3"]
    plain = train(recipe, "run.name=plain", *words)
    taped = train(recipe, "run.name=taped", "tape=true", "tape.every=2", *words)
    assert facts(plain) == facts(taped)
    assert len(facts(taped)) == 3
    assert tape_of(taped).steps() == [1, 2, 3]
    assert not (plain / "tape").exists()
    for file in (plain / "checkpoints" / "step_3").glob("*.safetensors"):
        assert file.read_bytes() == (taped / "checkpoints" / "step_3" / file.name).read_bytes(), file.name
    for step, metrics in facts(taped):
        recorded = tape_of(taped).read_step(step).info["metrics"]
        assert {name: recorded[name] for name in metrics} == metrics


# -- what is on disk


def test_keys_bound_what_is_on_disk(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, "sft")
    words = ["run.steps=5", "tape=true", "tape.steps=4", "tape.every=3", "tape.rows=2"]
    selection = ["tape.modules=[model.layers.1, model.layers.1.mlp.*]", "tape.tensors=[model.layers.1]"]
    tape = tape_of(train(recipe, *words, *selection))
    assert {file.name for file in tape.path.iterdir()} == {
        "tape.json",
        *(f"step_00000{step}.{end}" for step in range(1, 5) for end in ("safetensors", "rows.parquet")),
        *(f"{kind}_00000{step}.safetensors" for step in (1, 4) for kind in ("weights", "left")),
    }
    for step in range(1, 5):
        record = tape.read_step(step)
        traces = traces_of(record)
        if step in (2, 3):
            assert not traces
            assert not [name for name in record.tensors if "/gradient/" in name or "/weights/" in name]
            continue
        assert record.info["probe"]["rows"] == 2
        modules = {event.module for event in traces["train", 0].events}
        own_children = {f"model.layers.1.mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj", "act_fn")}
        assert modules == {"model.layers.1", *own_children}
        complete = [name for name in record.tensors if name.endswith("/whole")]
        assert len(complete) == sum(
            e.inputs + e.outputs for e in traces["train", 0].events if e.module == "model.layers.1"
        )


@pytest.mark.slow
def test_weights_are_left_out_on_request(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, "sft")
    run = train(recipe, "tape=true", "tape.weights=false")
    assert tape_of(run).weighed() == []
    with refuses("", "missing-on-tape", "step 2") as caught:
        replay(run, "forced", [], Console.silent(), steps=[2])
    assert "tape.weights=true" in caught.value.problems[0].remedy


@pytest.mark.slow
def test_a_tape_without_weights_starts_from_the_model_folder(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(write_recipe(tmp_path, tiny_folder, "sft"), "tape=true", "tape.every=1", "tape.weights=false")
    found = replay(run, "forced", ["batch.tokens=300"], Console.silent())
    assert found is not None
    assert (found.steps, found.in_step) == ([1], True)
    other = shutil.copytree(tiny_folder, tmp_path / "other")
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 1.001
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    for mode in ("forced", "chained"):
        with pytest.raises(Refusal, match="contains other weights"):
            replay(run, mode, [f"model.path={other}"], Console.silent())


@pytest.mark.slow
def test_recorded_weights_are_those_before_the_step(tiny_folder: Path, tmp_path: Path) -> None:
    """Of an adapter, only what is trained."""
    recipe = write_recipe(tmp_path, tiny_folder, "sft")
    words = ["model.lora.rank=4", "checkpoint.every=1", "checkpoint.keep_last=9", "tape=true", "tape.every=1"]
    run = train(recipe, *words)
    model = load_file(run / "checkpoints" / "step_1" / "model.safetensors")
    optimizer = load_file(run / "checkpoints" / "step_1" / "optimizer.safetensors")
    found = tape_of(run).read_weights(2)
    wanted = {f"train/model/{name}": value for name, value in model.items()}
    wanted |= {f"train/optimizer/{name}": t for name, t in optimizer.items() if not name.startswith("rng/")}
    assert found.keys() == wanted.keys()
    assert all("lora" in name for name in found)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


# -- kills


def bits(tensor: torch.Tensor) -> tuple[list[int], str]:
    return list(tensor.shape), hashlib.sha256(tensor.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def content(tape: TapeFolder) -> dict[str, Any]:
    """A tape's numbers, but for the clocks."""
    found: dict[str, Any] = {}
    for step in tape.steps():
        record = tape.read_step(step)
        metrics = record.info.pop("metrics")
        found[f"{step} metrics"] = {
            name: value for name, value in metrics.items() if not name.startswith(("timing_s/", "perf/"))
        }
        found[f"{step} info"] = record.info
        found |= {f"{step} {name}": bits(tensor) for name, tensor in record.tensors.items()}
        for file in (tape.rows_file(step), tape.rollouts_file(step)):
            if file.exists():
                found[file.name] = tape.read_table(file)
    for step in tape.weighed():
        found |= {f"{step} {name}": bits(tensor) for name, tensor in tape.read_weights(step).items()}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_killed_run_ends_with_a_complete_tape(method: str, tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, method)
    words = ["run.steps=6", "checkpoint.every=2", "tape=true", "tape.every=2"]
    complete = tape_of(train(recipe, "run.name=whole", *words))
    half = tape_of(tmp_path / "runs" / "killed")
    # After the checkpoint of step 2, in the middle of the steps after it.
    killed(["train", recipe, "run.name=killed", *words], Moment(f"{half.path}/step_000003.safetensors"))
    (half.path / ".writing-step_000004.safetensors").write_bytes(b"half")
    train(recipe, "run.name=killed", *words)
    assert {file.name for file in half.path.iterdir()} == {file.name for file in complete.path.iterdir()}
    assert content(half) == content(complete)


def test_a_tape_that_cannot_be_written_stops_the_run(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = TapeFolder.write_step

    def full(self: TapeFolder, record: StepRecord) -> None:
        if record.step == 2:
            raise Refusal.at(str(self.step_file(2)), "could not be written: No space left on device", code="unwritable")
        write(self, record)

    monkeypatch.setattr(TapeFolder, "write_step", full)
    with pytest.raises(Refusal, match=r"step_000002.*could not be written"):
        train(write_recipe(tmp_path, tiny_folder, "sft"), "run.steps=2", "tape=true")


@pytest.mark.slow
def test_a_checkpoint_is_not_ahead_of_its_tape(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, save = TapeFolder.write_step, Checkpointer.save
    seen: list[list[int]] = []

    def late(self: TapeFolder, record: StepRecord) -> None:
        time.sleep(0.2)
        write(self, record)

    def watched(self: Checkpointer, *given: object, **named: object) -> None:
        seen.append(TapeFolder(self.run.folder.tape).steps())
        save(self, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(TapeFolder, "write_step", late)
    monkeypatch.setattr(Checkpointer, "save", watched)
    train(write_recipe(tmp_path, tiny_folder, "sft"), "run.steps=2", "checkpoint.every=1", "tape=true")
    assert seen == [[1], [1, 2]]


# -- replays


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> dict[str, Path]:
    """Runs by method, created on first use."""
    folder = tmp_path_factory.mktemp("recorded")

    class Runs(dict[str, Path]):
        def __missing__(self, method: str) -> Path:
            words = ["tape=true", "tape.every=1", "run.steps=2"]
            self[method] = train(write_recipe(folder / method, tiny_folder, method), *words)
            return self[method]

    return Runs()


MODES: tuple[Mode, ...] = ("forced", "chained", "free")
QUICK = [("sft", mode) for mode in MODES] + [("grpo", mode) for mode in MODES] + [("dpo", "forced"), ("ppo", "forced")]
SLOW = [(method, mode) for method in ("dpo", "kto", "rm", "ppo") for mode in MODES if (method, mode) not in QUICK]


@pytest.mark.daily("sft-free", "grpo-chained")
@pytest.mark.parametrize(("method", "mode"), [*QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW)])
def test_replays_on_this_device_are_in_step(recorded: dict[str, Path], method: str, mode: Mode) -> None:
    found = replay(recorded[method], mode, [], Console.silent())
    assert found is not None
    assert found.in_step, found.cause or found.module
    assert found.steps == [1, 2]
    stages = {check.stage for check in found.checks}
    assert {"batch", "log-probs", "loss", "gradient", "optimizer", "weights"} <= stages
    if method in ONLINE:
        assert {"reward", "advantages"} <= stages
        assert mode != "forced" or "generation" in stages


@pytest.mark.slow
def test_concurrent_replays_have_separate_folders(recorded: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second starts when the first has its name and not yet its folder."""
    started: list[Replayed | None] = []

    def run_after_another(loop: Replay, recipe: Recipe, console: Console) -> Path | None:
        monkeypatch.setattr("lockstep.parity.replay.replay_command.run_replay", run_replay)
        started.append(replay(recorded["sft"], "forced", [], console, steps=[1]))
        return run_replay(loop, recipe, console)

    monkeypatch.setattr("lockstep.parity.replay.replay_command.run_replay", run_after_another)
    first = replay(recorded["sft"], "forced", [], Console.silent(), steps=[2])
    [second] = started
    assert first is not None
    assert second is not None
    assert (first.in_step, first.steps) == (True, [2])
    assert (second.in_step, second.steps) == (True, [1])
    assert first.folder != second.folder
    assert {path.name for path in first.folder.parent.iterdir()} >= {first.folder.name, second.folder.name}
    assert not list(first.folder.parent.glob(".reserved-*"))


@pytest.mark.daily("sft")
@pytest.mark.parametrize("method", ["sft", "ppo"])
def test_another_learning_rate_is_not_in_step(recorded: dict[str, Path], method: str) -> None:
    """A replay can fail."""
    found = replay(recorded[method], "forced", ["optim.lr=2e-3"], Console.silent(), steps=[2])
    assert found is not None
    assert found.stage in ("optimizer", "weights")
    assert not found.in_step


# -- two processes


@pytest.mark.slow
@pytest.mark.torchrun
@pytest.mark.parametrize("kind", ["sft", "sft lora", "ppo"])
def test_two_processes_tape_what_one_does(kind: str, tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_folder, kind.split()[0])
    words = ["tape=true", "tape.every=1", *(["model.lora.rank=4"] if "lora" in kind else [])]
    one = tape_of(train(recipe, "run.name=one", *words))
    done = torchrun("train", recipe, "run.name=two", *words)
    assert done.returncode == 0, done.stderr
    two = tape_of(tmp_path / "runs" / "two")
    found = judge(one, two, "chained", tmp_path)
    assert found.in_step, found.cause or found.module
    single, double = traces_of(one.read_step(1)), traces_of(two.read_step(1))
    assert {rank for _, rank in double} == {0, 1}
    for (learner, _), trace in double.items():
        mine = single[learner, 0]
        assert [e.module for e in trace.events] == [e.module for e in mine.events]
        sizes = [float(mine.tensors[name][0]) for name in mine.tensors if name.startswith("parameter/")]
        for name, tensor in trace.tensors.items():
            assert relative(mine.tensors[name], tensor, floor=1e-3 * max(sizes)) < 1e-4, name
    weights = one.read_weights(2), two.read_weights(2)
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.allclose(weights[0][name], weights[1][name], atol=1e-5) for name in weights[0])


FAULT = """
import lockstep.parity.replay.replay_loop as script

restore = script.Replay.restore


def faulty(self, training, step):
    restore(self, training, step)
    training.models.module.causal_lm.model.layers[1].input_layernorm.variance_epsilon = 1.0


script.Replay.restore = faulty
"""


@pytest.mark.torchrun
@pytest.mark.slow
def test_two_processes_replay_one_and_look_into_a_module_together(tiny_folder: Path, tmp_path: Path) -> None:
    run = train(write_recipe(tmp_path, tiny_folder, "sft"), "tape=true", "run.steps=1")
    done = torchrun("replay", run)
    assert done.returncode == 0, done.stdout + done.stderr
    (tmp_path / "sitecustomize.py").write_text(FAULT, encoding="utf-8")
    off = torchrun("replay", run, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert off.returncode != 0
    assert "model.layers.1.input_layernorm" in off.stdout, off.stdout + off.stderr
    assert re.search(r"with 1\.0 instead of 1e-0\d", off.stdout), off.stdout
