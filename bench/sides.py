"""The sides of `bench/sft.py`: the same rows through lockstep, TRL's SFTTrainer and a plain transformers loop.

Each side holds its own copy of the model and trains on; `train_pass` takes every row once and says how long it took.
`first_update` trains one update from the fresh weights and returns its loss and gradient norm together with the rows
that were in it, so that the caller can hold it against ours.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.data.batching import micro_batch, plan_micro_batches
from lockstep.device.base import Device
from lockstep.methods.sft import token_loss
from lockstep.model.load import load_policy
from lockstep.model.load_folder import DTYPES
from lockstep.model.policy import Policy, Scoring
from lockstep.parallel.world import World
from lockstep.recipe.schema import Lora, Model, Optim
from lockstep.train.optim import Optimizer
from lockstep.train.step import Learner
from lockstep.types import Example, MicroBatch, Origin

Row = list[int]
EXPERT_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "experts.gate_up_proj", "experts.down_proj"]


@dataclass(frozen=True)
class Terms:
    """What every side is given, whatever the rows are. `tokens` bounds a micro-batch, padding included."""

    device: Device
    model: str
    dtype: str
    masters: bool
    rows: int
    tokens: int
    optim: Optim

    @property
    def autocast(self) -> bool:
        """bf16 compute over fp32 weights, the peers' way of keeping fp32 masters."""
        return self.dtype == "bf16" and self.masters

    def their_model(self, attention: str) -> Any:
        dtype = torch.float32 if self.masters else DTYPES[self.dtype]
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype, attn_implementation=attention)

    def rows_within(self, widest: int) -> int:
        """Rows of a padded micro-batch: as many as stay in the budget when the widest is among them."""
        fitting = max(1, self.tokens // widest)
        return max(n for n in range(1, min(fitting, self.rows) + 1) if self.rows % n == 0)


@dataclass(frozen=True)
class Work(Terms):
    """The work of SFT: `rows` of the pool make an update. `lora` is the rank of an adapter, if one is trained."""

    pool: list[Row]
    lora: int | None = None
    experts: bool = False
    """Whether the adapter is one of attention and of stacked experts, instead of one of all linear layers."""

    @property
    def updates(self) -> list[list[Row]]:
        return [self.pool[start : start + self.rows] for start in range(0, len(self.pool), self.rows)]

    @property
    def padded_rows(self) -> int:
        return self.rows_within(max(len(row) for row in self.pool))


class Seconds(NamedTuple):
    """`cpu` adds up over threads and leaves out what other programs took: the steadier one on a shared machine."""

    wall: float
    cpu: float


class Stopwatch:
    def __init__(self, device: Device):
        self.device = device
        device.synchronise()
        self.began = Seconds(time.perf_counter(), time.process_time())

    def read(self) -> Seconds:
        self.device.synchronise()
        return Seconds(time.perf_counter() - self.began.wall, time.process_time() - self.began.cpu)


@dataclass(frozen=True)
class Update:
    """One update as a side computed it: mean loss over trained tokens, gradient norm, and the rows."""

    loss: float
    norm: float
    rows: list[Row]


SFT = token_loss


def learner_of(policy: Policy, device: Device, optim: Optim, *, masters: bool) -> Learner:
    """A learner that trains with the device's AdamW, as `lockstep train` does."""
    optimizer = Optimizer(policy.trainable(), optim, masters=masters, fused=device.fused_optimizer, kernel=device.adamw)
    return Learner(policy, optimizer, device.torch_device(), World())


class Ours:
    """lockstep: packed micro-batches under the token budget."""

    name = "lockstep"

    def __init__(self, work: Work):
        self.work = work
        self.where = work.device.torch_device()
        targets = {"targets": EXPERT_TARGETS} if work.experts else {}
        adapter = None if work.lora is None else Lora(rank=work.lora, alpha=2.0 * work.lora, **targets)
        settings = Model(path=work.model, dtype=work.dtype, master_weights=work.masters, lora=adapter)
        policy = load_policy(settings, self.where, work.device.attention, seed=0, scoring=Scoring(alike=True))
        self.learner = learner_of(policy, work.device, work.optim, masters=work.masters)
        self.about = f"packed to {work.tokens} tokens a micro-batch, attention {policy.kernel}"

    def train_pass(self) -> Seconds:
        watch = Stopwatch(self.work.device)
        for update in self.work.updates:
            self.learner.forward_backward(self._micro_batches(update), SFT)
            self.learner.optim_step(self.work.optim.lr)
        return watch.read()

    def first_update(self) -> Update:
        return self.look_at(self.work.updates[0])

    def look_at(self, rows: list[Row]) -> Update:
        """Loss and gradient norm of some rows; the weights stay as they are."""
        loss = self.learner.forward_backward(self._micro_batches(rows), SFT).loss
        norm = self.learner.optimizer.gradient_norm().item()
        self.learner.optimizer.forget()
        return Update(loss, norm, rows)

    def _micro_batches(self, rows: list[Row]) -> list[MicroBatch]:
        examples = [Example(row, [1] * len(row), Origin("bench", i)) for i, row in enumerate(rows)]
        plan = plan_micro_batches([len(row) for row in rows], devices=1, tokens=self.work.tokens, rows=None)
        return [micro_batch([examples[i] for i in members], packed=True, pad_id=0) for members in plan[0]]


class Trl:
    """TRL's SFTTrainer on the same token ids, driven by its own `train()`.

    Its sampler, collator, callbacks and metrics are in the time, its set-up is not. `variant` is one of its own
    settings: `padded` (its default), `grouped` (`train_sampling_strategy="group_by_length"`), `single` (a row a
    micro-batch, so nothing is padded), `packed` (`packing=True`, which is padding-free) or `liger` (padded, with
    `use_liger_kernel=True`).
    """

    def __init__(self, work: Work, variant: str):
        from datasets import Dataset
        from transformers import PrinterCallback
        from trl import SFTConfig, SFTTrainer

        self.work, self.variant = work, variant
        self.name = f"TRL {variant}"
        self.folder = tempfile.TemporaryDirectory()
        attention = _trl_attention(work) if variant == "packed" else "sdpa"
        at_once = 1 if variant in ("packed", "single") else work.padded_rows
        tokenizer = AutoTokenizer.from_pretrained(work.model)
        rows = Dataset.from_dict({"input_ids": work.pool})
        config = SFTConfig(
            output_dir=self.folder.name,
            train_sampling_strategy="group_by_length" if variant == "grouped" else "sequential",
            packing=variant == "packed",
            max_length=work.tokens,
            use_liger_kernel=variant == "liger",
            **trainer_settings(work, at_once),
        )
        self.clock = make_clock(work.device)
        self.trainer = SFTTrainer(
            model=work.their_model(attention),
            args=config,
            train_dataset=rows,
            processing_class=tokenizer,
            callbacks=[self.clock],
        )
        self.trainer.remove_callback(PrinterCallback)
        if variant == "packed":
            # As many updates as the others, each of as many packed lines as that takes.
            config.gradient_accumulation_steps = -(-len(self.trainer.train_dataset) // len(work.updates))
        self._refuse_lost_tokens()
        self.about = self._describe(attention)

    def train_pass(self) -> Seconds:
        self.trainer.train()
        return self.clock.seconds

    def first_update(self) -> Update:
        first = train_watched(self.trainer, 1)[0]
        return Update(first.loss, first.norm, [row for example in first.examples for row in _split(example)])

    def _refuse_lost_tokens(self) -> None:
        given = sum(len(row) for row in self.work.pool)
        kept = sum(len(ids) for ids in self.trainer.train_dataset["input_ids"])
        if given != kept:
            raise SystemExit(f"{self.name} trains {kept} of {given} tokens: the sides would not do equal work")

    def _describe(self, attention: str) -> str:
        args = self.trainer.args
        if self.variant == "packed":
            lines = len(self.trainer.train_dataset)
            note = "" if attention != "sdpa" else " (no flash attention here: a dense block-diagonal mask)"
            return f"packing=True, rows whole, {lines} lines of at most {args.max_length} tokens, {attention}{note}"
        order = "rows of like length together" if self.variant == "grouped" else "rows in order"
        return f"right-padded rows, {args.per_device_train_batch_size} a micro-batch, {order}, {attention}"


class Plain:
    """A plain transformers loop: `model(labels=...).loss` on right-padded rows, for machines without TRL.

    It holds all logits and computes none of the metrics of SFTTrainer, so it stands for itself, not for TRL.
    """

    def __init__(self, work: Work, variant: str):
        self.work, self.variant = work, variant
        self.name = f"plain transformers {variant}"
        self.at_once = 1 if variant == "single" else work.padded_rows
        self.where = work.device.torch_device()
        self.model = work.their_model("sdpa").to(self.where).train()
        optim = work.optim
        parameters = list(self.model.parameters())
        self.adamw = torch.optim.AdamW(
            [
                {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
                {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            eps=optim.eps,
            fused=work.device.fused_optimizer,
        )
        order = "longest first in each update" if variant == "grouped" else "rows in order"
        self.about = f"right-padded rows, {self.at_once} a micro-batch, {order}, sdpa"

    def train_pass(self) -> Seconds:
        watch = Stopwatch(self.work.device)
        for update in self.work.updates:
            self._update(update)
        return watch.read()

    def first_update(self) -> Update:
        rows = self.work.updates[0]
        loss, norm = self._update(rows)
        return Update(loss, norm, rows)

    def _update(self, rows: list[Row]) -> tuple[float, float]:
        if self.variant == "grouped":
            rows = sorted(rows, key=len, reverse=True)
        targets = sum(len(row) - 1 for row in rows)
        losses = []
        for start in range(0, len(rows), self.at_once):
            batch = _right_padded(rows[start : start + self.at_once], self.where)
            with torch.autocast(self.where.type, torch.bfloat16) if self.work.autocast else nullcontext():
                loss = self.model(**batch, use_cache=False, num_items_in_batch=targets).loss
            loss.backward()
            losses.append(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.work.optim.clip or float("inf"))
        self.adamw.step()
        self.adamw.zero_grad()
        return torch.stack(losses).sum().item(), norm.item()


Side = Ours | Trl | Plain

SIDES = {
    "lockstep": Ours,
    "trl-padded": lambda work: Trl(work, "padded"),
    "trl-grouped": lambda work: Trl(work, "grouped"),
    "trl-single": lambda work: Trl(work, "single"),
    "trl-packed": lambda work: Trl(work, "packed"),
    "trl-liger": lambda work: Trl(work, "liger"),
    "plain-padded": lambda work: Plain(work, "padded"),
    "plain-grouped": lambda work: Plain(work, "grouped"),
    "plain-single": lambda work: Plain(work, "single"),
}


def sides_for(case: str) -> list[str]:
    """The sides of a case on this machine, ours first, the peer's default second."""
    peer = "trl" if has_trl() else "plain"
    if case == "equal":
        return ["lockstep", f"{peer}-padded"]
    liger = find_spec("liger_kernel") is not None
    return [name for name in SIDES if name == "lockstep" or (name.startswith(peer) and (liger or name != "trl-liger"))]


@dataclass(frozen=True)
class Watched:
    """An update of transformers' trainer: mean loss, gradient norm, and the examples that were in it."""

    loss: float
    norm: float
    examples: list[dict[str, Any]]


def train_watched(trainer: Any, updates: int) -> list[Watched]:
    """Train so many updates with the trainer's own `train()`, and say what each of them was."""
    args, collator = trainer.args, trainer.data_collator
    kept = (args.max_steps, args.logging_steps)
    seen: list[dict[str, Any]] = []

    def remember(examples: list[dict[str, Any]]) -> dict[str, Any]:
        seen.extend(examples)
        return collator(examples)

    trainer.data_collator, args.max_steps, args.logging_steps = remember, updates, 1
    trainer.train()
    trainer.data_collator, (args.max_steps, args.logging_steps) = collator, kept
    size = args.gradient_accumulation_steps * args.per_device_train_batch_size
    # The data loader reads one micro-batch ahead, and the log ends with a line on the whole run: neither is an update.
    return [
        Watched(log["loss"], float(log["grad_norm"]), seen[number * size : (number + 1) * size])
        for number, log in enumerate(trainer.state.log_history[:updates])
    ]


def trainer_settings(terms: Terms, at_once: int) -> dict[str, Any]:
    """One pass with `at_once` rows a micro-batch, in the words of transformers' trainer."""
    return {
        "per_device_train_batch_size": at_once,
        "gradient_accumulation_steps": terms.rows // at_once,
        "num_train_epochs": 1,
        **trl_optimizer(terms.optim, terms.device),
        "bf16": terms.autocast,
        "gradient_checkpointing": False,
        "use_cpu": terms.device.name == "cpu",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def trl_optimizer(optim: Optim, device: Device) -> dict[str, Any]:
    """Our optimizer settings in the words of transformers' trainer."""
    return {
        "learning_rate": optim.lr,
        "lr_scheduler_type": "constant",
        "optim": "adamw_torch_fused" if device.fused_optimizer else "adamw_torch",
        "adam_beta1": optim.betas[0],
        "adam_beta2": optim.betas[1],
        "adam_epsilon": optim.eps,
        "weight_decay": optim.weight_decay,
        "max_grad_norm": optim.clip or 0.0,
    }


def has_trl() -> bool:
    return find_spec("trl") is not None and find_spec("datasets") is not None


def _trl_attention(work: Work) -> str:
    """Padding-free lines want flash attention; without it transformers builds a mask from the positions."""
    usable = work.device.name == "cuda" and work.dtype == "bf16" and find_spec("flash_attn") is not None
    return "flash_attention_2" if usable else "sdpa"


def make_clock(device: Device) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        """From before the first batch is fetched to the end of the last update."""

        def on_epoch_begin(self, *_: Any, **__: Any) -> None:
            self.watch = Stopwatch(device)

        def on_epoch_end(self, *_: Any, **__: Any) -> None:
            self.seconds = self.watch.read()

    return Clock()


def _split(example: dict[str, Any]) -> list[Row]:
    """The rows of a packed line, or the one row."""
    ids, rows = list(example["input_ids"]), []
    for length in example.get("seq_lengths", [len(ids)]):
        rows.append(ids[:length])
        ids = ids[length:]
    return rows


def _right_padded(rows: Sequence[Row], device: torch.device) -> dict[str, torch.Tensor]:
    width = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {name: tensor.to(device) for name, tensor in batch.items()}
