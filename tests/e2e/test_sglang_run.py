"""GRPO through a server that speaks SGLang's schema: trained, recorded, compared, replayed and put to the checklist."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import write_online_recipe
from lockstep.commands.plan import show_plan
from lockstep.errors import Refusal
from lockstep.parity.checklist.checklist import run_checklist
from lockstep.parity.replay.replay_command import replay
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics
from lockstep.tape.tape_format import TapeFolder
from lockstep.train.start import train
from sglang_server import Server, serving, write_package

pytestmark = pytest.mark.slow
FLAGS = ("--enable-deterministic-inference", "--dtype", "float32")
SERVED = ("rollout.engine=sglang", "run.steps=2", "tape=true")


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with serving(tiny_folder, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path, server: Server) -> Path:
    folder = tmp_path_factory.mktemp("sglang-run")
    recipe = load_recipe(str(write_online_recipe(folder, tiny_folder)), [*SERVED, f"rollout.url={server.url}"])
    train(recipe)
    return folder / "runs" / "run"


def test_what_the_run_leaves_tells_the_engine_and_the_weights_of_every_token(run: Path) -> None:
    engine = json.loads((run / "env.json").read_text())["engine"]
    assert (engine["name"], engine["version"], engine["servers"]) == ("sglang", "sglang 0.5.23", 1)
    assert "bounds" in engine["probe"]
    assert TapeFolder(RunFolder(run).tape).manifest()["engine"]["name"] == "sglang"
    steps = dict(read_metrics(run / "metrics.jsonl"))
    for step in (1, 2):
        assert steps[step]["training/rollout_probs_diff_mean"] < 1e-5
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    drawn = {(sample["step"], version) for sample in samples for version in sample.get("versions", [])}
    assert drawn == {(1, 0), (2, 1)}


def test_a_replay_with_the_built_in_engine_learns_from_the_recorded_responses_and_says_so(run: Path) -> None:
    result = replay(run, "forced", ["rollout.engine=native", "rollout.url=null"], Console.silent())
    assert result is not None
    assert result.in_step, result.cause
    assert {"log-probs", "gradient", "weights"} <= {check.stage for check in result.checks}
    assert "generation" not in {check.stage for check in result.checks}
    assert any("Generation is not checked" in remark and "sglang" in remark for remark in result.remarks)
    with pytest.raises(Refusal, match="engine sglang sampled"):
        replay(run, "free", ["rollout.engine=native", "rollout.url=null"], Console.silent())


def test_a_replay_with_the_same_engine_draws_the_recorded_responses_again(run: Path) -> None:
    result = replay(run, "forced", [], Console.silent())
    assert result is not None
    assert result.in_step, result.cause
    generation = [check for check in result.checks if check.stage == "generation"]
    assert generation
    assert all("0 of 12 responses" in check.what for check in generation)


def test_the_checklist_hands_weights_over_with_the_probe(run: Path) -> None:
    items = {item.name: item for item in run_checklist(run, (), Console.silent())}
    assert items["weight sync"].passed, items["weight sync"]
    assert "weight check: log-probs off by" in items["weight sync"].measured
    assert items["first tokens"].passed


def test_the_checklist_finds_a_tensor_that_does_not_arrive(run: Path, server: Server) -> None:
    server.engine.dropped_tensors = {"model.layers.1.self_attn.o_proj.weight"}
    # What it starts with is what it has.
    try:
        items = {item.name: item for item in run_checklist(run, (), Console.silent())}
    finally:
        server.engine.dropped_tensors = set()
    assert items["weight sync"].passed is False
    assert "does not generate with the weights" in items["weight sync"].measured
    others = {
        item.name: item for item in run_checklist(run, ("rollout.engine=native", "rollout.url=null"), Console.silent())
    }
    assert others["first tokens"].passed is None
    assert "sglang" in others["first tokens"].means


def test_a_server_that_the_run_starts_by_sglangs_own_command_line(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = write_package(tmp_path / "package")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]))
    words = ["rollout.engine=sglang", "run.steps=1", f"rollout.server.python={sys.executable}"]
    words += [f"rollout.server.env.PYTHONPATH={package}"]
    recipe = load_recipe(str(write_online_recipe(tmp_path, tiny_folder)), words)
    show_plan(recipe, 1)
    assert "sglang 0.5.23" in capsys.readouterr().out
    train(recipe)
    run = tmp_path / "runs" / "run"
    assert json.loads((run / "env.json").read_text())["engine"]["started"] is True
    assert dict(read_metrics(run / "metrics.jsonl"))[1]["training/rollout_probs_diff_mean"] < 1e-5


def test_adapters_are_trained_through_the_server(tmp_path: Path, tiny_folder: Path) -> None:
    flags = ("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "all")
    with serving(tiny_folder, *FLAGS, *flags) as server:
        words = [*SERVED, f"rollout.url={server.url}", "model.lora.rank=4"]
        train(load_recipe(str(write_online_recipe(tmp_path, tiny_folder)), words))
        assert not [path for path, _ in server.engine.asked if path == "/update_weights_from_disk"]
    steps = dict(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"))
    assert steps[2]["training/rollout_probs_diff_mean"] < 1e-5
