"""Five updates by OpenRLHF's offline programs (`train` of train_sft, train_dpo, train_kto, train_rm) and by the SFT
trainer of verl 0.4.1.

A program of its own, as the other trainers are. Reading, shuffling and saving are left out: batches come encoded, in
their order. All else is theirs, down to the optimizer and the schedule; DeepSpeed's engine is that of
`openrlhf_trainer`, and verl has FSDP2 with gloo, in fp32.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from transformers import AutoModelForCausalLM

from . import openrlhf_trainer, peers
from .openrlhf_trainer import Engine, noted, stand_ins, started


class NotingEngine(Engine):
    """Keeps the weights of the trained model before the first update and after each."""

    weights: ClassVar[list[dict[str, torch.Tensor]]] = []

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.weights.append(noted(self.module))

    @property
    def global_steps(self) -> int:
        return self.done // self.parts

    def step(self) -> None:
        super().step()
        if self.done % self.parts == 0:
            self.weights.append(noted(self.module))


def initialize(*, model: Any, config: dict[str, Any], optimizer: Any = None, **more: Any) -> tuple[Any, ...]:
    """A reference has no optimizer."""
    if optimizer is None and "optimizer" not in config:
        sizes = {"train_batch_size": 1, "train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0}
        return Engine(model, None, None, sizes), None, None, None
    given = {"lr_scheduler": None, **more}
    return openrlhf_trainer.initialize(model=model, config=config, optimizer=optimizer, **given)


class Batches(list):  # type: ignore[type-arg]
    """A loader of encoded batches."""

    sampler = None


class Rows:
    """Stands for the data set that is read, and for the one that is encoded."""

    collate_fn = None

    def __init__(self, count: int):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def select(self, _: Any) -> Rows:
        return self


def trained(job: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    args = peers.openrlhf_arguments(job["version"], job["program"], job["words"])
    stand_ins()
    vars(importlib.import_module("deepspeed"))["initialize"] = initialize
    load = importlib.import_module
    if job["version"] != "0.7.5":
        # It loads 16 bits only; the weights are those of the file.
        for module in ("openrlhf.models.actor", "openrlhf.models.model", "openrlhf.utils.utils"):
            vars(load(module))["convert_to_torch_dtype"] = lambda _: torch.float32
        args.ds.attn_implementation = "eager"
    strategy = load("openrlhf.utils.deepspeed.deepspeed").DeepspeedStrategy
    strategy.setup_distributed = _distributed
    strategy.setup_dataloader = lambda self, *_, **__: Batches(job["batches"])
    strategy.save_model = lambda self, *_, **__: None
    program = load(f"openrlhf.cli.{job['program']}")
    rows = Rows(job["rows"])
    for name in vars(program):
        if name == "blending_datasets" or name.endswith("Dataset"):
            vars(program)[name] = lambda *_, **__: rows
    if job["program"] == "train_rm":
        # Both sides start with the head of the folder.
        made = program.get_llm_for_sequence_regression
        vars(program)["get_llm_for_sequence_regression"] = lambda *a, **k: partial(made, *a)(
            **{**k, "init_value_head": False}
        )
    NotingEngine.weights.clear()
    program.train(args)
    return list(NotingEngine.weights)


def _distributed(self: Any, *_: Any, **__: Any) -> None:
    """One rank; a mesh of devices would need a GPU."""
    self.world_size, self.ring_attn_rank = 1, 0
    self.accumulated_gradient = self.train_batch_size // self.micro_train_batch_size


class EagerModels:
    """Loads with the attention that a CPU has."""

    @staticmethod
    def from_pretrained(path: str, *, config: Any, torch_dtype: torch.dtype, **_: Any) -> Any:
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=torch_dtype, attn_implementation="eager", trust_remote_code=False
        )
        model._no_split_modules = list(model._no_split_modules)  # a set since transformers 5
        return model


def verl_trained(job: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    """`training_step` of verl's SFT trainer, with the optimizer and the schedule that it builds."""
    from omegaconf import OmegaConf
    from tensordict import TensorDict

    vars(importlib.import_module("verl"))["DataProto"] = importlib.import_module("verl.protocol").DataProto
    module = importlib.import_module("verl.trainer.fsdp_sft_trainer")
    wide = module.MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
    own: dict[str, Any] = {
        "log_gpu_memory_usage": lambda *_, **__: None,
        "AutoModelForCausalLM": EagerModels,
        "MixedPrecisionPolicy": lambda **_: wide,
        "get_init_weight_context_manager": lambda **_: nullcontext,
        "fsdp2_load_full_state_dict": lambda *_: None,  # the weights are loaded, not on the meta device
    }
    vars(module).update(own)
    torch.autocast = lambda *_, **__: nullcontext()  # type: ignore[assignment,misc]
    file = peers.FOLDER / f"verl-{job['version']}" / "verl" / "trainer" / "config" / "sft_trainer.yaml"
    trainer = object.__new__(module.FSDPSFTTrainer)
    trainer.config = OmegaConf.merge(OmegaConf.load(file), OmegaConf.from_dotlist(job["words"]))
    trainer.config.ulysses_sequence_parallel_size = 1
    trainer.use_remove_padding, trainer.device_name = False, "cpu"
    trainer.device_mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",))
    trainer.train_dataloader = job["batches"]
    trainer._build_model_optimizer()
    weights = [whole(trainer.fsdp_model)]
    for ids, attended, mask in job["batches"]:
        places = (attended.cumsum(1) - 1).clamp(min=0)
        names = {"input_ids": ids, "attention_mask": attended, "position_ids": places, "loss_mask": mask}
        trainer.training_step(TensorDict(names, batch_size=len(ids)))
        weights.append(whole(trainer.fsdp_model))
    return weights


def whole(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.full_tensor().detach().clone() for name, p in model.named_parameters()}  # type: ignore[operator]


def main(folder: Path) -> None:
    jobs, done = torch.load(folder / "jobs.pt", weights_only=True), {}
    started()
    openrlhf_trainer.Engine = NotingEngine  # type: ignore[misc]
    reduced = torch.distributed.all_reduce
    for name, job in jobs.items():
        peer = job.get("peer", "openrlhf")
        # One of OpenRLHF's losses asks all ranks for their mean, of which there is one.
        torch.distributed.all_reduce = (lambda *_, **__: None) if peer == "openrlhf" else reduced
        with peers._entered(peer, job["version"]):
            done[name] = {"actor": trained(job) if peer == "openrlhf" else verl_trained(job)}
    torch.save(done, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
