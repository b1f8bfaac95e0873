"""Activations that wait on the host, on an NVIDIA device: bit for bit the same run, and a lower peak of memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from conftest import write_online_recipe
from lockstep.data.batching import micro_batch, run_on
from lockstep.device.cuda import Cuda
from lockstep.model.load import load_policy
from lockstep.model.tiny import write_tiny
from lockstep.parallel import offload as activations
from lockstep.preflight.memory_plan import waiting_activations
from lockstep.preflight.model_sizes import LayerKernels, kept_by_layer
from lockstep.recipe import load_recipe
from lockstep.recipe.schema import Model
from lockstep.run.console import Console
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from lockstep.types import Example, Origin
from runs import facts, samples, stored

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]
EXACT = ["device=cuda", "run.deterministic=true", "run.steps=4", "model.dtype=bf16"]
OFFLOAD = "model.activation_offload=true"


@pytest.fixture(autouse=True)
def everything_travels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST", 1)


@pytest.mark.parametrize("keys", [[], ["model.gradient_checkpointing=true"], ["model.lora.rank=4"]], ids=str)
def test_the_same_run(recipe_file: Path, keys: list[str]) -> None:
    folders = []
    for name, more in (("device", []), ("host", [OFFLOAD])):
        recipe = load_recipe(str(recipe_file), [f"run.name={name}", *EXACT, *keys, *more])
        train_offline(recipe, Console.silent())
        folders.append(Path(recipe.run.folder) / name)
    device, host = folders
    assert facts(host) == facts(device)
    mine, theirs = stored(host, 4), stored(device, 4)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_the_same_ppo(tmp_path: Path, tiny_folder: Path) -> None:
    file = write_online_recipe(tmp_path, tiny_folder)
    keys = [*EXACT, "method=ppo", "rollout.n=1", "critic.lr=1e-3", "log.samples=99"]
    for name, more in (("device", []), ("host", [OFFLOAD])):
        train_online(load_recipe(str(file), [f"run.name={name}", *keys, *more]), Console.silent())
    device, host = (tmp_path / "runs" / name for name in ("device", "host"))
    assert facts(host) == facts(device)
    assert samples(host) == samples(device)


class Passes:
    """A model of 12 layers, whose activations weigh more than its weights; its gradients pass by pass."""

    def __init__(self, folder: Path, kernel: str, offload: bool, checkpointing: bool):
        settings = Model(
            path=str(folder), dtype="bf16", activation_offload=offload, gradient_checkpointing=checkpointing
        )
        self.policy = load_policy(settings, torch.device("cuda", 0), kernel, seed=0).train()

    def run(self, seed: int, tokens: int) -> tuple[torch.Tensor, list[torch.Tensor], int]:
        """The loss, the gradients, and the most memory above what was there before."""
        draw = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 256, (tokens,), generator=draw).tolist()
        rows = [
            Example(ids[at : at + 1000], [False] + [True] * 999, Origin("rows", at)) for at in range(0, tokens, 1000)
        ]
        batch = micro_batch(rows, packed=True, pad_id=0)
        self.policy.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        loss = -run_on(self.policy, batch, torch.device("cuda", 0)).logprobs_K.mean()
        loss.backward()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        return loss.detach().cpu(), [p.grad.cpu() for p in self.policy.parameters() if p.grad is not None], peak


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_peak_falls(tmp_path: Path, checkpointing: bool) -> None:
    """And ten passes of changing sizes in a row, without a wait between them, have the same bits."""
    folder = tmp_path / "deep"
    write_tiny(folder, hidden=512, layers=12)
    device = Cuda()
    device.deterministic(True)
    try:
        kept, moved = (Passes(folder, device.attention, offload, checkpointing) for offload in (False, True))
        for seed in range(10):
            tokens = 20_000 - 1000 * (seed % 4)
            (loss, gradients, peak), (other_loss, other_gradients, other_peak) = (
                one.run(seed, tokens) for one in (kept, moved)
            )
            assert torch.equal(loss, other_loss), seed
            assert all(torch.equal(a, b) for a, b in zip(gradients, other_gradients, strict=True)), seed
            config = Qwen2Config.from_pretrained(folder)
            # What a layer keeps at the least: fused norms and feed-forwards.
            each = kept_by_layer(config, tokens, 2, checkpointing, LayerKernels(lean=True, fused=True))
            print(
                f"{tokens} tokens: peak {peak / 2**20:.0f} MiB, {other_peak / 2**20:.0f} with activations on the host"
            )
            # With checkpointing the peak may move to the end of the backward pass, where all gradients are.
            assert peak - other_peak >= 0.5 * waiting_activations(12, each)
    finally:
        device.deterministic(False)
