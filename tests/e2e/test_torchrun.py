"""Two real processes against one: the same losses, gradients and weights; one rank's failure ends both."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from commands import changed_lockstep, lockstep, torchrun
from conftest import write_jsonl
from hang import HANG
from lockstep.run.metrics import read_metrics
from runs import close, stored

pytestmark = pytest.mark.torchrun


def history(folder: Path, name: str) -> list[float]:
    return [metrics[name] for _, metrics in read_metrics(folder / "metrics.jsonl") if name in metrics]


def weights(folder: Path, step: int = 6) -> Mapping[str, torch.Tensor]:
    return stored(folder, step)


@pytest.mark.parametrize("lora", [pytest.param(False, marks=pytest.mark.slow), True])
def test_two_processes_train_what_one_does(recipe_file: Path, tmp_path: Path, lora: bool) -> None:
    # eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
    common = ["optim.eps=1e-4", "val.every=3", *(["model.lora.rank=4"] if lora else [])]
    one = lockstep("train", recipe_file, "run.name=one", *common)
    assert one.returncode == 0, one.stderr
    two = torchrun("train", recipe_file, "run.name=two", *common)
    assert two.returncode == 0, two.stderr
    single, double = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    for metric in ("train/loss", "train/grad_norm", "val/loss", "train/tokens", "train/trained_tokens"):
        assert history(double, metric) == pytest.approx(history(single, metric), rel=1e-5), metric
    assert close(weights(double), weights(single))
    assert close(load_file(double / "export" / "model.safetensors"), load_file(single / "export" / "model.safetensors"))
    # Rank 0 alone speaks.
    assert two.stdout.count("saved ") == one.stdout.count("saved ")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


@pytest.mark.slow
def test_two_agents_that_meet_train_what_one_process_does(recipe_file: Path, tmp_path: Path) -> None:
    """One torchrun a node, as on two machines: each starts one rank, and they find each other at an address."""
    common = ["optim.eps=1e-4", "run.export=false"]
    one = lockstep("train", recipe_file, "run.name=one", *common)
    assert one.returncode == 0, one.stderr
    meeting = ["--nnodes", "2", "--nproc-per-node", "1", "--rdzv-id", "two"]
    meeting += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *meeting, "-m", "lockstep", "train", str(recipe_file)]
    files = [tmp_path / f"agent_{number}.txt" for number in range(2)]
    agents = []
    try:
        for file in files:
            with file.open("w") as out:
                words = [*command, "run.name=two", *common]
                agents.append(subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT))
        for agent in agents:
            agent.wait(timeout=HANG)
    finally:
        for agent in agents:
            agent.terminate()  # which ends its rank too
            agent.wait()
    told = [file.read_text() for file in files]
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(told)
    assert sum("on each of 2 device(s)" in text for text in told) == 1  # rank 0 alone speaks, whichever agent has it
    single, double = tmp_path / "runs" / "one", tmp_path / "runs" / "two"
    for metric in ("train/loss", "train/grad_norm", "val/loss", "train/tokens", "train/trained_tokens"):
        assert history(double, metric) == pytest.approx(history(single, metric), rel=1e-5), metric
    assert close(weights(double), weights(single))


@pytest.mark.slow
def test_greedy_answers_are_those_of_one_process(recipe_file: Path, tmp_path: Path) -> None:
    """Before any training step and after; each process answers its share with the gathered model."""
    rows: list[dict[str, object]] = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": f"{a}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
        }
        for a in range(7)
    ]
    questions = write_jsonl(tmp_path / "questions.jsonl", rows)
    common = [
        "data.val=[]",
        f"val.questions={questions}",
        "val.at_start=true",
        "val.max_new_tokens=12",
        "optim.eps=1e-4",
    ]
    assert lockstep("train", recipe_file, "run.name=one", *common).returncode == 0
    two = torchrun("train", recipe_file, "run.name=two", *common)
    assert two.returncode == 0, two.stderr
    one_samples, two_samples = ((tmp_path / "runs" / name / "samples.jsonl").read_text() for name in ("one", "two"))
    assert one_samples == two_samples
    assert one_samples.count("\n") == 14


@pytest.mark.slow
def test_an_update_with_fewer_rows_than_ranks(recipe_file: Path, tmp_path: Path) -> None:
    common = ["optim.eps=1e-4", "batch.rows_per_update=1"]
    assert lockstep("train", recipe_file, "run.name=one", *common).returncode == 0
    two = torchrun("train", recipe_file, "run.name=two", *common)
    assert two.returncode == 0, two.stderr
    assert close(weights(tmp_path / "runs" / "two"), weights(tmp_path / "runs" / "one"))


@pytest.mark.slow
def test_a_run_changes_its_number_of_processes(recipe_file: Path, tmp_path: Path) -> None:
    common = ["optim.eps=1e-4", "optim.schedule=constant"]
    assert lockstep("train", recipe_file, "run.name=one", *common).returncode == 0
    first = torchrun("train", recipe_file, "run.name=moved", *common, "run.steps=3")
    assert first.returncode == 0, first.stderr
    second = lockstep("train", recipe_file, "run.name=moved", *common)
    assert second.returncode == 0, second.stderr
    assert "after step 3" in " ".join(second.stdout.split())
    assert close(weights(tmp_path / "runs" / "moved"), weights(tmp_path / "runs" / "one"))


def test_a_failing_rank_ends_all_with_its_error(recipe_file: Path, tmp_path: Path) -> None:
    """Rank 1 alone falls over: its own error must be shown and nobody may hang."""
    change = (
        "import lockstep.train.step as step\n"
        "def fail(*_):\n"
        "    raise RuntimeError('the second device fell over')\n"
        "if os.environ['RANK'] == '1':\n"
        "    step.Learner.optim_step = fail\n"
    )
    done = torchrun("train", recipe_file, program=changed_lockstep(tmp_path, change))
    assert done.returncode != 0
    assert "the second device fell over" in done.stderr, done.stderr
    assert not list((tmp_path / "runs" / "run" / "checkpoints").glob("step_*"))


@pytest.mark.slow
def test_bad_input_is_told_once(recipe_file: Path, tmp_path: Path) -> None:
    """Also where rank 0, which tells it, comes seconds after the other, as on a busy machine."""
    change = (
        "import lockstep.cli as cli\n"
        "tell = cli._report\n"
        "if os.environ['RANK'] == '0':\n"
        "    cli._report = lambda refusal: (time.sleep(5), tell(refusal))\n"
    )
    done = torchrun("train", recipe_file, "data.train=nowhere.jsonl", program=changed_lockstep(tmp_path, change))
    assert done.returncode != 0
    assert done.stderr.count("nowhere.jsonl [") == 1, done.stderr
    assert "rank 1:" not in done.stderr


@pytest.mark.slow
def test_a_weight_that_one_rank_finds_broken_is_refused_by_all(
    recipe_file: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    """By the name that it has in its files; its row is in the slice of the last rank, for which the others wait."""
    model = shutil.copytree(tiny_folder, tmp_path / "broken")
    weights = load_file(model / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    weights[name][-1, 0] = float("nan")
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    done = torchrun("train", recipe_file, f"model.path={model}")
    assert done.returncode != 0
    assert done.stderr.count(f"its weight {name} holds NaN") == 1, done.stderr
    assert "rank 1:" not in done.stderr
    assert "RuntimeError" not in done.stderr
