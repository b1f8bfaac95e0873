"""Preferences are really learned: each method from chance to the held-out rows, judged by plain transformers too."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow.parquet as parquet
import pytest
import torch

from commands import lockstep
from conftest import write_jsonl
from hang import HANG
from lockstep.model.tiny import write_tiny
from lockstep.run.metrics import read_metrics

# The rows are made once, so one worker runs all of them.
pytestmark = pytest.mark.xdist_group("preference learning")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, and rows."""
    folder = tmp_path_factory.mktemp("preferences")
    assert lockstep("tiny", folder / "model").returncode == 0
    assert lockstep("data", "preferences", folder / "preferences").returncode == 0
    return folder


@pytest.fixture(scope="module")
def small(made: Path) -> list[str]:
    """For every day: a smaller model, as many rows as forty updates see, and eighty held out."""
    write_tiny(made / "small", hidden=64, layers=2)
    files = {}
    for split, rows in (("train", 640), ("val", 80)):
        files[split] = made / f"small_{split}.parquet"
        every = parquet.read_table(made / "preferences" / f"pairs_{split}.parquet")
        parquet.write_table(every.slice(0, rows), files[split])
    return [f"data.train={files['train']}", f"data.val={files['val']}", f"model.path={made / 'small'}", "run.steps=40"]


@pytest.fixture(scope="module")
def small_scorer(made: Path, small: list[str]) -> Path:
    """The run folder of a small reward model."""
    return trained(made, "rm-brevity", "small-rm", *small, "val.every=1000", "val.at_start=false")


@pytest.fixture(scope="module")
def scorer(made: Path) -> Path:
    """The run folder of a reward model."""
    words = ["run.steps=40", "val.every=1000", "val.at_start=false", f"model.path={made / 'model'}"]
    return trained(made, "rm-brevity", "rm", *pairs(made), *words)


@pytest.fixture(scope="module")
def teacher(made: Path) -> Path:
    """The run folder of a model that has learned most of the one-digit sums; beside it a student, and the sums."""
    assert lockstep("tiny", made / "student", "--seed", "1").returncode == 0
    assert lockstep("data", "arithmetic", made / "data").returncode == 0
    return trained(made, "sft-arithmetic", "teacher", "run.steps=120", *sums(made), f"model.path={made / 'model'}")


@pytest.fixture(scope="module")
def warm(made: Path) -> Path:
    """The run folder of a model that answers in both styles, whatever is asked."""
    train = made / "preferences" / "pairs_train.parquet"
    sources = [f"data.train.{number}.path={train}" for number in (0, 1)]
    return trained(made, "warmup-brevity", "warm", *sources, f"model.path={made / 'model'}")


def trained(made: Path, recipe: str, name: str, *overrides: str) -> Path:
    done = lockstep("train", recipe, f"run.name={name}", f"run.folder={made / 'runs'}", *overrides, timeout=4 * HANG)
    assert done.returncode == 0, done.stderr
    return made / "runs" / name


def pairs(made: Path) -> list[str]:
    folder = made / "preferences"
    return [f"data.train={folder / 'pairs_train.parquet'}", f"data.val={folder / 'pairs_val.parquet'}"]


def sums(made: Path) -> list[str]:
    folder = made / "data"
    rows = [f"data.train={folder / 'sft_train.parquet'}", f"data.val={folder / 'sft_val.parquet'}"]
    return [*rows, "val.questions=null", "val.every=60"]


def held_out(run: Path, name: str) -> list[float]:
    return [metrics[name] for _, metrics in read_metrics(run / "metrics.jsonl") if name in metrics]


def held_out_pairs(made: Path, count: int) -> list[dict]:
    return parquet.read_table(made / "preferences" / "pairs_val.parquet").to_pylist()[:count]


# -- pairs and verdicts ------------------------------------------------------------------------------------------------


# The pairs alone: no likelihood beside them that could teach the preference too.
ALONE = "preference.nll=0.0"
KINDS = {
    "simpo": [ALONE, "run.steps=40"],
    "dpo": [ALONE, "run.steps=40"],
    "kto": ["run.steps=25"],
    "ipo": ["method=ipo", ALONE, "run.steps=60"],
    "cpo": ["method=cpo", "run.steps=60"],
    "kto-free": ["preference.reference_free=true", "run.steps=60"],
    "dpo-disk": [ALONE, "preference.precompute=true", "run.steps=40"],
}


