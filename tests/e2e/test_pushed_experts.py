"""Weights that are sharded over ranks, with divided experts, go to servers in buckets or in files, under the names of
the model's files. A server that is restarted while the ranks generate gets the last ones again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from commands import torchrun
from conftest import write_online_recipe
from lockstep.model.tiny import write_tiny
from lockstep.run.metrics import read_metrics
from runs import samples, stored
from sglang_server import Server, serving

pytestmark = [pytest.mark.slow, pytest.mark.torchrun]
FLAGS = ("--enable-deterministic-inference", "--dtype", "float32")
CONFIG = Qwen3MoeConfig(
    vocab_size=259,
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=24,
    initializer_range=0.1,
)
STEPS = 3
# The temperature of the requests of a weight check.
WEIGHT_CHECK = 0.7


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts") / "model"
    write_tiny(folder)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folder)
    return folder


@pytest.fixture
def servers(model: Path) -> Iterator[list[Server]]:
    with ExitStack() as stack:
        yield [stack.enter_context(serving(model, *FLAGS)) for _ in range(2)]


@pytest.mark.parametrize("transport", ["collective", "files"])
def test_two_servers_have_the_weights_of_two_ranks(
    tmp_path: Path, model: Path, servers: list[Server], transport: str
) -> None:
    recipe = write_online_recipe(tmp_path, model)
    common = [f"run.steps={STEPS}", "checkpoint.every=1", "run.export=false"]
    urls = json.dumps([server.url for server in servers])
    served = ["rollout.engine=sglang", f"rollout.url={urls}", f"rollout.weight_sync={transport}"]
    done = torchrun("train", recipe, "parallel.expert_parallel=2", *common, *served)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "run"
    # The last push is before the last update.
    trained = stored(run, STEPS - 1)
    for server in servers:
        own = {name: one.detach() for name, one in server.engine.model.named_parameters()}
        assert own.keys() == trained.keys()
        assert all(torch.equal(own[name], trained[name]) for name in own)
        buckets = [body["names"] for path, body in server.engine.asked if path == "/update_weights_from_distributed"]
        by_broadcast = any("model.layers.0.mlp.experts.7.up_proj.weight" in names for names in buckets)
        assert by_broadcast == (transport == "collective")
    steps = dict(read_metrics(run / "metrics.jsonl"))
    size = sum(one.nbytes for one in trained.values())
    # The first server gets the first weights twice, which calibrates the weight check. Later pushes by broadcast go to
    # both servers at once.
    pushes = {1: 3, 2: 1 if transport == "collective" else 2}
    for step, count in pushes.items():
        assert steps[step]["perf/weight_sync_bytes"] == count * size
        assert steps[step]["timing_s/weight_push"] > 0


@dataclass
class Restart:
    """Restarts a server at the first response of the second step: it has the weights of its folder again."""

    server: Server
    steps: set[str] = field(default_factory=set)
    """The versions of the weights that the server had when it was asked for responses."""
    lost: dict[str, torch.Tensor] | None = None
    found: dict[str, torch.Tensor] | None = None
    """The weights that the server lost, and those that it got next."""

    def __post_init__(self) -> None:
        engine = self.server.engine
        self._generate, self._update = engine.generate, engine.update_weights_from_disk
        engine.generate, engine.update_weights_from_disk = self.generate, self.update  # type: ignore[method-assign]

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: one.detach().clone() for name, one in self.server.engine.model.named_parameters()}

    def generate(self, body: Any) -> Any:
        engine = self.server.engine
        with engine.state:
            if body["sampling_params"]["temperature"] != WEIGHT_CHECK:
                self.steps.add(engine.version)
            if len(self.steps) == 2 and self.lost is None:
                self.lost = self._weights()
                engine.model = AutoModelForCausalLM.from_pretrained(engine.args.model_path, dtype=torch.float32).eval()
                engine.version = engine.args.weight_version
                engine.prefixes.clear()
        return self._generate(body)

    def update(self, body: Any) -> Any:
        answer = self._update(body)
        if self.lost is not None and self.found is None:
            self.found = self._weights()
        return answer


def test_a_server_that_restarts_while_ranks_generate_gets_the_last_weights(tmp_path: Path, model: Path) -> None:
    recipe = write_online_recipe(tmp_path, model)
    common = ["run.steps=2", "run.export=false", "parallel.expert_parallel=2", "log.samples=99"]
    for name in ("undisturbed", "restarted"):
        with serving(model, *FLAGS) as server:
            restart = Restart(server) if name == "restarted" else None
            served = ["rollout.engine=sglang", f"rollout.url={server.url}", "rollout.weight_sync=files"]
            done = torchrun("train", recipe, f"run.name={name}", *common, *served)
            assert done.returncode == 0, done.stdout + done.stderr
    assert restart is not None
    assert restart.lost is not None
    assert restart.found is not None
    assert all(torch.equal(restart.lost[name], restart.found[name]) for name in restart.lost)
    runs = tmp_path / "runs"
    assert samples(runs / "restarted") == samples(runs / "undisturbed")
    # The files of the last push are kept only while the run needs them.
    assert not list(Path("/dev/shm").glob("lockstep-weights-*"))
