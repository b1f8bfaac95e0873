"""OpenRLHF's `batch_inference` as its scripts chain it: answers, their scores, and what is trained on next."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lockstep.commands.generate import Conversation
from lockstep.compat.conversion_output import main
from lockstep.compat.openrlhf.__main__ import run_inference
from lockstep.compat.openrlhf.batch_inference import processed
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.openrlhf.openrlhf_inference import batch_order
from lockstep.errors import Refusal
from refusals import refuses
from reward_models import write_reward_model
from speaker import write_speaker

PROMPTS = ["2 + 3?", "Name a bird.", "9 - 4?", "Why?"]


@pytest.fixture(scope="module")
def scene(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with prompts, a model and a reward model."""
    folder = tmp_path_factory.mktemp("scene")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"q": words}) + "\n" for words in PROMPTS))
    write_speaker(folder / "model", tiny_folder)
    write_reward_model(tiny_folder, folder / "rm", mean=0.5, std=2.0)
    return folder


def run(scene: Path, words: str) -> list[dict]:
    """The command, and the file it wrote."""
    out = scene / "out" / "made.jsonl"
    out.unlink(missing_ok=True)
    run_inference(
        "batch_inference", [word.replace("@", f"{scene}/") for word in f"{words} --output_path {out}".split()]
    )
    return [json.loads(line) for line in out.read_text().splitlines()]


ASKED = "--pretrain @model --dataset @prompts.jsonl --input_key q --max_new_tokens 8"


def test_greedy_answers_are_those_of_generate(scene: Path) -> None:
    said = Conversation(str(scene / "model"), "cpu", max_new_tokens=8, temperature=0.0, seed=0, system=None)
    rows = run(scene, f"--eval_task generate {ASKED} --greedy_sampling --apply_chat_template --zero_stage 0")
    assert [row["output"] for row in rows] == [said.answer(words) for words in PROMPTS]
    assert len({row["output"] for row in rows}) == len(PROMPTS)
    tokenizer = AutoTokenizer.from_pretrained(scene / "model")
    chat = [[{"role": "user", "content": words}] for words in PROMPTS]
    rendered = [tokenizer.apply_chat_template(one, tokenize=False, add_generation_prompt=True) for one in chat]
    assert [row["input"] for row in rows] == rendered
    plain = run(scene, f"--eval_task generate {ASKED} --greedy_sampling --max_samples 2 --input_template Q:{{}}")
    assert [row["input"] for row in plain] == ["Q:2 + 3?", "Q:Name a bird."]
    assert plain[0]["output"] == said.continue_text("Q:2 + 3?")


