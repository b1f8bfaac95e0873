"""Step times of SFT and GRPO on rows with images, beside TRL's trainers, in one run.

    python bench/vision.py                                       # a tiny Qwen2.5-VL, as a check on a CPU
    python bench/vision.py --shape qwen2.5-vl-3b --dtype bf16 --no-masters --rows 32 --prompts 16 --n 8 --side 448 \
        --max-tokens 256 --tokens 16384 --out result.json

The images are noise of `--side` pixels, each with another question. Both sides have the same random weights, rows,
images, reward, loss, optimizer and number of tokens per micro-batch, and train all weights with the tower. The first
update of each side is compared first: TRL trains on the same rows (SFT) or the same responses (GRPO), and loss and
gradient norm must agree. Then the sides take turns: A B A B. TRL pads rows, because it refuses packing with images, and
processes the images of each batch again; this is in its time. lockstep reads and encodes its rows before the run. Both
models with their optimizers are on the device at once, so the 3B shape needs `--no-masters`.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import string
import tempfile
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# As lockstep sets it for itself; here it must come before torch, and for every side.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

import numpy as np
import pyarrow
import pyarrow.parquet
import torch
import transformers

import grpo_sides
import reward
from lockstep.data.batching import micro_batch, plan_micro_batches
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.device.base import Device
from lockstep.device.select import select
from lockstep.methods.sft import token_loss
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.load_folder import DTYPES
from lockstep.model.policy import Scoring
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_data import Data
from lockstep.recipe.methods import with_method_defaults
from lockstep.recipe.recipe_checks import with_derived_defaults
from lockstep.recipe.schema import Model, Optim, Recipe
from lockstep.types import Example
from lockstep.vision.images import png_bytes
from online_work import settle
from random_lengths import teach_endings
from report import machine, spread, summary, write_record
from sides import Seconds, Stopwatch, has_trl, learner_of, make_clock, train_watched, trl_optimizer

# How far loss and gradient norm (relative) of the first update may lie from ours. In bf16 this is coarse: TRL runs
# autocast over fp32 weights, we run in bf16 beside fp32 masters.
TOLERANCE = {"fp32": (1e-4, 1e-3), "bf16": (2e-2, 1e-1)}
# The published sizes of Qwen2.5-VL-3B.
TEXT_3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
VISION_3B = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "out_hidden_size": 2048,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "window_size": 112,
}
SHAPES = ("tiny", "qwen2.5-vl-3b")


def write_model(folder: Path, shape: str, device: str, dtype: torch.dtype) -> None:
    """Random weights, with the tokenizer and image processor of the tiny model."""
    write_tiny_vlm(folder)
    unit = 28**2
    path = folder / "preprocessor_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "size": {"shortest_edge": unit, "longest_edge": 1280 * unit}}))
    config = transformers.AutoConfig.from_pretrained(folder)
    ids = {name: value for name, value in config.to_dict().items() if name.endswith("_token_id")}
    special = {name: ids[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in ids}
    if shape != "tiny":
        text = {**TEXT_3B, **special, "tie_word_embeddings": True}
        config = transformers.Qwen2_5_VLConfig(
            text_config=text, vision_config=VISION_3B, tie_word_embeddings=True, **ids
        )
    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=dtype)
    # Responses never end, so that those of all sides have the same length.
    decoder = SimpleNamespace(get_input_embeddings=model.get_input_embeddings, model=model.model.language_model)
    teach_endings(decoder, ids["eos_token_id"], None, 0)
    model.save_pretrained(folder)


def drawn_rows(count: int, side: int, letters: int, seed: int) -> list[dict[str, Any]]:
    """Questions about images of noise, and answers. All questions and answers have the same length, so that padding
    costs TRL nothing."""
    draw, words = np.random.default_rng(seed), random.Random(seed)

    def text(length: int) -> str:
        return "".join(words.choice(string.ascii_lowercase) for _ in range(length))

    rows = []
    for _ in range(count):
        png = png_bytes(draw.integers(0, 255, (side, side, 3), dtype=np.uint8))
        rows.append({"question": text(24), "answer": text(letters), "image": png})
    return rows


def processor(folder: str) -> Any:
    """The processor of the model for images, without videos: those need torchvision."""
    from transformers import ProcessorMixin
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    class Processor(Qwen2_5_VLProcessor):
        def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None) -> None:
            self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
            self.image_token_id, self.video_token_id = tokenizer.convert_tokens_to_ids(
                [self.image_token, self.video_token]
            )
            ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    images = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Processor(images, tokenizer, tokenizer.chat_template)


def chat(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": row["question"]}]


class Work:
    """What both sides are given. `grpo_sides.py` reads the attributes of `online_work.Work`, which this class has."""

    def __init__(self, folder: Path, args: argparse.Namespace, device: Device):
        self.device, self.args = device, args
        self.model, self.dtype = str(folder / "model"), args.dtype
        self.masters = args.dtype == "bf16" and not args.no_masters
        self.tokens, self.n, self.prompts, self.sequences = args.tokens, args.n, args.prompts, args.prompts * args.n
        self.optim = Optim(lr=1e-6, schedule="constant")
        write_model(folder / "model", args.shape, device.name, DTYPES[args.dtype])
        self.rows = drawn_rows(2 * max(args.rows, args.prompts), args.side, args.answer, args.seed)
        self.sft_file, self.prompt_file = folder / "sft.parquet", folder / "prompts.parquet"
        images = [{"images": [{"bytes": row["image"], "path": None}]} for row in self.rows]
        answers = [[*chat(row), {"role": "assistant", "content": row["answer"]}] for row in self.rows]
        same = {"data_source": "letters", "reward_model": {"style": "rule", "ground_truth": "aeiou"}}
        chats = [{"messages": one, **image} for one, image in zip(answers, images, strict=True)]
        asked = [{"prompt": chat(row), **image, **same} for row, image in zip(self.rows, images, strict=True)]
        self.sft_rows = chats[: 2 * args.rows]
        self.prompt_rows = asked[: 2 * args.prompts]
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.sft_rows), self.sft_file)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(self.prompt_rows), self.prompt_file)

    @cached_property
    def examples(self) -> list[Example]:
        """The rows of SFT, as lockstep encodes them."""
        data, reader = Data(train=str(self.sft_file)), partial(SupervisedRows, images=self.model)
        request = RowRequest(Dataset, reader, data.train, data, load_tokenizer(self.model), 2**31)
        return list(load_rows(request).examples)

    @property
    def longest(self) -> int:
        return max(len(one) for one in self.examples)

    def their_model(self) -> Any:
        dtype = torch.float32 if self.masters else DTYPES[self.dtype]
        return transformers.AutoModelForImageTextToText.from_pretrained(
            self.model, dtype=dtype, attn_implementation="sdpa"
        )

    def their_data(self, rows: list[dict[str, Any]], column: str) -> Any:
        """The rows as a data set of TRL, whose images are PIL images."""
        from datasets import Dataset as TrlDataset
        from datasets import Image, Sequence

        made = [{column: row[column], "images": row["images"]} for row in rows]
        return TrlDataset.from_list(made).cast_column("images", Sequence(Image()))

    def trainer_settings(self, rows: int, longest: int) -> dict[str, Any]:
        """As many rows per micro-batch as stay below the number of tokens."""
        fits = [n for n in range(1, rows + 1) if rows % n == 0 and (n == 1 or n * longest <= self.tokens)]
        return {
            "per_device_train_batch_size": max(fits),
            "gradient_accumulation_steps": rows // max(fits),
            "num_train_epochs": 1,
            **trl_optimizer(self.optim, self.device),
            "bf16": self.masters,
            "gradient_checkpointing": self.args.checkpointing,
            "use_cpu": self.device.name == "cpu",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        }


class OurSft:
    """lockstep: packed micro-batches with images."""

    name = "lockstep"

    def __init__(self, work: Work):
        self.work, where = work, work.device.torch_device()
        settings = Model(
            path=work.model,
            dtype=work.dtype,
            master_weights=work.masters,
            vision="train",
            gradient_checkpointing=work.args.checkpointing,
        )
        policy = load_policy(settings, where, work.device.attention, seed=0, scoring=Scoring(alike=True))
        self.learner = learner_of(policy, work.device, work.optim, masters=work.masters)

    def first_update(self) -> tuple[float, float]:
        """Loss and gradient norm of the first update, which does not change the weights."""
        loss = self._passes(self.work.examples[: self.work.args.rows])
        norm = self.learner.optimizer.gradient_norm().item()
        self.learner.optimizer.forget()
        return loss, norm

    def train_pass(self) -> Seconds:
        watch, rows = Stopwatch(self.work.device), self.work.args.rows
        for start in range(0, len(self.work.examples), rows):
            self._passes(self.work.examples[start : start + rows])
            self.learner.optim_step(self.work.optim.lr)
        return watch.read()

    def _passes(self, rows: list[Example]) -> float:
        lengths = [len(one) for one in rows]
        (plan,) = plan_micro_batches(lengths, devices=1, tokens=max(self.work.tokens, *lengths), rows=None)
        batches = [micro_batch([rows[at] for at in members], packed=True, pad_id=0) for members in plan]
        return self.learner.forward_backward(batches, token_loss).loss


class TrlSft:
    """TRL's SFTTrainer, driven by its own `train()`."""

    name = "TRL"

    def __init__(self, work: Work, folder: Path):
        from trl import SFTConfig, SFTTrainer

        config = SFTConfig(
            output_dir=str(folder),
            max_length=None,
            assistant_only_loss=True,
            shuffle_dataset=False,
            train_sampling_strategy="sequential",
            **work.trainer_settings(work.args.rows, work.longest),
        )
        self.clock = make_clock(work.device)
        self.trainer = SFTTrainer(
            model=work.their_model(),
            args=config,
            train_dataset=work.their_data(work.sft_rows, "messages"),
            processing_class=processor(work.model),
            callbacks=[self.clock],
        )
        self.trainer.remove_callback(transformers.PrinterCallback)

    def first_update(self) -> tuple[float, float]:
        first = train_watched(self.trainer, 1)[0]
        return first.loss, first.norm

    def train_pass(self) -> Seconds:
        self.trainer.train()
        seconds: Seconds = self.clock.seconds
        return seconds