def test_the_request_in_the_prompt_decides_for_a_small_model(made: Path, small: list[str]) -> None:
    """From random weights: the held-out accuracy starts at chance, since no answer is better by itself."""
    run = trained(made, "simpo-brevity", "small-simpo", *small, ALONE, "optim.lr=1e-3", "val.every=1000")
    before, after = held_out(run, "val/pair_accuracy")
    assert 0.35 <= before <= 0.65
    assert after >= 0.9


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_the_request_in_the_prompt_decides(made: Path, name: str) -> None:
    """As for a small model, with the embedded one."""
    overrides = KINDS[name]
    recipe = "kto-brevity" if name.startswith("kto") else "simpo-brevity" if name == "simpo" else "dpo-brevity"
    # Measured before and after; what lies between is not looked at.
    words = [f"model.path={made / 'model'}", "optim.lr=3e-4", "val.every=1000", *overrides]
    run = trained(made, recipe, name, *pairs(made), *words)
    accuracy = held_out(run, "val/label_accuracy" if recipe == "kto-brevity" else "val/pair_accuracy")
    assert 0.35 <= accuracy[0] <= 0.65
    assert accuracy[-1] >= 0.9
    if name in ("dpo", "kto"):
        assert implicit_accuracy(made, run) >= 0.9


@pytest.mark.slow
def test_orpo_learns_answers_and_preferences_at_once(made: Path) -> None:
    run = trained(made, "orpo-brevity", "orpo", *pairs(made), f"model.path={made / 'model'}")
    accuracy, nll = held_out(run, "val/pair_accuracy"), held_out(run, "val/nll")
    assert 0.35 <= accuracy[0] <= 0.65
    assert accuracy[-1] >= 0.9
    assert nll[-1] < 0.1 * nll[0]


