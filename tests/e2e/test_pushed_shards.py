"""Weights that are sharded over ranks, with divided experts or a LoRA adapter, go to servers in buckets or in files,
under the names of the model's files. A server that is restarted while the ranks generate gets the last ones again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
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


RANK, ALPHA = 4, 8
LORA = (f"model.lora.rank={RANK}", f"model.lora.alpha={ALPHA}", "model.lora.targets=[q_proj, o_proj]", "optim.lr=1e-2")
LORA_FLAGS = ("--enable-lora", "--max-lora-rank", str(RANK), "--lora-target-modules", "all")


def test_a_server_has_the_adapter_of_two_ranks(tmp_path: Path, model: Path) -> None:
    recipe = write_online_recipe(tmp_path, model)
    common = [f"run.steps={STEPS}", "checkpoint.every=1", "run.export=false", "log.samples=99", *LORA]
    with serving(model, *FLAGS, *LORA_FLAGS) as server:
        served = ["rollout.engine=sglang", f"rollout.url={server.url}", "rollout.weight_sync=files"]
        done = torchrun("train", recipe, *common, *served)
        assert done.returncode == 0, done.stdout + done.stderr
        trained = {name: one for name, one in stored(tmp_path / "runs" / "run", STEPS - 1).items() if "lora_" in name}
        assert len(trained) == 8
        (adapted,) = server.engine.adapted.values()
        served_weights, base = dict(adapted.named_parameters()), load_file(model / "model.safetensors")
        for name in [name for name in base if "q_proj" in name or "o_proj" in name]:
            lora_a, lora_b = (
                trained[f"base_model.model.{name.removesuffix('.weight')}.lora_{side}.default.weight"] for side in "AB"
            )
            change = ALPHA / RANK * (lora_b @ lora_a)
            assert change.abs().max() > 1e-3
            assert torch.allclose(served_weights[name], base[name] + change, atol=1e-6)
        assert not [path for path, _ in server.engine.asked if path == "/update_weights_from_disk"]
    steps = dict(read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl"))
    assert steps[2]["perf/weight_sync_bytes"] == sum(one.nbytes for one in trained.values())


@dataclass
class Restart:
    """Restarts a server at the first response of the second step: it has the weights of its folder again, and no
    adapter."""

    server: Server
    steps: set[str] = field(default_factory=set)
    """The versions of the weights that the server had when it was asked for responses."""
    lost: dict[str, torch.Tensor] | None = None
    found: dict[str, torch.Tensor] | None = None
    """The weights that the server lost, and those that it got next."""

    def __post_init__(self) -> None:
        engine = self.server.engine
        self._generate, self._update, self._load = (
            engine.generate,
            engine.update_weights_from_disk,
            engine.load_lora_adapter,
        )
        engine.generate = self.generate  # type: ignore[method-assign]
        engine.update_weights_from_disk = self.update  # type: ignore[method-assign]
        engine.load_lora_adapter = self.load  # type: ignore[method-assign]

    def _weights(self) -> dict[str, torch.Tensor]:
        engine = self.server.engine
        (model,) = engine.adapted.values() if engine.adapted else (engine.model,)
        return {name: one.detach().clone() for name, one in model.named_parameters()}

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
                engine.adapters.clear()
                engine.adapted.clear()
        return self._generate(body)

    def update(self, body: Any) -> Any:
        return self._seen(self._update(body))

    def load(self, body: Any) -> Any:
        return self._seen(self._load(body))

    def _seen(self, answer: Any) -> Any:
        if self.lost is not None and self.found is None:
            self.found = self._weights()
        return answer


@pytest.mark.parametrize(
    ("words", "flags"), [(["parallel.expert_parallel=2"], ()), (LORA, LORA_FLAGS)], ids=["all weights", "adapter"]
)
def test_a_server_that_restarts_while_ranks_generate_gets_the_last_weights(
    tmp_path: Path, model: Path, words: Sequence[str], flags: Sequence[str]
) -> None:
    recipe = write_online_recipe(tmp_path, model)
    common = ["run.steps=2", "run.export=false", "log.samples=99", *words]
    for name in ("undisturbed", "restarted"):
        with serving(model, *FLAGS, *flags) as server:
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
