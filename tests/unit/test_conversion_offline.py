"""Rules of OpenRLHF's offline trainers: each value by hand from the options of the command."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf

PAIR = ("--pretrain", "m", "--dataset", "d.jsonl")


@pytest.mark.parametrize(
    ("program", "words", "expected"),
    [
        (
            "train_prm",
            ["--input_key", "steps", "--placeholder_token", "<s>", "--reward_tokens", "+", "-"],
            {"data.text_key": "steps", "prm.placeholder": "<s>", "prm.tokens": ["+", "-"]},
        ),
        (
            "train_kto",
            ["--output_key", "o", "--input_key", "i", "--beta", "0.3", "--desirable_loss_weight", "1.2"],
            {"data.prompt_key": "i", "data.response_key": "o", "preference.beta": 0.3, "preference.desirable": 1.2},
        ),
        (
            "train_kd",
            ["--output_key", "o", "--input_key", "i", "--teacher_model", "t", "--kd_coef", "0.6"],
            {"distill.teacher": "t", "distill.coefficient": 0.6, "data.response_key": "o"},
        ),
        ("train_sft", ["--pretrain_mode", "--input_key", "t"], {"data.shape": "text", "data.text_key": "t"}),
        (
            "train_sft",
            ["--apply_chat_template", "--input_key", "chat"],
            {"data.shape": "messages", "data.messages_key": "chat"},
        ),
        (
            "train_sft",
            ["--output_key", "o", "--input_template", "Q: {} A:"],
            {"data.prompt_format": "Q: {} A:", "data.template": "none"},
        ),
        ("train_rm", ["--loss", "logexp"], {"rm.loss": "logexp"}),
        ("train_dpo", ["--ipo"], {"preference.loss": "ipo"}),
        ("train_dpo", ["--beta", "0.3", "--label_smoothing", "0.1"], {"preference.label_smoothing": 0.1}),
        ("train_dpo", ["--ref_pretrain", "r", "--nll_loss_coef", "0.2"], {"preference.reference": "r"}),
        ("train_dpo", ["--nll_loss_coef", "0.2"], {"preference.nll": 0.2, "preference.reference": None}),
        ("train_dpo", ["--prompt_key", "p", "--chosen_key", "c"], {"data.prompt_key": "p", "data.chosen_key": "c"}),
        ("train_dpo", ["--max_samples", "9"], {"data.train": [{"path": "d.jsonl", "rows": 9}]}),
        (
            "train_dpo",
            ["--dataset", "a.jsonl,b.jsonl", "--dataset_probs", "0.4,0.6"],
            {"data.train": [{"path": "a.jsonl", "weight": 0.4}, {"path": "b.jsonl", "weight": 0.6}]},
        ),
        ("train_dpo", ["--bf16"], {"model.dtype": "bf16"}),
        ("train_dpo", ["--max_epochs", "3", "--learning_rate", "3e-6"], {"run.epochs": 3, "optim.lr": 3e-6}),
        ("train_dpo", ["--max_len", "700"], {"data.max_tokens": 700, "data.overlong": "truncate_right"}),
        (
            "train_dpo",
            ["--lora_rank", "4", "--lora_alpha", "9", "--lora_dropout", "0.1"],
            {"model.lora.rank": 4, "model.lora.alpha": 9.0, "model.lora.dropout": 0.1},
        ),
    ],
)
def test_rules_of_openrlhfs_offline_trainers(program: str, words: list[str], expected: dict[str, Any]) -> None:
    done = convert_openrlhf(program, [*PAIR, *words])
    assert not done.problems
    assert {key: done.recipe[key].value if key in done.recipe else None for key in expected} == expected


@pytest.mark.parametrize(
    ("program", "words", "key", "why"),
    [
        ("train_dpo", ["--apply_chat_template", "--input_template", "{}"], "input_template", "takes precedence"),
        ("train_sft", ["--output_key", "o", "--input_template", "plain"], "input_template", "has no {}"),
        ("train_dpo", ["--eval_steps", "5"], "eval_steps", "there is no eval_dataset"),
        ("train_dpo", ["--eval_dataset", "e.jsonl", "--eval_steps", "0"], "eval_steps", "validates at the end"),
        ("train_dpo", ["--save_steps", "0"], "save_steps", "saves a checkpoint and an export at the end"),
        ("train_dpo", ["--dataset_probs", "1.0"], "dataset_probs", "only one data set"),
        ("train_dpo", ["--ckpt_path", "c"], "ckpt_path", "in the run folder"),
    ],
)
def test_keys_that_offline_trainers_do_not_read(program: str, words: list[str], key: str, why: str) -> None:
    done = convert_openrlhf(program, [*PAIR, *words])
    (found,) = [one for one in done.outcomes if one.key.lstrip("-") == key]
    assert found.outcome == "ignored"
    assert why in found.note


@pytest.mark.parametrize(
    ("program", "words", "where"),
    [
        ("train_dpo", ["--ipo", "--label_smoothing", "0.1"], "--label_smoothing"),
        ("train_dpo", ["--dataset", "a@b"], "--dataset"),
        ("train_dpo", ["--dataset", "a,b", "--dataset_probs", "1"], "--dataset_probs"),
        ("train_dpo", ["--dataset", "a,b", "--dataset_probs", "x,y"], "--dataset_probs"),
        ("train_kto", [], "--output_key"),
        ("train_sft", [], "--output_key"),
    ],
)
def test_what_offline_trainers_may_not_set(program: str, words: list[str], where: str) -> None:
    assert [problem.where for problem in convert_openrlhf(program, [*PAIR, *words]).problems] == [where]