@pytest.mark.slow
def test_a_round_of_a_script(scene: Path) -> None:
    """Several answers to a slice of the prompts; their scores; the best ones, or best against worst."""
    made = run(scene, f"--eval_task generate_vllm {ASKED} --best_of_n 3 --iter 1 --rollout_batch_size 3 --tp_size 4")
    # The second slice of three has the last prompt alone.
    assert [row["input"] for row in made] == ["Why?"] * 3
    assert len({row["output"] for row in made}) == 3
    answers = run(scene, f"--eval_task generate_vllm {ASKED} --best_of_n 2 --enable_csft")
    assert [row["input"] for row in answers] == [f"{words}<rm_score>: 5.00 " for words in PROMPTS] * 2
    (scene / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    judged = "--eval_task rm --pretrain @rm --dataset @answers.jsonl --max_len 32"
    scored = run(scene, judged)
    assert [(row["input"], row["output"]) for row in scored] == [(row["input"], row["output"]) for row in answers]
    assert [row["reward"] for row in scored] == pytest.approx(by_hand(scene / "rm", scored), abs=1e-5)
    assert run(scene, f"{judged} --post_processor rs") == processed("rs", scored, None, False)
    pairs = run(scene, f"{judged} --post_processor iter_dpo")
    assert all(row["chosen_reward"] >= row["rejected_reward"] for row in pairs)
    assert len(pairs) == len(PROMPTS)


def by_hand(folder: Path, rows: list[dict]) -> list[float]:
    """An end token behind each text, by transformers alone; then config.json's mean and deviation."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = []
    for row in rows:
        text = (row["input"] + row["output"]).rstrip("\n")
        text = text if text.endswith(tokenizer.eos_token) else f"{text} {tokenizer.eos_token}"
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:32]
        ids[-1] = tokenizer.eos_token_id
        with torch.no_grad():
            found.append((model(torch.tensor([ids])).logits[0, 0].item() - 0.5) / 2.0)
    return found


def test_what_becomes_of_scored_answers() -> None:
    rows = [
        {"input": "a", "output": "1", "reward": 0.5},
        {"input": "b", "output": "2", "reward": 1.0},
        {"input": "a", "output": "3", "reward": 2.0},
        {"input": "a", "output": "4", "reward": 0.5},
    ]
    assert processed("rs", rows, None, False) == [
        {"input": "a", "output": "3", "reward": 2.0},
        {"input": "b", "output": "2", "reward": 1.0},
    ]
    # Of equal rewards the first counts; one answer alone stands against itself, as there.
    assert processed("iter_dpo", rows, None, False) == [
        {"prompt": "a", "chosen": "3", "chosen_reward": 2.0, "rejected": "1", "rejected_reward": 0.5},
        {"prompt": "b", "chosen": "2", "chosen_reward": 1.0, "rejected": "2", "rejected_reward": 1.0},
    ]
    # Mean 1, squares 0.25 + 0 + 1 + 0.25 over three: a deviation of sqrt(0.5).
    conditional = processed("csft", rows, None, True)
    assert [row["input"] for row in conditional] == [
        "a <rm_score>: -0.71 ",
        "b <rm_score>: 0.00 ",
        "a <rm_score>: 1.41 ",
        "a <rm_score>: -0.71 ",
    ]
    assert processed("csft", rows[:1], "{reward}|{input}", False)[0]["input"] == "0.50|a"
    with pytest.raises(Refusal, match="all rewards are equal"):
        processed("csft", rows[:1] * 2, None, True)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("--pretrain m --dataset d.jsonl --output_path o", ["--eval_task"]),
        ("--eval_task rm", ["--pretrain", "--dataset", "--output_path"]),
        ("--eval_task rm --pretrain m --dataset d --output_path o --post_processor best", ["--post_processor"]),
        ("--eval_task generate --pretrain m --dataset a,b --dataset_probs 1,2 --output_path o", ["--dataset_probs"]),
        ("--eval_task generate --pretrain m --dataset a --output_path o --use_ms", ["--use_ms"]),
        ("--eval_task generate --pretrain m --dataset a --output_path o --best_of_n 0", ["--best_of_n"]),
        ("--eval_task rm --pretrain m --dataset a --output_path o --reward_template x", ["--reward_template"]),
        ("--eval_task rm --pretrain m --dataset a --output_path o --bets_of_n 2", ["--bets_of_n"]),
    ],
)
def test_what_is_wrong_with_a_command(words: str, where: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        batch_order(words.split())
    assert [problem.where for problem in refused.value.problems] == where


def test_rows_and_prompts_that_do_not_fit_are_named(scene: Path) -> None:
    with refuses("prompts.jsonl line 1", "missing-column", "input", "q", remedy="--input_key"):
        run(scene, "--eval_task generate --pretrain @model --dataset @prompts.jsonl")
    with pytest.raises(Refusal, match="there are no rows left"):
        run(scene, f"--eval_task generate {ASKED} --iter 9")
    with pytest.raises(Refusal, match="over the model's context of 2048"):
        run(scene, f"--eval_task generate {ASKED.replace(' 8', ' 2048')}")


def test_the_entry_point(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "batch_inference", "--eval_task", "generat"])
    with pytest.raises(SystemExit) as ended:
        main("openrlhf", convert_openrlhf, run_inference)
    assert ended.value.code == 2
    assert "--eval_task" in capsys.readouterr().err
