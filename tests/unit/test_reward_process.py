"""A process reward model as a reward: steps found, judged as plain transformers would, credited where they end."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import SIZES, write_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GraniteConfig

from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.parallel.world import World
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.parts import StepOutcome
from lockstep.reward.process_model import PROCESS, ProcessPart, steps_of
from lockstep.reward.scorer import Scorer
from lockstep.rollout.collect import collect, token_at
from lockstep.types import Completion, Failure, Origin, Prompt, Question, Rollout, Sampling, Score

CPU = torch.device("cpu")
QUESTION = Question("sums", [{"role": "user", "content": "2+3+4?"}], "9", Origin("rows.jsonl", 0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prm") / "model"
    write_tiny(folder, hidden=64, layers=2)
    (folder / PROCESS).write_text(json.dumps({"placeholder": "~", "tokens": ["+", "-"]}), encoding="utf-8")
    return folder


def by_hand(folder: Path, steps: list[str]) -> list[float]:
    """Each step judged by a forward pass of its own over what stands up to it."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    words = [tokenizer(word, add_special_tokens=False)["input_ids"][0] for word in ("+", "-")]
    found = []
    for count in range(1, len(steps) + 1):
        text = tokenizer.apply_chat_template(QUESTION.prompt, tokenize=False, add_generation_prompt=True)
        text += "\n".join(f"{step}~" for step in steps[:count])
        ids = torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])
        with torch.no_grad():
            logits = model(ids).logits[0, -1, words]
        found.append(float(logits.softmax(-1)[0]))
    return found


def settled(part: ProcessPart, *texts: str) -> list[StepOutcome | Failure]:
    futures = [part.submit(QUESTION, text) for text in texts]
    part.flush()
    return [future.result() for future in futures]  # type: ignore[misc]


def test_steps_end_where_their_text_ends() -> None:
    text = "2+3=5\n\n  5+4=9 \n#### 9"
    steps = steps_of(text, "\n")
    assert [step for step, _ in steps] == ["2+3=5", "5+4=9", "#### 9"]
    assert [text[:end] for _, end in steps] == ["2+3=5", "2+3=5\n\n  5+4=9", text]
    assert steps_of("a; b;; ", ";") == [("a", 1), ("b", 4)]
    assert steps_of(" \n ", "\n") == []


def test_each_step_earns_its_share_of_the_mean(folder: Path) -> None:
    part = ProcessPart(str(folder), "\n", CPU)
    first, second = settled(part, "2+3=5\n5+4=8", "2+4=6")
    assert isinstance(first, StepOutcome)
    wanted = by_hand(folder, ["2+3=5", "5+4=8"])
    assert wanted[0] != pytest.approx(wanted[1], abs=1e-3)
    assert first["process"] == pytest.approx(sum(wanted) / 2, abs=1e-5)
    assert first["process_worst"] == pytest.approx(min(wanted), abs=1e-5)
    assert [end for end, _ in first.steps] == [5, 11]
    assert [share for _, share in first.steps] == pytest.approx([p / 2 for p in wanted], abs=1e-5)
    assert isinstance(second, StepOutcome)
    assert second["process"] == pytest.approx(by_hand(folder, ["2+4=6"])[0], abs=1e-5)


def test_a_model_that_scales_its_logits_judges_by_scaled_ones(tmp_path: Path, folder: Path) -> None:
    config = GraniteConfig(**SIZES, logits_scaling=20.0)
    scaled = write_model(tmp_path / "scaled", config, folder)
    (scaled / PROCESS).write_text((folder / PROCESS).read_text(encoding="utf-8"), encoding="utf-8")
    (found,) = settled(ProcessPart(str(scaled), "\n", CPU), "2+3=5")
    assert isinstance(found, StepOutcome)
    (wanted,) = by_hand(scaled, ["2+3=5"])
    assert abs(wanted - 0.5) > 0.01
    assert found["process"] == pytest.approx(wanted, abs=1e-5)


