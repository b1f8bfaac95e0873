"""Generation beside training in several processes: each rank has a worker, and the run is what it is without them."""

from __future__ import annotations

import json
import math
import re
import signal
from pathlib import Path

import pytest
import torch

import job_ranks
from commands import cold_lockstep, lockstep, torchrun
from conftest import write_online_recipe
from hang import wait_until
from kills import interrupted, killed, lines
from lockstep.model.tiny import write_tiny
from lockstep.run.metrics import read_metrics
from runs import close, difference, facts, samples, stored
from struck import struck

pytestmark = pytest.mark.torchrun
STEPS = 3
# eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
COMMON = [f"run.steps={STEPS}", "run.export=false", "optim.eps=1e-4", "log.samples=99"]


def without_async(run: Path) -> list[tuple[int, dict[str, float]]]:
    told = [(step, {n: v for n, v in metrics.items() if not n.startswith("async/")}) for step, metrics in facts(run)]
    assert told
    return told


def trained(recipe: Path, jobs: dict[str, list[str]], processes: int) -> None:
    """Runs by name, one after the other in the same ranks."""
    told = [[str(recipe), f"run.name={name}", *COMMON, *words] for name, words in jobs.items()]
    done = torchrun(job_ranks.write_jobs(recipe.parent, told), program=job_ranks.PROGRAM, processes=processes)
    assert done.returncode == 0, done.stderr


def taken_prompts(run: Path) -> float:
    return sum(metrics["perf/gen_taken_prompts"] for _, metrics in read_metrics(run / "metrics.jsonl"))


@pytest.mark.slow  # for every day test_online_async.py has the loop of one rank
def test_staleness_0_on_two_ranks_is_the_synchronous_loop(online_file: Path, tmp_path: Path) -> None:
    """Bit for bit: each rank generates the same share, in the same batches, by a process that adds up as it does."""
    trained(online_file, {"turns": [], "beside": ["rollout.max_staleness=0"]}, 2)
    turns, beside = (tmp_path / "runs" / name for name in ("turns", "beside"))
    for again in range(5):
        if not taken_prompts(turns):
            break
        # On a busy machine a rank that is done begins prompts of one that has not come yet. Then the batches are
        # others, and with them the last bits of the log-probs.
        trained(online_file, {f"turns-{again}": []}, 2)
        turns = tmp_path / "runs" / f"turns-{again}"
    assert len(samples(beside)) == STEPS * 4 * 3
    assert samples(beside) == samples(turns)
    assert without_async(beside) == without_async(turns)
    ours, theirs = stored(beside, STEPS), stored(turns, STEPS)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert sorted(file.name for file in (beside / "rollout").iterdir()) == ["worker_0.log", "worker_1.log"]
    for _, metrics in read_metrics(beside / "metrics.jsonl"):
        assert metrics["async/staleness_max"] == metrics["async/staleness_mean"] == 0
        # Both workers had something to do, while both trainers waited.
        assert 0 < metrics["async/worker_busy"] <= 1
        assert 0 <= metrics["async/trainer_busy"] < 1
        assert metrics["async/wait_s"] > 0


