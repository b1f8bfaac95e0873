"""Five updates by OpenRLHF's offline programs: `train` of train_sft, train_dpo, train_kto and train_rm.

A program of its own, as the other trainers are. Reading, shuffling and saving are left out: batches come encoded, in
their order. All else is OpenRLHF's, down to the optimizer and the schedule; DeepSpeed's engine is that of
`openrlhf_trainer`.
"""

from __future__ import annotations

import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch

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


def main(folder: Path) -> None:
    jobs, done = torch.load(folder / "jobs.pt", weights_only=True), {}
    started()
    torch.distributed.all_reduce = lambda *_, **__: None  # there is one rank
    openrlhf_trainer.Engine = NotingEngine  # type: ignore[misc]
    for name, job in jobs.items():
        with peers._entered("openrlhf", job["version"]):
            done[name] = {"actor": trained(job)}
    torch.save(done, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
