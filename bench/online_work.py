"""What `rollout.py` and `grpo_step.py` give to every side, and TRL's GRPOTrainer set up for it."""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback

from lockstep.data.encode.prompt_rows import PromptSet, load_prompts
from lockstep.device.base import Device
from lockstep.model.load_folder import DTYPES
from lockstep.recipe.keys_data import Data, Source
from lockstep.recipe.schema import Optim
from lockstep.types import Prompt
from random_lengths import SHAPES, write_questions, write_random_lengths
from reward import vowels
from sides import trl_optimizer

# Tokens of a block in transformers' continuous batching; its default.
PAGE = 256


@dataclass(frozen=True)
class Work:
    """`prompts` x `n` responses make a step; `tokens` bounds a training micro-batch, padding included."""

    device: Device
    model: str
    questions: str
    rows: list[dict[str, Any]]
    dtype: str
    masters: bool
    prompts: int
    n: int
    max_tokens: int
    at_once: int | None
    """Responses that our engine decodes at once; None leaves it to the recipe."""
    tokens: int
    beta: float
    optim: Optim
    seed: int
    deterministic: bool = False
    """Our side with `run.deterministic`."""

    @property
    def sequences(self) -> int:
        return self.prompts * self.n

    def encoded(self) -> list[Prompt]:
        """The prompts as token ids, in order."""
        return _encoded(self.model, self.questions)

    def longest(self) -> int:
        """Tokens of the longest prompt with the longest response."""
        return max(len(prompt.ids) for prompt in self.encoded()) + self.max_tokens

    def padded_rows(self) -> int:
        """Responses of a padded micro-batch: as many as stay in the budget when the longest is among them."""
        fitting = max(1, self.tokens // self.longest())
        return max(n for n in range(1, min(fitting, self.sequences) + 1) if self.sequences % n == 0)

    def whole_groups(self) -> int:
        """As `padded_rows`, in whole groups of a prompt's responses, and one group at least."""
        fitting = max(1, self.tokens // (self.longest() * self.n))
        return self.n * max(k for k in range(1, min(fitting, self.prompts) + 1) if self.prompts % k == 0)

    def their_model(self) -> Any:
        """As the peers load it: with fp32 masters the weights are fp32 and the compute is autocast."""
        dtype = torch.float32 if self.masters else DTYPES[self.dtype]
        return AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype, attn_implementation="sdpa")


def make_work(
    folder: Path, case: str, args: argparse.Namespace, device: Device, *, masters: bool, beta: float, batches: int = 1
) -> Work:
    """Model and prompts of a case, written to `folder`: `mixed` ends responses at random, `equal` at the limit."""
    mean = args.mean if case == "mixed" else None
    began = time.perf_counter()
    write_random_lengths(folder / "model", args.shape, mean, DTYPES[args.dtype], args.seed, device.name)
    print(f"random weights written in {time.perf_counter() - began:.1f} s", flush=True)
    questions = folder / "questions.jsonl"
    shortest, longest = args.shortest, args.longest
    if args.prompt_tokens:
        shortest = longest = args.prompt_tokens - _around(folder)
    rows = write_questions(questions, args.prompts * batches, shortest, longest, args.seed)
    return Work(
        device=device,
        model=str(folder / "model"),
        questions=str(questions),
        rows=rows,
        dtype=args.dtype,
        masters=masters,
        prompts=args.prompts,
        n=args.n,
        max_tokens=args.max_tokens,
        at_once=args.sequences,
        tokens=args.tokens,
        beta=beta,
        optim=Optim(lr=1e-6, schedule="constant"),
        seed=args.seed,
        deterministic=getattr(args, "deterministic", False),
    )


def _encoded(model: str, questions: str) -> list[Prompt]:
    sources = [Source(path=questions)]
    found: PromptSet = load_prompts(sources, Data(train=sources), AutoTokenizer.from_pretrained(model), 2**31)
    return found.sources[0]


def _around(folder: Path) -> int:
    """Tokens of a prompt that are not its text, which has one for each character."""
    path = folder / "one.jsonl"
    write_questions(path, 1, 10, 10, 0)
    return len(_encoded(str(folder / "model"), str(path))[0].ids) - 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that both benchmarks have."""
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu or auto")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="size of the model, with random weights")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--case", choices=["equal", "mixed", "all"], default="all")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step")
    parser.add_argument("--n", type=int, default=8, help="responses to a prompt")
    parser.add_argument("--max-tokens", type=int, default=256, help="longest response; all have it in the case equal")
    parser.add_argument("--mean", type=float, default=64.0, help="mean length in the case mixed, but for the limit")
    parser.add_argument("--shortest", type=int, default=16, help="characters of the shortest prompt (log-uniform)")
    parser.add_argument("--longest", type=int, default=128, help="characters of the longest prompt")
    parser.add_argument("--prompt-tokens", type=int, help="tokens of every prompt, instead of characters")
    parser.add_argument(
        "--sequences", type=int, help="responses that our engine decodes at once; default: the recipe's"
    )
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a micro-batch, padding included")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each side")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write versions, settings and numbers to this JSON file")


def settle(threads: int | None) -> None:
    """The same quiet process for every side."""
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.getLogger("trl").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning)
    if threads:
        torch.set_num_threads(threads)


def make_trainer(work: Work, folder: str, variant: str, callbacks: list[Any]) -> Any:
    """TRL's GRPOTrainer for the same prompts, responses, reward, loss and optimizer; a step is one update.

    `variant` is one of its own settings: `padded` (its default) generates all responses of the step at once, `parts`
    as many as a micro-batch holds (`steps_per_generation=1`), so that less is padded, and `continuous` uses
    transformers' continuous batching.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    at_once = work.whole_groups() if variant == "parts" else work.padded_rows()
    # Room for every sequence and no more: by default it takes half of the memory, and clears it in every step.
    cache = {"page_size": PAGE, "num_blocks": work.sequences * -(-work.longest() // PAGE), "max_batch_tokens": 8192}
    config = GRPOConfig(
        output_dir=folder,
        per_device_train_batch_size=at_once,
        gradient_accumulation_steps=work.sequences // at_once,
        num_train_epochs=1,
        shuffle_dataset=False,
        num_generations=work.n,
        max_completion_length=work.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        steps_per_generation=1 if variant == "parts" else None,
        use_transformers_continuous_batching=variant == "continuous",
        transformers_continuous_batching_config=cache if variant == "continuous" else None,
        beta=work.beta,
        num_iterations=1,
        epsilon=0.2,
        loss_type="dr_grpo",  # a fixed divisor: the update does not depend on how a variant cuts the step
        scale_rewards="group",
        **trl_optimizer(work.optim, work.device),
        bf16=work.masters and work.dtype == "bf16",
        gradient_checkpointing=False,
        use_cpu=work.device.name == "cpu",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=work.seed,
    )
    trainer = GRPOTrainer(
        model=work.their_model(),
        reward_funcs=_vowels_of_all,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": row["prompt"]} for row in work.rows]),
        processing_class=AutoTokenizer.from_pretrained(work.model),
        callbacks=callbacks,
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="bench-")


def _vowels_of_all(completions: list[Any], **_: Any) -> list[float]:
    return [vowels("letters", completion[0]["content"], "aeiou", {}) for completion in completions]