LAYOUTS: dict[int, dict[str, list[str]]] = {
    2: {
        "sharded": [],
        "copies": ["parallel.replicate=2"],
        "collective": ["rollout.weight_sync=collective"],
        "context": ["parallel.context_parallel=2"],
        "host": ["parallel.offload=all"],
    },
    3: {"three": []},
    4: {"hybrid": ["parallel.shard=2"]},
}
METHODS: dict[str, list[str]] = {
    "grpo": ["batch.prompts_per_update=2", "algorithm.kl.where=loss"],
    "ppo": ["method=ppo", "rollout.n=1", "batch.prompts_per_update=2", "critic.lr=1e-3", "algorithm.kl.where=reward"],
    "dapo": ["method=dapo"],
    "remax": ["method=remax", "rollout.n=1"],
    "lora": ["model.lora.rank=4"],
}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One process has trained each method, generating in turns, as `runs/METHOD`."""
    folder = tmp_path_factory.mktemp("ranks")
    write_tiny(folder / "model", hidden=128, layers=2)
    file = write_online_recipe(folder, folder / "model")
    trained(file, METHODS, 1)
    return file


@pytest.mark.slow
@pytest.mark.parametrize("ranks", LAYOUTS)
def test_staleness_0_on_any_number_of_ranks_is_one_process(recipe: Path, ranks: int) -> None:
    """In fp32: responses and their scores equal, metrics within 1e-4 (relative; 2e-5 absolute), weights within 1e-5."""
    cases = {(name, "grpo"): words for name, words in LAYOUTS[ranks].items()}
    cases |= {("sharded", method): [] for method in METHODS if ranks == 2 and method != "grpo"}
    jobs = {
        f"{name}-{method}-{ranks}": [*METHODS[method], *words, "rollout.max_staleness=0"]
        for (name, method), words in cases.items()
    }
    trained(recipe, jobs, ranks)
    runs, found = recipe.parent / "runs", {}
    for (_, method), name in zip(cases, jobs, strict=True):
        parts = ("weights", "critic") if method == "ppo" else ("weights",)
        if told := difference(runs / name, runs / method, STEPS, parts, leaving="async/"):
            found[name] = told
    assert not found


def versions_by_step(run: Path) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for line in map(json.loads, (run / "samples.jsonl").read_text().splitlines()):
        found.setdefault(line["step"], []).extend(line["versions"])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_staleness_stays_within_its_bound_and_is_told_of_all_ranks(
    online_file: Path, tmp_path: Path, ranks: int
) -> None:
    # Fewer prompts than three ranks in an update: one of them has nothing to do now and then.
    jobs = {"ahead": ["rollout.max_staleness=1", "run.steps=5"], "few": ["rollout.max_staleness=2", "batch.prompts=2"]}
    trained(online_file, jobs, ranks)
    for name, bound in (("ahead", 1), ("few", 2)):
        run = tmp_path / "runs" / name
        versions = versions_by_step(run)
        for step, metrics in read_metrics(run / "metrics.jsonl"):
            ages = [step - 1 - version for version in versions[step]]
            assert min(ages) >= 0
            assert max(ages) == metrics["async/staleness_max"] <= min(bound, step - 1)
            assert metrics["async/staleness_mean"] == pytest.approx(sum(ages) / len(ages))
            assert all(math.isfinite(value) for value in metrics.values())
            assert 0 <= metrics["async/worker_busy"] <= 1
            assert 0 <= metrics["async/trainer_busy"] <= 1
        # The second step's responses begin in the batches of the first's, with the weights before any update.
        assert dict(read_metrics(run / "metrics.jsonl"))[2]["async/staleness_max"] == 1


@pytest.mark.slow
def test_a_killed_run_goes_on_to_where_an_undisturbed_one_gets(online_file: Path, tmp_path: Path) -> None:
    words = ["train", online_file, *COMMON, "run.steps=4", "rollout.max_staleness=0", "parallel.devices=2"]
    words += ["checkpoint.every=1", "checkpoint.asynchronous=false"]
    run = tmp_path / "runs" / "cut"
    killed([*words, "run.name=cut"], lines(run / "metrics.jsonl", 2))  # the launcher, with all that it started
    wait_until(lambda: not workers_of(run))
    for name in ("cut", "whole"):
        done = lockstep(*words, f"run.name={name}")
        assert done.returncode == 0, done.stderr
    assert samples(run) == samples(tmp_path / "runs" / "whole")
    # Expected lengths are learned anew, so the shares, and with them batches and rounding, may be others.
    assert close(stored(run, 4), stored(tmp_path / "runs" / "whole", 4))


def workers_of(run: Path) -> list[Path]:
    """The worker's command names the file of its last lines."""
    mark = str(run / "rollout").encode()
    return [pid for pid in Path("/proc").glob("[0-9]*") if mark in _command(pid)]


