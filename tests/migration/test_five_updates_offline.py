"""Commands of OpenRLHF's offline programs and of verl's SFT trainer: five updates by the program and by the migrated
recipe, on the same tokens.

The warm-up is a quarter of five updates, so that its start and its rounding count.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import write_jsonl
from lockstep.compat.conversion_output import checked
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.recipe import Recipe

from .batch import adapted
from .five_updates import STEPS, Trained, chosen, compared, other_trainer, train_offline, value_model
from .openrlhf_rows import Padded, prompt_length

pytestmark = pytest.mark.peers

ROWS, VERL_VERSION = 8, "0.4.1"
FLAT = (
    f"--pretrain MODEL --dataset FOLDER/rows.jsonl --train_batch_size {ROWS} --micro_train_batch_size {ROWS} "
    "--max_len 128 --learning_rate 1e-3 --max_epochs 1 --save_path FOLDER/out --lr_warmup_ratio 0.25 "
)
DOTTED = (
    f"--model.model_name_or_path MODEL --data.dataset FOLDER/rows.jsonl --train.batch_size {ROWS} "
    f"--train.micro_batch_size {ROWS} --data.max_len 128 --adam.lr 1e-3 --train.max_epochs 1 "
    "--ckpt.output_dir FOLDER/out --lr_warmup_ratio 0.25 "
)
VERL = (
    f"data.train_files=FOLDER/rows.jsonl data.train_batch_size={ROWS} data.micro_batch_size_per_gpu={ROWS} "
    "data.max_length=128 data.prompt_key=question data.response_key=answer model.partial_pretrain=MODEL "
    "model.strategy=fsdp2 model.enable_gradient_checkpointing=False optim.lr=1e-3 optim.warmup_steps_ratio=0.5 "
    "trainer.total_epochs=1 trainer.default_local_dir=FOLDER/out trainer.project_name=p trainer.experiment_name=e "
    "trainer.logger=[console] "
)
PAIRS = "--prompt_key question --chosen_key answer --rejected_key wrong"
NEW_PAIRS = "--data.prompt_key question --data.chosen_key answer --data.rejected_key wrong"
SFT = "--input_key question --output_key answer"
CASES: dict[str, tuple[str, str]] = {
    "0.7.5 SFT": ("train_sft", SFT),
    "0.7.5 DPO": ("train_dpo", f"{PAIRS} --beta 0.2 --l2 0.1"),
    "0.7.5 KTO": ("train_kto", f"{SFT} --label_key label --desirable_loss_weight 1.3"),
    "0.7.5 RM": ("train_rm", f"{PAIRS} --value_head_prefix score"),
    "0.11.2 SFT": ("train_sft", "--data.input_key question --data.output_key answer --adam.weight_decay 0.1"),
    "0.11.2 DPO": ("train_dpo", f"{NEW_PAIRS} --model.beta 0.2"),
    "verl SFT": ("fsdp_sft_trainer", ""),
    "0.11.2 RM": ("train_rm", f"{NEW_PAIRS} --ds.value_head_prefix score"),
}
# The same rows, but another setting on OpenRLHF's side.
WRONG: dict[str, str] = {
    "warm-up": "--lr_warmup_ratio 0.1",
    "weight decay": "--l2 0.3",
    "betas": "--adam_betas 0.9 0.999",
    "learning rate": "--learning_rate 1.01e-3",
    "gradient clip": "--max_norm 0.1",
}
WITHIN = 5e-5
Runs = dict[str, tuple[Trained, dict[str, Any]]]


def words_of(name: str, more: str, model: Path, folder: Path) -> list[str]:
    made = [
        {
            "question": f"{'so ' * (a % 3)}{a}+{a}?",
            "answer": f"{'it is ' * (a % 4)}{2 * a}",
            "wrong": f"{2 * a + 1}{'!' * (a % 5)}",
            "label": a % 3 > 0,
        }
        for a in range(ROWS * STEPS)
    ]
    write_jsonl(folder / "rows.jsonl", made)
    common = FLAT if name.startswith("0.7.5") else VERL if name.startswith("verl") else DOTTED
    text = f"{common} {CASES[name][1]} {more}"
    return text.replace("MODEL", str(model)).replace("FOLDER", str(folder)).split()


def migrated(program: str, words: list[str], model: Path) -> Recipe:
    if program == "fsdp_sft_trainer":
        return adapted(checked(convert_verl(program, words, version=VERL_VERSION)), model)
    return adapted(checked(convert_openrlhf(program, words)), model)


def batch_of(program: str, items: list[Any]) -> list[Any]:
    """The rows of an update as the program's loader gives them."""
    if program in ("train_sft", "fsdp_sft_trainer"):
        padded = Padded.of(items)
        mask = torch.zeros_like(padded.ids)  # it stands at the position that predicts
        for row, item in enumerate(items):
            mask[row, : len(item.ids) - 1] = torch.tensor(list(item.loss_mask[1:]))
        return [padded.ids, padded.attended, mask]
    if program == "train_kto":
        return _judged(items)
    one, other = (Padded.of([item.examples[i] for item in items]) for i in (0, 1))
    last = [0] * len(items) if program == "train_rm" else [*one.prompts, *other.prompts]
    return [one.ids, one.attended, other.ids, other.attended, last]


