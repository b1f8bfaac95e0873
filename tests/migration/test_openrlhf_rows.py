"""Commands of OpenRLHF's trainers on rows: one update of the same tokens by OpenRLHF and by the migrated recipe."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from conftest import write_jsonl
from lockstep.compat.conversion_output import checked
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.model.tiny import write_tiny
from lockstep.recipe import Recipe

from .batch import assert_same, distance, gradients
from .openrlhf_rows import Padded, Scoring, Update, language_model, our_update, prompt_length, their_update
from .peers import module

pytestmark = pytest.mark.peers

OLD = "0.7.5"
SIZES = "--train_batch_size 6 --micro_train_batch_size 6 --max_len 128"


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another model of the same family: a reference, or a teacher."""
    folder = tmp_path_factory.mktemp("other") / "model"
    write_tiny(folder, hidden=64, layers=2, seed=7)
    return folder


def rows(folder: Path) -> Path:
    """Sums with a right and a wrong answer of different lengths, a verdict and judged steps."""
    made: list[dict[str, object]] = [
        {
            "question": f"{'so ' * (a % 3)}{a}+{a}?",
            "answer": f"{'it is ' * (a % 4)}{2 * a}",
            "wrong": f"{2 * a + 1}{'!' * (a % 5)}",
            "label": a % 3 > 0,
            "steps": f"first {a}@ then {'more ' * (a % 3)}@ so {2 * a}@",
            "verdicts": ["+" if (a + i) % 3 else "-" for i in range(3)],
        }
        for a in range(6)
    ]
    return write_jsonl(folder / "rows.jsonl", made)


def migrated(program: str, words: list[str], folder: Path, reference: Path | None = None) -> Recipe:
    """On the CPU, the rows in their order. Only DPO's command can name a reference, so that KTO is given one here."""
    recipe = checked(convert_openrlhf(program, words))
    if reference is not None:
        preference = recipe.preference.model_copy(update={"reference": str(reference)})
        recipe = recipe.model_copy(update={"preference": preference})
    run = recipe.run.model_copy(update={"folder": str(folder)})
    data = recipe.data.model_copy(update={"shuffle": False})
    return recipe.model_copy(update={"device": "cpu", "run": run, "data": data})


def both(program: str, text: str, model: Path, folder: Path, reference: Path | None = None) -> tuple[Update, list[str]]:
    words = f"--pretrain {model} --dataset {rows(folder)} {SIZES} {text}".split()
    return our_update(migrated(program, words, folder, reference)), words


PAIRS = "--prompt_key question --chosen_key answer --rejected_key wrong"


def pair_rows(ours: Update) -> tuple[object, ...]:
    chosen = Padded.of([item.examples[0] for item in ours.items])
    rejected = Padded.of([item.examples[1] for item in ours.items])
    return chosen.ids, chosen.attended, rejected.ids, rejected.attended, [*chosen.prompts, *rejected.prompts]


@pytest.mark.parametrize(
    "text",
    [
        "--beta 0.1",
        "--beta 0.5 --label_smoothing 0.1",
        "--beta 0.2 --ipo",
        "--beta 0.1 --nll_loss_coef 0.2",
    ],
    ids=["DPO", "cDPO", "IPO", "DPO with the likelihood"],
)
def test_pairs(text: str, tiny_folder: Path, other: Path, tmp_path: Path) -> None:
    ours, words = both("train_dpo", f"{PAIRS} --ref_pretrain {other} {text}", tiny_folder, tmp_path)
    reference = language_model(other, OLD)
    theirs = their_update(
        OLD, "train_dpo", words, pair_rows(ours), language_model(tiny_folder, OLD), ref_model=reference
    )
    assert_same(ours.result, theirs)


def test_pairs_in_the_dotted_dialect(tiny_folder: Path, other: Path, tmp_path: Path) -> None:
    file = rows(tmp_path)
    words = (
        f"--model.model_name_or_path {tiny_folder} --ref.model_name_or_path {other} --data.dataset {file} "
        "--data.prompt_key question --data.chosen_key answer --data.rejected_key wrong --train.batch_size 6 "
        "--train.micro_batch_size 6 --data.max_len 128 --model.beta 0.3 --model.label_smoothing 0.05 "
        "--ds.param_dtype fp32"
    ).split()
    ours = our_update(migrated("train_dpo", words, tmp_path))
    new, model, reference = "0.11.2", language_model(tiny_folder, OLD), language_model(other, OLD)
    chosen, rejected = (Padded.of([item.examples[i] for item in ours.items]) for i in (0, 1))
    sums = [_summed(m, side) for m in (model, reference) for side in (chosen, rejected)]
    loss, _, _ = module("openrlhf", new, "models.loss").DPOLoss(0.3, 0.05)(*sums)
    loss.backward()
    assert_same(ours.result, (float(loss.detach()), gradients(model.model)))


def _summed(model: torch.nn.Module, side: Padded) -> torch.Tensor:
    own = model(side.ids, attention_mask=side.attended, return_logprobs=True)
    mask = side.attended[:, 1:].bool() & (torch.arange(1, side.ids.shape[1]) >= torch.tensor(side.prompts)[:, None])
    return (own * mask).sum(1)


