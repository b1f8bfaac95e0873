"""Migrated commands behind the launchers they came with: several processes train as one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from guide_commands import GUIDES, Folders
from hang import HANG
from lockstep.run.metrics import read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]


def losses(folder: Path) -> list[float]:
    steps = [values for _, values in read_metrics(folder / "run" / "metrics.jsonl")]
    return [values["train/loss"] for values in steps if "train/loss" in values]


def words_of(name: str, model: Path, folder: Path) -> tuple[str, list[str]]:
    folder.mkdir()
    program, words = GUIDES[name].words(Folders(model, model, folder))
    return program, [*words, "trainer.device=cpu"] if GUIDES[name].table == "verl" else words


def started(*words: object, **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, *map(str, words)]
    return subprocess.Popen(command, env={**os.environ, **environment}, stderr=subprocess.PIPE, text=True)


def finished(*processes: subprocess.Popen[str]) -> None:
    for process in processes:
        _, told = process.communicate(timeout=HANG)
        assert process.returncode == 0, told[-3000:]


def test_verls_sft_under_torchrun(tiny_folder: Path, tmp_path: Path) -> None:
    """Two ranks have the losses of one. The modules with and without verl's package name train the same."""
    _, words = words_of("SFT-PEFT", tiny_folder, tmp_path / "two")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    finished(started(*torchrun, "-m", "lockstep.compat.verl.trainer.fsdp_sft_trainer", *words))
    _, words = words_of("SFT-PEFT", tiny_folder, tmp_path / "one")
    finished(started("-m", "lockstep.compat.verl", "sft", *words))
    assert len(losses(tmp_path / "two")) == 2
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-3)


def test_openrlhfs_dpo_as_deepspeed_starts_it(tiny_folder: Path, tmp_path: Path) -> None:
    """DeepSpeed's launcher sets the ranks in the environment, and puts `--local_rank` before the arguments."""
    program, words = words_of("DPO", tiny_folder, tmp_path / "two")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        started(
            *("-u", "-m", f"lockstep.compat.openrlhf.cli.{program}", f"--local_rank={rank}", *words),
            **shared,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        for rank in range(2)
    ]
    finished(*ranks)
    assert losses(tmp_path / "two")[0] == pytest.approx(0.693147, abs=1e-3)  # -log sigmoid(0) before the first update


def test_verls_grpo_command_starts_its_devices(tiny_folder: Path, tmp_path: Path) -> None:
    """`trainer.n_gpus_per_node=2` in one command trains on two processes, and gives the metrics of one process."""
    for devices in (1, 2):
        _, words = words_of("GRPO, quickstart", tiny_folder, tmp_path / str(devices))
        words += [f"trainer.n_gpus_per_node={devices}"]
        finished(started("-m", "lockstep.compat.verl.trainer.main_ppo", *words))
        environment = json.loads((tmp_path / str(devices) / "run" / "env.json").read_text(encoding="utf-8"))
        assert environment["world_size"] == devices
    assert (tmp_path / "2" / "run.yaml").is_file()
    one, two = (dict(read_metrics(tmp_path / count / "run" / "metrics.jsonl"))[1] for count in "12")
    assert two["response_length/mean"] == one["response_length/mean"]
    assert two["actor/entropy"] == pytest.approx(one["actor/entropy"], rel=1e-2)