def test_nothing_written_earns_nothing_and_the_placeholder_itself_is_a_failure(folder: Path) -> None:
    empty, cheat = settled(ProcessPart(str(folder), "\n", CPU), " \n", "2+3=5~")
    assert empty == {"process": 0.0}
    assert isinstance(cheat, Failure)
    assert "contains the placeholder '~'" in cheat.why


def test_a_text_over_the_context_is_a_failure(folder: Path) -> None:
    (found,) = settled(ProcessPart(str(folder), "\n", CPU), "1\n" * 3000)
    assert isinstance(found, Failure)
    assert "more than the model's context" in found.why


def test_a_folder_without_its_words_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "model", hidden=32, layers=1)
    with pytest.raises(Refusal, match=r"no process_reward\.json"):
        ProcessPart(str(tmp_path / "model"), "\n", CPU)


def test_the_weight_counts_for_steps_too(folder: Path) -> None:
    settings = Reward(process=str(folder), format="2.*", weights={"process": 3.0, "format": 1.0})
    with Scorer.open(settings, ["sums"], CPU) as scorer:
        future = scorer.submit(QUESTION, "2+3=5\n5+4=8")
        scorer.flush()
        score = future.result()
    assert isinstance(score, Score)
    wanted = by_hand(folder, ["2+3=5", "5+4=8"])
    assert score.total == pytest.approx(1.0 + 3.0 * sum(wanted) / 2, abs=1e-4)
    assert [share for _, share in score.steps] == pytest.approx([3.0 * p / 2 for p in wanted], abs=1e-4)


def test_a_rule_that_only_looks_on_is_not_needed() -> None:
    """Rows without a rule can be used where the rule's weight is 0; with a weight they are refused."""
    with Scorer.open(Reward(weights={"rule": 0.0}), ["unheard of"], CPU) as scorer:
        assert scorer.submit(QUESTION, "anything").result() == Score(0.0)
        scorer.flush()
    with pytest.raises(Refusal, match="unheard of"):
        Scorer.open(Reward(), ["unheard of"], CPU)
    with Scorer.open(Reward(weights={"rule": 0.0}), ["arithmetic"], CPU) as scorer:
        asked = Question("arithmetic", QUESTION.prompt, "9", QUESTION.origin)
        score = scorer.submit(asked, "#### 9").result()
        assert score == Score(0.0, {"rule": 1.0})


def test_the_token_that_completes_a_text() -> None:
    pieces = ["ab", "", "c", "def"]

    def decode(ids: list[int]) -> str:
        return "".join(pieces[i] for i in ids)

    assert [token_at([0, 1, 2, 3], end, decode) for end in (1, 2, 3, 4, 6, 99)] == [0, 0, 2, 3, 3, 3]


class Fixed:
    """An engine and a judge that have decided."""

    def generate(self, requests, sampling):
        yield Completion(0, 0, [0, 1, 2, 3], [0.0] * 4, "token")

    def submit(self, question: Question, text: str) -> Future[Score | Failure]:
        future: Future[Score | Failure] = Future()
        future.set_result(Score(1.0, {"process": 0.7}, ((2, 0.3), (5, 0.4))))
        return future

    def flush(self) -> None: ...


def test_steps_are_credited_to_tokens_and_the_rest_to_the_end() -> None:
    from contextlib import nullcontext

    from lockstep.train.experience import build_experience

    def decode(ids: list[int]) -> str:
        return "".join(["a", "b\n", "cd", "!"][i] for i in ids)

    (made,) = collect(
        Fixed(), Fixed(), [Prompt(QUESTION, [5, 6])], [0], 1, Sampling(4), World(), decode, lambda name: nullcontext()
    ).rollouts
    assert isinstance(made, Rollout)
    assert made.token_rewards == ((1, 0.3), (2, 0.4))
    experience = build_experience([made, replace(made, sample=1)])
    assert experience.token_rewards_K.tolist() == pytest.approx([0, 0.3, 0.4, 0] * 2)