@pytest.mark.parametrize("text", ["", "--desirable_loss_weight 1.33 --undesirable_loss_weight 0.9 --beta 0.3"])
def test_judged_responses(text: str, tiny_folder: Path, other: Path, tmp_path: Path) -> None:
    keys = "--input_key question --output_key answer --label_key label"
    # This way round the estimate of the divergence is over 0, below which it is cut.
    policy, reference = other, tiny_folder
    ours, words = both("train_kto", f"{keys} {text}", policy, tmp_path, reference)
    examples = [item.example for item in ours.items]
    # Behind the rows, each prompt with the next row's response: what the divergence is estimated on.
    strangers = []
    for number, example in enumerate(examples):
        nxt = examples[(number + 1) % len(examples)]
        first, begun = prompt_length(example), prompt_length(nxt)
        ids = [*example.ids[:first], *nxt.ids[begun:]]
        strangers.append(type(example)(ids, [0] * first + [1] * (len(ids) - first), example.origin))
    padded = Padded.of([*examples, *strangers])
    labels = torch.tensor([int(item.desirable) for item in ours.items] + [-1] * len(strangers))
    given = padded.ids, padded.attended, labels, padded.prompts
    frozen = language_model(reference, OLD)
    theirs = their_update(OLD, "train_kto", words, given, language_model(policy, OLD), ref_model=frozen)
    assert_same(ours.result, theirs)


@pytest.mark.parametrize("text", ["--loss sigmoid", "--loss logexp"])
def test_reward_model(text: str, tiny_folder: Path, tmp_path: Path) -> None:
    ours, words = both("train_rm", f"{PAIRS} {text}", tiny_folder, tmp_path)
    chosen, rejected = (Padded.of([item.examples[i] for item in ours.items]) for i in (0, 1))
    head = ours.module.head.weight.detach()  # type: ignore[union-attr]
    scoring = Scoring(tiny_folder, head)
    given = chosen.ids, chosen.attended, rejected.ids, rejected.attended, [0] * len(ours.items)
    assert_same(ours.result, their_update(OLD, "train_rm", words, given, scoring))


def test_process_reward_model(tiny_folder: Path, tmp_path: Path) -> None:
    text = "--input_key steps --label_key verdicts --placeholder_token @ --reward_tokens + -"
    ours, words = both("train_prm", text, tiny_folder, tmp_path)
    padded = Padded.of([item.example for item in ours.items])
    labels = torch.full_like(padded.ids, -100)
    for row, item in enumerate(ours.items):
        # The byte tokenizer: + is 43, - is 45, @ is 64.
        places = [i for i, token in enumerate(item.example.ids) if token == ord("@")]
        labels[row, places] = torch.tensor([ord("+") if label[0] == 1 else ord("-") for label in item.labels])
    given = padded.ids, padded.attended, labels
    assert_same(ours.result, their_update(OLD, "train_prm", words, given, language_model(tiny_folder, OLD)))


@pytest.mark.parametrize("version", ["0.7.5", "0.11.2"])
def test_supervised(version: str, tiny_folder: Path, tmp_path: Path) -> None:
    ours, words = both("train_sft", "--input_key question --output_key answer", tiny_folder, tmp_path)
    padded = Padded.of(ours.items)
    # Their mask stands at the position that predicts.
    mask = torch.zeros_like(padded.ids)
    for row, item in enumerate(ours.items):
        mask[row, padded.prompts[row] - 1 : len(item.ids) - 1] = 1
    model = language_model(tiny_folder, OLD)
    if version == OLD:
        theirs = their_update(OLD, "train_sft", words, (padded.ids, padded.attended, mask), model)
    else:
        own = model(padded.ids, attention_mask=padded.attended, return_logprobs=True)
        loss = module("openrlhf", version, "models.loss").SFTLoss()(own, mask[:, :-1])
        loss.backward()
        theirs = float(loss.detach()), gradients(model.model)
    assert_same(ours.result, theirs)


def test_distillation_is_theirs_moved_to_the_trained_tokens(tiny_folder: Path, other: Path, tmp_path: Path) -> None:
    """Their divergence stands one position to the right of the likelihood: it leaves out the distribution over an
    answer's first token and takes in the one behind its last. And it is a cross entropy: the teacher's entropy, which
    has no gradient, is not taken off. With both put right the update is the same."""
    text = f"--input_key question --output_key answer --teacher_model {other} --kd_coef 0.4"
    ours, words = both("train_kd", text, tiny_folder, tmp_path)
    padded = Padded.of(ours.items)
    model, teacher = language_model(tiny_folder, OLD), language_model(other, OLD)
    given = padded.prompts, padded.ids, padded.attended, {}
    loss, found = their_update(OLD, "train_kd", words, given, model, teacher_model=teacher)
    assert distance(ours.gradients, found) > 1e-2

    losses = module("openrlhf", OLD, "models.loss")
    model = language_model(tiny_folder, OLD)
    logits = model(padded.ids, attention_mask=padded.attended, return_output=True)["logits"]
    with torch.no_grad():
        taught = teacher(padded.ids, attention_mask=padded.attended, return_output=True)["logits"]
    labels = torch.where(padded.attended.bool(), padded.ids, -100)
    for label, prompt in zip(labels, padded.prompts, strict=True):
        label[:prompt] = -100
    likelihood = losses.GPTLMLoss()(logits, labels)
    moved = losses.KDLoss()(logits[:, :-1], taught[:, :-1], labels[:, 1:])
    unmoved = losses.KDLoss()(logits, taught, labels)
    assert loss == pytest.approx(float((0.6 * likelihood + 0.4 * unmoved).detach()), rel=1e-5)
    known = (labels[:, 1:] != -100).float()
    every = taught[:, :-1].log_softmax(-1)
    entropy = (-(every.exp() * every).sum(-1) * known).sum() / known.sum()
    right = 0.6 * likelihood + 0.4 * (moved - entropy)
    right.backward()
    assert_same(ours.result, (float(right.detach()), gradients(model.model)))