def _command(process: Path) -> bytes:
    try:
        return (process / "cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_worker(online_file: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "run"
    words = [
        "train",
        online_file,
        "run.steps=1000",
        "rollout.max_staleness=1",
        "run.export=false",
        "parallel.devices=2",
    ]
    _, told = interrupted(words, lines(run / "metrics.jsonl", 2))
    assert "the same command" in " ".join(told.split())
    wait_until(lambda: not workers_of(run))


@pytest.mark.slow
@pytest.mark.parametrize("worker", [True, False], ids=["its worker", "the rank"])
def test_what_is_killed_on_one_rank_costs_the_steps_since_the_last_checkpoint(
    online_file: Path, tmp_path: Path, worker: bool
) -> None:
    run = tmp_path / "runs" / "run"
    words = ["train", online_file, "run.steps=6", "rollout.max_staleness=1", "run.export=false", "checkpoint.every=2"]
    words += ["checkpoint.asynchronous=false", "parallel.max_restarts=1", "parallel.devices=2"]
    words += ["rollout.worker_restarts=0"]
    environment, once = struck(tmp_path / "blow", 1, signal.SIGKILL, lines(run / "metrics.jsonl", 3), worker=worker)
    done = cold_lockstep(*words, **environment)
    assert once.exists(), done.stdout
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    why = "the rollout process was killed (SIGKILL)" if worker else "rank 1 was killed by SIGKILL"
    assert said.count(why) == 1, done.stderr
    assert said.count("restart 1 of 1") == 1
    resumed = re.search(rf"resuming{run}afterstep([24])", "".join(done.stdout.split()))  # lines may be broken
    assert resumed is not None, done.stdout
    told = dict(read_metrics(run / "metrics.jsonl"))
    assert sorted(told) == [1, 2, 3, 4, 5, 6]
    assert told[int(resumed[1]) + 1]["async/staleness_max"] == 0  # generated anew, with the weights of the checkpoint
    wait_until(lambda: not workers_of(run))


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_killed_worker_is_started_again_and_the_run_goes_on(
    online_file: Path, tmp_path: Path, staleness: int
) -> None:
    """Three prompts on two ranks: the worker with one prompt runs dry, and takes over responses of the other."""
    words = ["train", online_file, *COMMON, "run.steps=6", f"rollout.max_staleness={staleness}", "batch.prompts=3"]
    words += ["rollout.n=4", "rollout.max_tokens=160", "parallel.devices=2", "rollout.worker_restarts=1"]
    run = tmp_path / "runs" / "cut"
    environment, once = struck(tmp_path / "blow", 1, signal.SIGKILL, lines(run / "metrics.jsonl", 2), worker=True)
    done = cold_lockstep(*words, "run.name=cut", **environment)
    assert once.exists(), done.stdout
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stderr.split())
    assert said.count("the rollout worker was killed (SIGKILL); it starts again (restart 1 of 1)") == 1, done.stderr
    told = dict(read_metrics(run / "metrics.jsonl"))
    assert sorted(told) == [1, 2, 3, 4, 5, 6]
    assert sum(metrics["async/worker_restarts"] for metrics in told.values()) == 1
    assert all(metrics["async/staleness_max"] <= staleness for metrics in told.values())
    assert len(samples(run)) == 6 * 3 * 4
    moved = sum(metrics["async/moved_responses"] for metrics in told.values())
    if staleness:
        assert moved > 0
        return
    # Without staleness no prompt moves, and the lost batch is generated again as it was.
    assert moved == 0
    undisturbed, whole = lockstep(*words, "run.name=whole"), tmp_path / "runs" / "whole"
    assert undisturbed.returncode == 0, undisturbed.stderr
    assert samples(run) == samples(whole)
    ours, theirs = stored(run, 6), stored(whole, 6)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