def _judged(items: list[Any]) -> list[Any]:
    """Behind the rows, each prompt with the next row's response: what the divergence is estimated on."""
    examples = [item.example for item in items]
    strangers = []
    for number, example in enumerate(examples):
        after = examples[(number + 1) % len(examples)]
        first = prompt_length(example)
        ids = [*example.ids[:first], *after.ids[prompt_length(after) :]]
        strangers.append(type(example)(ids, [0] * first + [1] * (len(ids) - first), example.origin))
    padded = Padded.of([*examples, *strangers])
    labels = torch.tensor([int(item.desirable) for item in items] + [-1] * len(strangers))
    return [padded.ids, padded.attended, labels, padded.prompts]


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    judge = value_model(tiny_folder, tmp_path_factory.mktemp("judge"))
    ours: dict[str, Trained] = {}

    def job(name: str, more: str = "") -> dict[str, Any]:
        program = CASES[name][0]
        model = judge if program == "train_rm" else tiny_folder
        words = words_of(name, more, model, tmp_path_factory.mktemp("case"))
        if name not in ours:
            ours[name] = train_offline(migrated(program, words, model))
        batches = [batch_of(program, step) for step in ours[name].steps]
        peer = "verl" if name.startswith("verl") else "openrlhf"
        version = VERL_VERSION if peer == "verl" else name.partition(" ")[0]
        made = {"peer": peer, "version": version, "program": program, "words": words}
        return {**made, "batches": batches, "rows": ROWS * STEPS}

    wanted = chosen(request)
    jobs = {name: job(name) for name in wanted if name in CASES}
    for name in [name for name in wanted if name in WRONG]:
        job("0.7.5 SFT")
        jobs[name], ours[name] = job("0.7.5 SFT", WRONG[name]), ours["0.7.5 SFT"]
    theirs = other_trainer("offline_trainers", tmp_path_factory.mktemp("openrlhf"), jobs)
    return {name: (ours[name], theirs[name]) for name in jobs}


@pytest.mark.parametrize("name", CASES)
def test_five_updates_are_theirs(name: str, runs: Runs) -> None:
    found = compared(f"offline {name}", *runs[name])
    assert max(found["actor"]) <= WITHIN, found


@pytest.mark.parametrize("name", WRONG)
def test_another_setting_is_noticed(name: str, runs: Runs) -> None:
    found = compared(f"OpenRLHF SFT, wrong {name}", *runs[name])
    assert max(found["actor"]) > 4 * WITHIN, found
