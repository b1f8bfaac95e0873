"""Generation beside training: at staleness 0 the synchronous loop bit for bit; over it within the bound; no orphans."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import environment_classes
from commands import cold_lockstep, lockstep
from hang import wait_until
from kills import interrupted, killed, lines
from lockstep.commands.plan import show_cluster_plan
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.parity.replay.replay_loop import Replay
from lockstep.preflight.async_worker import collective_of, device_of_worker, handed_lines, refuse_beside
from lockstep.preflight.memory_plan import MemoryPlan
from lockstep.preflight.run_checks import prepare_online
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import rollouts_of
from lockstep.train.online_async import train_online_async
from refusals import refuses
from runs import facts
from struck import struck

# Conversations of two turns; in rounds, because batches change the rounding.
CONVERSING = [
    f"rollout.environment={environment_classes.__file__}:Scored",
    "rollout.environment_workers=1",
    "rollout.turn_tokens=10",
    "rollout.max_tokens=80",
    "batch.tokens=2048",
    "run.deterministic=true",
]


def train(recipe: Path, *overrides: str) -> None:
    train_online_async(load_recipe(str(recipe), ["run.export=false", *overrides]), Console.silent())


def samples_of(run: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]


def without_async(run: Path) -> list[tuple[int, dict[str, float]]]:
    """Nor the clock of environments, nor the prompt tokens that only the run counts."""
    others = ("async/", "environment/seconds", "rollout/prefill")
    told = [(step, {n: v for n, v in metrics.items() if not n.startswith(others)}) for step, metrics in facts(run)]
    assert told
    return told


@pytest.mark.parametrize(
    "words",
    [
        pytest.param([], id="grpo"),
        pytest.param(["method=remax", "rollout.n=1"], id="remax", marks=pytest.mark.slow),
        pytest.param(["method=dapo"], id="dapo", marks=pytest.mark.slow),
        pytest.param(CONVERSING, id="environment", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("way", ["memory", pytest.param("collective", marks=pytest.mark.slow)])
def test_staleness_0_is_the_synchronous_loop_bit_for_bit(
    online_file: Path, tmp_path: Path, words: list[str], way: str
) -> None:
    common = [*words, "run.steps=3", "run.export=false"]
    for name, own in {"turns": [], "beside": ["rollout.max_staleness=0", f"rollout.weight_sync={way}"]}.items():
        done = lockstep("train", online_file, f"run.name={name}", *common, *own)
        assert done.returncode == 0, done.stderr
    turns, beside = (tmp_path / "runs" / name for name in ("turns", "beside"))
    assert without_async(beside) == without_async(turns)
    one, other = (load_file(run / "checkpoints" / "step_3" / "model.safetensors") for run in (turns, beside))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    for ours, theirs in zip(samples_of(beside), samples_of(turns), strict=True):
        assert ours.pop("versions") == [ours["step"] - 1] * ours["tokens"]  # type: ignore[operator]
        for told in (ours, theirs):
            told.get("environment", {}).pop("seconds", None)  # type: ignore[attr-defined]
        assert ours == theirs
    assert all(metrics["async/staleness_max"] == 0 for _, metrics in facts(beside))


@pytest.mark.slow
def test_staleness_stays_within_its_bound_and_is_recorded(online_file: Path, tmp_path: Path) -> None:
    train(online_file, "run.steps=5", "rollout.max_staleness=2", "log.samples=100", "tape=true")
    run = tmp_path / "runs" / "run"
    stored = samples_of(run)
    for step, metrics in read_metrics(run / "metrics.jsonl"):
        assert all(math.isfinite(value) for value in metrics.values())
        versions = [v for line in stored if line["step"] == step for v in line["versions"]]  # type: ignore[attr-defined]
        ages = [step - 1 - version for version in versions]
        assert min(ages) >= 0
        assert max(ages) == metrics["async/staleness_max"] <= min(2, step - 1)
        assert metrics["async/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
        assert 0 <= metrics["async/worker_busy"] <= 1
        assert 0 <= metrics["async/trainer_busy"] <= 1
        # The clip is held against the policy that drew: no weight, and no pass for old log-probs.
        assert "rollout_corr/weight_mean" not in metrics
        assert "timing_s/old_log_prob" not in metrics
        tape = TapeFolder(run / "tape")
        told = rollouts_of(tape.read_table(tape.rollouts_file(step)), TapeImages(tape.path))
        assert [list(one.versions) for one in told] == [line["versions"] for line in stored if line["step"] == step]
    recipe = load_recipe(str(run / "recipe.yaml"))
    for mode in ("forced", "free"):
        with pytest.raises(Refusal, match=r"(?s)rollout\.max_staleness.*--mode chained"):
            Replay(TapeFolder(run / "tape"), mode).run(recipe, Console.silent())
    # The second step's responses begin in the batch of the first's, with the weights before any update.
    assert dict(read_metrics(run / "metrics.jsonl"))[2]["async/staleness_max"] == 1


@pytest.mark.slow
def test_a_run_goes_on_from_its_checkpoint(online_file: Path, tmp_path: Path) -> None:
    train(online_file, "run.steps=2", "rollout.max_staleness=1")
    train(online_file, "run.steps=4", "rollout.max_staleness=1")
    run = tmp_path / "runs" / "run"
    told = dict(read_metrics(run / "metrics.jsonl"))
    assert sorted(told) == [1, 2, 3, 4]
    # What was generated and not trained is gone: the third step is generated anew, with the weights it trains.
    assert told[3]["async/staleness_max"] == 0
    assert [told[step]["training/epoch"] for step in (1, 2, 3, 4)] == pytest.approx([0.2, 0.4, 0.6, 0.8])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["killed", "interrupted"])
def test_a_run_that_is_ended_leaves_no_worker(online_file: Path, tmp_path: Path, how: str) -> None:
    run = tmp_path / "runs" / "run"
    words = ["train", online_file, "run.steps=1000", "rollout.max_staleness=1", "run.export=false"]
    if how == "killed":
        killed(words, lines(run / "metrics.jsonl", 2))
    else:
        _, told = interrupted(words, lines(run / "metrics.jsonl", 2))
        assert "the same command" in " ".join(told.split())
    # The worker's command names the file of its last lines.
    mark = str(run / "rollout").encode()
    wait_until(lambda: not [pid for pid in Path("/proc").glob("[0-9]*") if mark in _command(pid)])
    assert (run / "rollout" / "worker.log").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint(
    online_file: Path, tmp_path: Path, restarts: int
) -> None:
    """The one that generates falls after step 3. What it has answered ahead is still trained: the run ends when it
    turns to it next, with a checkpoint of step 2 or of step 4."""
    run = tmp_path / "runs" / "run"
    words = ["train", online_file, "run.steps=6", "rollout.max_staleness=1", "run.export=false", "checkpoint.every=2"]
    words += ["checkpoint.asynchronous=false", f"parallel.max_restarts={restarts}", "rollout.worker_restarts=0"]
    environment, once = struck(tmp_path / "blow", 0, signal.SIGKILL, lines(run / "metrics.jsonl", 3), worker=True)
    done = cold_lockstep(*words, **environment, **({} if restarts else {"RANK": "0", "WORLD_SIZE": "1"}))  # alone
    assert once.exists(), done.stdout
    said = " ".join(done.stderr.split())
    assert said.count("the rollout process was killed (SIGKILL)") == 1
    assert "Traceback" not in done.stderr
    told = dict(read_metrics(run / "metrics.jsonl"))
    if not restarts:
        assert done.returncode == 75
        assert "resume from the last checkpoint" in said
        assert max(told) < 6
        return
    assert done.returncode == 0, done.stderr
    assert said.count("restart 1 of 1") == 1
    resumed = re.search(rf"resuming{run}afterstep([24])", "".join(done.stdout.split()))  # lines may be broken
    assert resumed is not None, done.stdout
    assert sorted(told) == [1, 2, 3, 4, 5, 6]
    assert told[int(resumed[1]) + 1]["async/staleness_max"] == 0  # generated anew, with the weights of the checkpoint
    assert all(metrics["async/staleness_max"] <= 1 for metrics in told.values())


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


def test_what_is_not_made_for_it_is_refused_by_name(online_file: Path, tmp_path: Path) -> None:
    (tmp_path / "turns.py").write_text("def respond(prompt, generate):\n    return [], []\n")
    with pytest.raises(Refusal, match=r"rollout\.max_staleness.*cannot run rollout\.function"):
        load_recipe(str(online_file), ["rollout.max_staleness=0", f"rollout.function={tmp_path}/turns.py:respond"])
    recipe = load_recipe(str(online_file), ["rollout.max_staleness=0"])
    divided = load_recipe(str(online_file), ["rollout.max_staleness=0", "parallel.tensor_parallel=2"])
    with pytest.raises(
        Refusal,
        match=r"(?s)rollout\.max_staleness \[unsupported-combination\].*_parallel=2.*remove parallel\.tensor",
    ):
        prepare_online(divided, Cpu(), 2, Console.silent())
    with refuses("rollout.max_staleness", "unsupported-combination", "cpu device"):
        prepare_online(recipe, Alone(), 1, Console.silent())


class Alone(Cpu):
    """A device on which nobody may generate beside training, and which has a neighbour."""

    generates_beside = meets_itself = False

    def count(self) -> int:
        return 2


AHEAD, APART = ["rollout.max_staleness=1"], ["rollout.worker_device=2"]


class Four(Alone):
    """One of four."""

    def count(self) -> int:
        return 4


class Beside(Alone):
    """One on which somebody may."""

    generates_beside = True


def test_a_device_of_its_own_and_a_way_for_the_weights(online_file: Path) -> None:
    def beside(device: Cpu, *words: str, ranks: int = 1) -> str | None:
        recipe = load_recipe(str(online_file), ["rollout.max_staleness=1", *words])
        refuse_beside(recipe, device, ranks, device.count())
        return collective_of(recipe, device)

    # By shared memory on one device, by the collective between two, or as the recipe says.
    assert beside(Cpu()) is None
    assert beside(Cpu(), "rollout.weight_sync=collective") == "gloo"
    assert beside(Beside()) is None
    assert beside(Alone(), "rollout.worker_device=1") == "gloo"
    assert beside(Alone(), "rollout.worker_device=1", "rollout.weight_sync=memory") is None
    with refuses("", "unsupported-combination", "cpu device", remedy="rollout.worker_device"):
        beside(Alone(), "rollout.worker_device=0")
    with refuses("rollout.weight_sync", "unsupported-combination", "gloo"):
        beside(Beside(), "rollout.weight_sync=collective")
    with refuses("rollout.worker_device", "too-few-devices", "cpu device 2", "only 2 are visible"):
        beside(Beside(), "rollout.worker_device=2")
    # Of several ranks on a machine the r-th has the r-th device from there on.
    assert beside(Four(), "rollout.worker_device=2", ranks=2) == "gloo"
    assert [device_of_worker(load_recipe(str(online_file), [*AHEAD, *words]), 1) for words in ([], APART)] == [1, 3]
    with refuses(
        "rollout.worker_device", "device-in-use", "cpu devices 1 to 2", "on devices 0 to 1", remedy="use 2 or"
    ):
        beside(Four(), "rollout.worker_device=1", ranks=2)
    with refuses("rollout.worker_device", "too-few-devices", "cpu devices 3 to 5", "only 4 are visible"):
        beside(Four(), "rollout.worker_device=3", ranks=3)
    for key in ("worker_device=1", "weight_sync=memory"):
        with pytest.raises(Refusal, match=rf"rollout\.{key.split('=')[0]} \[needs-key\]"):
            load_recipe(str(online_file), [f"rollout.{key}"])


def test_the_plan_counts_the_worker(online_file: Path) -> None:
    """The tiny model in fp32: a copy of the weights, once more where they lie in shared memory, and the cache."""

    def planned(*words: str) -> MemoryPlan:
        recipe = load_recipe(str(online_file), list(words))
        return prepare_online(
            recipe, Alone() if "rollout.worker_device=1" in words else Cpu(), 1, Console.silent()
        ).memory

    turns, ahead = planned(), ["rollout.max_staleness=1", "rollout.cache_gb=0.001"]
    same, group, apart = (
        planned(*ahead),
        planned(*ahead, "rollout.weight_sync=collective"),
        planned(*ahead, "rollout.worker_device=1"),
    )
    copy = 4 * turns.parameters
    by_name = {phase.name: phase for phase in turns.phases}
    for plan, weights in ((same, 2 * copy), (group, copy), (apart, 0)):
        *phases, worker = plan.phases
        assert worker.name == "rollout worker"
        assert worker.weights == copy
        assert 1_000_000 <= worker.activations < 30_000_000
        # It is started when the run's models are loaded.
        assert phases[0] == by_name["load"]
        for phase in phases[1:]:
            assert phase.weights == by_name[phase.name].weights + weights
            # The run itself has the cache only while it generates.
            own = 0 if phase.name == "generation" else by_name[phase.name].activations
            assert phase.activations >= own + (worker.activations if weights else 0)
    # Through the host's memory, which the plan tells of where it is another than the device's.
    assert [plan.handed_bytes for plan in (turns, same, group, apart)] == [0, copy, 0, 0]
    assert handed_lines(turns, 2) == []
    (line,) = handed_lines(same, 2)
    assert f"{copy / 2**20:,.1f} MiB of the host's memory" in line
    assert line.endswith("of 2 ranks")
    # Of two ranks each worker has the whole model and half of the prompts.
    ahead = ["rollout.max_staleness=1"]
    one, two = (prepare_online(load_recipe(str(online_file), ahead), Cpu(), n, Console.silent()).memory for n in (1, 2))
    assert one.phases[-1].weights == two.phases[-1].weights == copy
    assert one.phases[-1].activations == 2 * two.phases[-1].activations


def test_a_plan_of_a_cluster_counts_the_workers(online_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They need not be here: no device of this machine is looked for."""
    show_cluster_plan(load_recipe(str(online_file), [*AHEAD, *APART]), "1x2:h200", None)
    told = " ".join(capsys.readouterr().out.split())
    assert "2 additional devices generate (rollout.worker_device)" in told
    assert "of the host's memory" not in told  # by the devices' collective
    show_cluster_plan(load_recipe(str(online_file), AHEAD), "1x2:h200", None)
    assert "MiB of the host's memory, for each of 2" in " ".join(capsys.readouterr().out.split())
    with refuses("rollout.max_staleness", "unsupported-combination", "npu device"):
        show_cluster_plan(load_recipe(str(online_file), AHEAD), "1x2:atlas-800t-a2", None)


