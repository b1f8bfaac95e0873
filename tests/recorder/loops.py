"""Training loops of other frameworks with the recorder in them, for the environments that have these frameworks.

    python loops.py NAME MODEL FOLDER

Nothing here imports lockstep, and nothing in the frameworks is replaced: their own code makes the updates, on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # where lockstep is not installed
    sys.path.insert(0, str(Path(__file__).parents[2] / "src"))
    os.environ.update({"CUDA_VISIBLE_DEVICES": "", "WANDB_DISABLED": "true", "HF_HUB_OFFLINE": "1"})

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep_record import record

ROWS, WIDTH, PROMPT, UPDATES = 8, 16, 6, 3


def rows(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids, and a mask with padding on the left of prompts and on the right of responses."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 200, (ROWS, WIDTH), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(ROWS):
        mask[row, : row % 3] = 0
        mask[row, WIDTH - row % 4 :] = 0
    return ids, mask


def plain(model: str, folder: str, *, fault: Any = None, **settings: Any) -> torch.nn.Module:
    """SFT in plain torch, two micro-batches an update."""
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_pretrained(model).float().train()
    if fault is not None:
        fault(network)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
    with record(network, optimizer, folder, **{"every": 2, **settings}) as recorder:
        for update in range(UPDATES):
            ids, mask = rows(update)
            for part in (slice(0, 4), slice(4, 8)):
                logits = network(input_ids=ids[part], attention_mask=mask[part]).logits.float()
                said = torch.log_softmax(logits, -1)[:, :-1].gather(2, ids[part, 1:, None])[..., 0]
                trained = mask[part, 1:] * mask[part, :-1]
                trained[:, :PROMPT] = 0
                (-(said * trained).sum() / 60).backward()
            torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recorder.log(tokens=int(mask.sum()))
    return network


def verl(model: str, folder: str) -> None:
    """The PPO update of verl's FSDP worker: `DataParallelPPOActor.update_policy`, bf16 autocast over fp32 weights."""
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.workers.actor.dp_actor import DataParallelPPOActor

    for name in ("memory_allocated", "memory_reserved"):  # verl logs them, and the CPU has none
        setattr(torch.cpu, name, lambda: 0)
    torch.cpu.mem_get_info = lambda: (0, 0)  # type: ignore[attr-defined]
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}.store", rank=0, world_size=1)
    network = AutoModelForCausalLM.from_pretrained(model).float()
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=1e-2)
    import verl as package

    shipped = OmegaConf.load(Path(package.__file__).parent / "trainer" / "config" / "ppo_trainer.yaml")
    config = OmegaConf.merge(
        shipped.actor_rollout_ref.actor,
        {"ppo_mini_batch_size": 4, "ppo_micro_batch_size_per_gpu": 2, "use_torch_compile": False, "grad_clip": 1.0},
    )
    actor = DataParallelPPOActor(config, network, optimizer)
    with record(actor.actor_module, actor.actor_optimizer, folder, every=2, temperature=0.8):
        for step in range(2):
            ids, mask = rows(step)
            responses = ids[:, PROMPT:]
            draw = torch.Generator().manual_seed(step)
            tensors = {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": (mask.cumsum(1) - 1).clamp(min=0),
                "responses": responses,
                "advantages": torch.randn(ROWS, 1, generator=draw).expand(-1, WIDTH - PROMPT).contiguous(),
            }
            data = DataProto.from_dict(tensors=tensors, meta_info={"temperature": 0.8, "micro_batch_size": 4})
            data.meta_info["use_dynamic_bsz"] = False
            old, _ = actor.compute_log_prob(data)
            data.batch["old_log_probs"] = old
            actor.update_policy(data)


def trl_sft(model: str, folder: str) -> None:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    _train_trl(
        SFTTrainer, SFTConfig, model, folder, Dataset.from_list([{"text": f"{n} + 1 = {n + 1}"} for n in range(16)])
    )


def trl_dpo(model: str, folder: str) -> None:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    pairs = [{"prompt": f"{n} + 1 =", "chosen": f" {n + 1}", "rejected": f" {n + 3}"} for n in range(16)]
    _train_trl(DPOTrainer, DPOConfig, model, folder, Dataset.from_list(pairs))


def trl_grpo(model: str, folder: str) -> None:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    prompts = Dataset.from_list([{"prompt": f"{n} + 1 ="} for n in range(16)])
    more = {"num_generations": 4, "max_completion_length": 8, "temperature": 0.8, "beta": 0.04}
    reward = {"reward_funcs": [lambda completions, **_: [float(sum(map(str.isdigit, c))) for c in completions]]}
    _train_trl(GRPOTrainer, GRPOConfig, model, folder, prompts, more, reward, temperature=0.8)


def _train_trl(
    trainer: Any,
    config: Any,
    model: str,
    folder: str,
    dataset: Any,
    more: Any = None,
    given: Any = None,
    **settings: Any,
) -> None:
    """The trainer makes its optimizer itself, so the recorder looks for it."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    names = set(config.__dataclass_fields__)
    device = {"use_cpu": True} if "use_cpu" in names else {}
    arguments = config(
        output_dir=f"{folder}.trainer", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=UPDATES,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to=[], bf16=False, seed=1,
        **device, **(more or {}),
    )  # fmt: skip
    network = AutoModelForCausalLM.from_pretrained(model).float()
    made = trainer(model=network, args=arguments, train_dataset=dataset, processing_class=tokenizer, **(given or {}))
    with record(made.model, None, folder, every=2, **settings):
        made.train()


if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    globals()[name](*paths)