def our_grpo(work: Work, folder: Path, steps: int) -> grpo_sides.Ours:
    args = work.args
    values = {
        "method": "grpo",
        "device": work.device.name,
        "run": {"name": "bench", "folder": str(folder), "steps": grpo_sides.ENDLESS, "seed": args.seed},
        "model": {
            "path": work.model,
            "dtype": work.dtype,
            "master_weights": work.masters,
            "vision": "train",
            "gradient_checkpointing": args.checkpointing,
        },
        "data": {"train": str(work.prompt_file), "shuffle": False},
        "batch": {"prompts": args.prompts, "tokens": args.tokens},
        "optim": work.optim.model_dump(),
        "rollout": {"n": args.n, "max_tokens": args.max_tokens, "free_cache": False},
        "reward": {"function": f"{reward.__file__}:vowels"},
        "algorithm": {"aggregation": "seq_mean_token_sum_norm", "kl": {"where": "none"}},
    }
    recipe = with_derived_defaults(Recipe.model_validate(with_method_defaults(values)))
    return grpo_sides.Ours(work, folder, steps, recipe)


def trl_grpo(work: Work, folder: str, variant: str, callbacks: list[Any]) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    args = work.args
    config = GRPOConfig(
        output_dir=folder,
        shuffle_dataset=False,
        num_generations=args.n,
        max_completion_length=args.max_tokens,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        loss_type="dr_grpo",
        seed=args.seed,
        **work.trainer_settings(work.sequences, work.longest - args.answer + args.max_tokens),
    )
    trainer = GRPOTrainer(
        model=work.their_model(),
        reward_funcs=vowels_of_all,
        args=config,
        train_dataset=work.their_data(work.prompt_rows, "prompt"),
        processing_class=processor(work.model),
        callbacks=callbacks,
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def vowels_of_all(completions: list[Any], **_: Any) -> list[float]:
    return [reward.vowels("letters", completion[0]["content"], "aeiou", {}) for completion in completions]


def compare(case: str, dtype: str, ours: tuple[float, float], theirs: tuple[float, float]) -> dict[str, float]:
    """Ends the run if loss and gradient norm of the first update differ."""
    found = {"loss": ours[0], "norm": ours[1], "trl_loss": theirs[0], "trl_norm": theirs[1]}
    print(f"  {case}, first update: " + ", ".join(f"{name} {value:.6g}" for name, value in found.items()), flush=True)
    loss, norm = TOLERANCE[dtype]
    if abs(ours[0] - theirs[0]) > loss or abs(theirs[1] / ours[1] - 1) > norm:
        raise SystemExit(f"{case}: TRL computes something else than lockstep in the first update: {found}")
    return found


def timed(sides: dict[str, Any], steps: int, repeats: int) -> dict[str, Any]:
    """Seconds per step of each side after an untimed pass, and the ratio to ours in the same repeat."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats + 1):
        for name, side in sides.items():
            taken = side.train_pass()
            wall = (taken if isinstance(taken, Seconds) else taken.seconds).wall / steps
            if repeat:
                seconds[name].append(wall)
    ours, found = seconds["lockstep"], {}
    for name, values in seconds.items():
        ratios = [theirs / mine for theirs, mine in zip(values, ours, strict=True)]
        found[name] = {"seconds_per_step": summary(values), "ratio": summary(ratios)}
        step, ratio = spread(found[name]["seconds_per_step"], ".3f"), spread(found[name]["ratio"], ".2f")
        print(f"  {name:9} {step} s a step, ratio {ratio}", flush=True)
    return found


def run_sft(work: Work, folder: Path, repeats: int) -> dict[str, Any]:
    sides: dict[str, Any] = {"lockstep": OurSft(work)}
    checks: dict[str, float] = {}
    if has_trl():
        sides["TRL"] = TrlSft(work, folder)
        checks = compare("sft", work.dtype, sides["lockstep"].first_update(), sides["TRL"].first_update())
    return {"first_update": checks, "tokens": work.longest, "sides": timed(sides, 2, repeats)}


def run_grpo(work: Work, folder: Path, repeats: int) -> dict[str, Any]:
    ours = our_grpo(work, folder / "ours", 2)
    try:
        sides: dict[str, Any] = {"lockstep": ours}
        checks: dict[str, float] = {}
        if has_trl():
            sides["TRL"] = grpo_sides.Trl(work, folder / "trl", 2, "padded", trl_grpo)
            mine = ours.first_step()
            theirs = sides["TRL"].step_on(mine)
            if theirs.prompts != mine.prompts:
                raise SystemExit("TRL reads the prompts as other tokens than lockstep")
            checks = compare("grpo", work.dtype, (mine.loss, mine.norm), (theirs.loss, theirs.norm))
            if abs(theirs.reward - mine.reward) > 1e-3:
                raise SystemExit(f"TRL has the mean reward {theirs.reward}, and lockstep {mine.reward}")
        ours.forget()
        return {
            "first_update": checks,
            "sides": timed(sides, 2, repeats),
            "our_phases": ours.taken(2 * (repeats + 1)),
        }
    finally:
        ours.close()


def main() -> None:
    args = _arguments()
    settle(args.threads)
    device = select(args.device)
    settings = {key: value for key, value in vars(args).items() if key != "out"}
    record: dict[str, Any] = {"settings": settings, "machine": machine(device), "cases": {}}
    print("  ".join(f"{name} {value}" for name, value in record["machine"].items()))
    if not has_trl():
        print("TRL is not installed: only lockstep is timed (pip install -e '.[bench]')")
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        work = Work(Path(name), args, device)
        image = work.examples[0].images[0].tokens
        print(f"{args.shape}: images of {args.side} x {args.side} pixels are {image} tokens", flush=True)
        for case in args.cases:
            record["cases"][case] = CASES[case](work, Path(name) / case, args.repeats)
            gc.collect()  # the models of a case are not kept for the next one
    if args.out:
        write_record(record, args.out)


CASES = {"sft": run_sft, "grpo": run_grpo}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="cpu, cuda, npu or auto")
    parser.add_argument("--shape", choices=SHAPES, default="tiny", help="size of the model, with random weights")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="bf16 keeps fp32 master weights")
    parser.add_argument("--no-masters", action="store_true", help="bf16 weights alone, on every side")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--side", type=int, default=56, help="pixels of a side of an image")
    parser.add_argument("--rows", type=int, default=8, help="SFT: rows of one update")
    parser.add_argument("--answer", type=int, default=16, help="SFT: tokens of an answer")
    parser.add_argument("--prompts", type=int, default=2, help="GRPO: prompts of a step")
    parser.add_argument("--n", type=int, default=4, help="GRPO: responses to a prompt")
    parser.add_argument("--max-tokens", type=int, default=16, help="GRPO: tokens of a response")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of a micro-batch, padding included")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing on both sides")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes of each side, of two steps each")
    parser.add_argument("--threads", type=int, help="torch threads; default: torch's own")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write versions, settings and numbers to this JSON file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