@pytest.mark.parametrize(
    ("words", "bypass", "weight"),
    [
        ([], False, "none"),
        (["rollout.max_staleness=0"], False, "none"),
        (["rollout.max_staleness=1"], True, "none"),
        (["rollout.max_staleness=1", "algorithm.loss=geo_mean"], True, "none"),
        # Bounds of one update's size, and a bound of the weight alone.
        (["rollout.max_staleness=1", "algorithm.loss=gspo"], False, "token"),
        (["rollout.max_staleness=1", "algorithm.loss=cispo"], False, "token"),
        (["rollout.max_staleness=1", "algorithm.loss=policy_gradient"], False, "token"),
        (["rollout.max_staleness=1", "algorithm.rollout_correction.bypass=false"], False, "token"),
        (["rollout.max_staleness=1", "algorithm.rollout_correction.cap=5"], False, "token"),
        (["rollout.max_staleness=1", "algorithm.rollout_correction.weight=none"], False, "none"),
        (["rollout.max_staleness=1", "algorithm.rollout_correction.weight=sequence"], False, "sequence"),
        (["rollout.engine=vllm"], False, "token"),
        (["rollout.engine=vllm", "algorithm.rollout_correction.bypass=true"], True, "none"),
    ],
)
def test_stale_responses_are_corrected_unless_the_recipe_says_how(
    online_file: Path, words: list[str], bypass: bool, weight: str
) -> None:
    correction = load_recipe(str(online_file), words).algorithm.rollout_correction
    assert (correction.bypass, correction.weight) == (bypass, weight)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["model.lora.rank=4", "model.dtype=bf16"], ["rollout.engine=hf"]], ids=["an adapter in bf16", "hf"]
)
def test_adapters_and_an_engine_that_cannot_pause(online_file: Path, tmp_path: Path, words: list[str]) -> None:
    train(online_file, "run.steps=3", "rollout.max_staleness=1", *words)
    told = [metrics for _, metrics in read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")]
    first, second, third = (metrics["async/staleness_max"] for metrics in told)
    assert (first, second) == (0, 1)
    assert third <= 1
    assert all(math.isfinite(value) for metrics in told for value in metrics.values())