def implicit_accuracy(made: Path, run: Path) -> float:
    """How often the policy, against where it started, raised the chosen answer more: by transformers alone."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    after = AutoModelForCausalLM.from_pretrained(run / "export")
    before = AutoModelForCausalLM.from_pretrained(made / "model")

    @torch.no_grad()
    def raised(prompt: list[dict], answer: list[dict]) -> float:
        opening = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        begun = tokenizer(opening)["input_ids"]
        said = tokenizer(answer[0]["content"] + "<|im_end|>")["input_ids"]
        ids = torch.tensor([begun + said])
        sums = []
        for model in (after, before):
            logprobs = model(ids).logits[0, len(begun) - 1 : -1].log_softmax(-1)
            sums.append(float(logprobs.gather(1, torch.tensor(said)[:, None]).sum()))
        return sums[0] - sums[1]

    rows = held_out_pairs(made, 60)
    wins = [raised(row["prompt"], row["chosen"]) > raised(row["prompt"], row["rejected"]) for row in rows]
    return sum(wins) / len(wins)


# -- reward models -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_reward_model_and_its_folder_in_plain_transformers(made: Path, small_scorer: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from lockstep.reward.model import load_reward_model
    from lockstep.types import Origin, Question

    scorer = small_scorer
    assert held_out(scorer, "val/pair_accuracy")[-1] >= 0.95
    rows = held_out_pairs(made, 80)
    tokenizer = AutoTokenizer.from_pretrained(scorer / "export")
    model = AutoModelForSequenceClassification.from_pretrained(scorer / "export")
    assert model.num_labels == 1
    with torch.no_grad():
        scores = {
            side: [
                float(model(**tokenizer(_rendered(tokenizer, row, side), return_tensors="pt")).logits[0, 0])
                for row in rows
            ]
            for side in ("chosen", "rejected")
        }
    for side, found in scores.items():
        assert sum(found) / len(found) == pytest.approx(held_out(scorer, f"val/{side}")[-1], abs=1e-4)
    every = torch.tensor([*scores["chosen"], *scores["rejected"]])
    stats = json.loads((scorer / "export" / "score_stats.json").read_text(encoding="utf-8"))
    assert stats["mean"] == pytest.approx(float(every.mean()), abs=1e-4)
    assert stats["std"] == pytest.approx(float(every.std(unbiased=False)), abs=1e-4)
    # The same folder as a reward: its scores are those, normalised.
    reward = load_reward_model(str(scorer / "export"), torch.device("cpu"))
    asked = [Question("brevity", row["prompt"], "", Origin("pairs", 0)) for row in rows]
    given = reward.score(
        [reward.encode(question, row["chosen"][0]["content"]) for question, row in zip(asked, rows, strict=True)]
    )
    wanted = [(score - stats["mean"]) / stats["std"] for score in scores["chosen"]]
    assert given == pytest.approx(wanted, abs=1e-3)


def _rendered(tokenizer, row: dict, side: str) -> str:  # type: ignore[no-untyped-def]
    return tokenizer.apply_chat_template([*row["prompt"], *row[side]], tokenize=False)


@pytest.mark.slow
def test_a_reward_model_teaches_a_policy(made: Path, warm: Path, scorer: Path) -> None:
    run = trained(
        made,
        "ppo-brevity",
        "ppo",
        "run.steps=25",
        f"model.path={warm / 'export'}",
        f"reward.model={scorer / 'export'}",
        f"critic.path={scorer / 'export'}",
        f"data.train={made / 'preferences' / 'prompts_train.parquet'}",
        f"val.questions={made / 'preferences' / 'prompts_val.parquet'}",
    )
    scores = held_out(run, "critic/score/mean")
    assert sum(scores[-5:]) / 5 > sum(scores[:5]) / 5 + 0.4
    rewards = held_out(run, "val/reward")
    assert rewards[-1] > rewards[0] + 0.4


@pytest.mark.slow
@pytest.mark.parametrize("soft", [False, True])
def test_a_process_reward_model_checks_sums(made: Path, tmp_path: Path, soft: bool) -> None:
    files = {split: made / "preferences" / f"steps_{split}.parquet" for split in ("train", "val")}
    if soft:
        files = {split: _softened(file, tmp_path / f"{split}.jsonl") for split, file in files.items()}
    run = trained(
        made,
        "prm-steps",
        f"prm-{'soft' if soft else 'hard'}",
        f"model.path={made / 'model'}",
        f"data.train={files['train']}",
        f"data.val={files['val']}",
        "val.every=100",
        "run.export=false",
    )
    accuracy = held_out(run, "val/step_accuracy")
    assert 0.35 <= accuracy[0] <= 0.65
    assert accuracy[-1] >= 0.9


def _softened(file: Path, out: Path) -> Path:
    rows = parquet.read_table(file).to_pylist()
    return write_jsonl(out, [{**row, "labels": [0.9 if label else 0.1 for label in row["labels"]]} for row in rows])


# -- teachers ----------------------------------------------------------------------------------------------------------


TEACHING = {
    "forward": ["distill.divergence=forward"],
    "reverse": ["distill.divergence=reverse"],
    "jsd": ["distill.divergence=jsd", "run.steps=150"],
    "top_k": ["distill.top_k=16"],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TEACHING)
def test_a_student_closes_the_gap_to_its_teacher(made: Path, teacher: Path, kind: str) -> None:
    """The teacher's words alone (coefficient 1.0), measured by the rows' likelihood, which is not what is trained."""
    run = trained(
        made,
        "distill-arithmetic",
        f"distill-{kind}",
        *sums(made),
        f"model.path={made / 'student'}",
        f"distill.teacher={teacher / 'export'}",
        "distill.coefficient=1.0",
        "run.steps=60",
        "run.export=false",
        *TEACHING[kind],
    )
    apart = held_out(run, "val/divergence")
    assert apart[-1] < 0.5 * apart[0]
    if kind == "jsd":
        # It is bounded: words that the student finds all but impossible have no slope, and stay so for long.
        return
    nll, best = held_out(run, "val/nll"), held_out(teacher, "val/loss")[-1]
    assert best < 0.5
    assert (nll[0] - nll[-1]) / (nll[0] - best) >= 0.8


@pytest.mark.slow
def test_a_student_is_taught_on_its_own_responses(made: Path, teacher: Path) -> None:
    half = trained(made, "sft-arithmetic", "half", "run.steps=80", *sums(made), f"model.path={made / 'student'}")
    run = trained(
        made,
        "grpo-arithmetic",
        "on-policy",
        "method=on_policy_distill",
        "run.steps=40",
        f"model.path={half / 'export'}",
        "algorithm.kl.where=reward",
        f"algorithm.kl.reference={teacher / 'export'}",
        "rollout.n=1",
        "batch.prompts=128",
        f"data.train={made / 'data' / 'train.parquet'}",
        f"val.questions={made / 'data' / 'val.parquet'}",
        "run.export=false",
    )
    apart = held_out(run, "actor/reward_kl_penalty")
    assert sum(apart[-5:]) < 0.8 * sum(apart[:5])
