"""A real tiny reward model, held against its own layers run by hand on one row at a time."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch

from lockstep.errors import Refusal
from lockstep.reward import model as batched
from lockstep.reward.model import ModelPart, ModelsPart, batches, load_reward_model
from lockstep.types import Failure, Origin, Question
from reward_models import write_reward_model

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory) -> Path:
    return write_reward_model(tiny_folder, tmp_path_factory.mktemp("rm") / "rm")


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))


def question(words: str = "9+9?") -> Question:
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": words}]
    return Question("sums", prompt, "18", Origin("rows", 1))


def rendered(answer: str, words: str = "9+9?") -> str:
    return (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        f"<|im_start|>user\n{words}<|im_end|>\n"
        f"<|im_start|>assistant\n{answer}<|im_end|>\n"
    )


def by_hand(folder: Path, ids: list[int], position: int = -1) -> float:
    """The backbone on one row alone, then the head on one position of it."""
    from transformers import Qwen2ForSequenceClassification

    model = Qwen2ForSequenceClassification.from_pretrained(folder)
    with torch.no_grad():
        hidden = model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, position]
        return float(hidden @ model.score.weight[0])


def encoded(folder: Path, text: str) -> list[int]:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)(text, add_special_tokens=False)["input_ids"]


def scores(part: ModelPart, texts: list[str]) -> list[float]:
    futures = [part.submit(question(), text) for text in texts]
    assert not any(future.done() for future in futures)
    part.flush()
    return [future.result(0)["model"] for future in futures]


TEXTS = ["#### 18", "", "so " * 30 + "#### 18", "nineteen", "#### 19", "x" * 120]


def test_scores_are_those_of_each_row_alone(folder) -> None:
    found = scores(ModelPart(str(folder), CPU), TEXTS)
    wanted = [by_hand(folder, encoded(folder, rendered(text))) for text in TEXTS]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 0.1


def test_scores_do_not_depend_on_the_company(folder, monkeypatch) -> None:
    part = ModelPart(str(folder), CPU)
    together = scores(part, TEXTS)
    shuffled = list(enumerate(TEXTS))
    random.Random(0).shuffle(shuffled)
    again = dict(zip([i for i, _ in shuffled], scores(part, [text for _, text in shuffled]), strict=True))
    assert [again[i] for i in range(len(TEXTS))] == pytest.approx(together, abs=1e-5)
    monkeypatch.setattr(batched, "BATCH_TOKENS", 1)
    assert scores(part, TEXTS) == pytest.approx(together, abs=1e-5)


@pytest.mark.parametrize("padding", [None, "line break"])
def test_padding_that_is_missing_or_ends_the_text(tiny_folder, tmp_path, padding) -> None:
    """Without a padding token the last token counts. Where the last token is the padding token, the one before does,
    as in the library's own forward pass, alone or in company."""
    newline = encoded(tiny_folder, "\n")[0]
    folder = write_reward_model(tiny_folder, tmp_path / "rm", pad_token_id=newline if padding else None)
    found = scores(ModelPart(str(folder), CPU), TEXTS)
    position = -2 if padding else -1
    wanted = [by_hand(folder, encoded(folder, rendered(text)), position) for text in TEXTS]
    assert found == pytest.approx(wanted, abs=1e-5)


def test_a_folder_without_a_template_joins_by_line_breaks(folder, tmp_path) -> None:
    bare = copied(folder, tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    (found,) = scores(ModelPart(str(bare), CPU), ["#### 18"])
    assert found == pytest.approx(by_hand(folder, encoded(folder, "Be brief.\n9+9?\n#### 18")), abs=1e-5)


def test_stored_statistics_normalise(folder, tmp_path) -> None:
    normalised = copied(folder, tmp_path / "rm")
    (normalised / "score_stats.json").write_text(json.dumps({"mean": 0.5, "std": 4.0}))
    raw, found = scores(ModelPart(str(folder), CPU), TEXTS), scores(ModelPart(str(normalised), CPU), TEXTS)
    assert found == pytest.approx([(score - 0.5) / 4.0 for score in raw], abs=1e-5)


def test_several_models_are_added_by_weight(folder, tmp_path) -> None:
    other = copied(folder, tmp_path / "other")
    (other / "score_stats.json").write_text(json.dumps({"mean": 0.5, "std": 4.0}))
    raw = scores(ModelPart(str(folder), CPU), TEXTS)
    both = ModelsPart([str(folder), str(other)], [2.0, -1.0], CPU)
    futures = [both.submit(question(), text) for text in TEXTS]
    both.flush()
    outcomes = [future.result(0) for future in futures]
    assert [found["model"] for found in outcomes] == pytest.approx([2 * x - (x - 0.5) / 4 for x in raw], abs=1e-4)
    assert [found["model/2"] for found in outcomes] == pytest.approx([(x - 0.5) / 4 for x in raw], abs=1e-4)
    even = ModelsPart([str(folder), str(other)], [], CPU)
    future = even.submit(question(), TEXTS[0])
    even.flush()
    assert future.result(0)["model"] == pytest.approx(raw[0] + (raw[0] - 0.5) / 4, abs=1e-4)
    # One that cannot score a response leaves it without a score.
    assert isinstance(both.submit(question(), "x" * 3000).result(0), Failure)
    waiting = both.submit(question(), "#### 18")
    both.close()
    assert isinstance(waiting.result(0), Failure)


@pytest.mark.parametrize("stats", ['{"mean": 0.0, "std": 0.0}', '{"mean": NaN, "std": 1.0}', '{"mean": 1}', "[", "[]"])
def test_statistics_that_cannot_be_used_are_refused(folder, tmp_path, stats) -> None:
    bad = copied(folder, tmp_path / "rm")
    (bad / "score_stats.json").write_text(stats)
    with pytest.raises(Refusal, match=r"score_stats\.json"):
        load_reward_model(str(bad), CPU)


def test_a_text_over_the_context_is_a_failure_and_not_cut(folder) -> None:
    part = ModelPart(str(folder), CPU)
    assert part.submit(question(), "x" * 3000).result(0).why.endswith("context of 2048")


def test_a_chat_that_the_template_refuses_is_a_failure(folder, tmp_path) -> None:
    strict = copied(folder, tmp_path / "rm")
    (strict / "chat_template.jinja").write_text("{{ raise_exception('no system message, please') }}")
    failure = ModelPart(str(strict), CPU).submit(question(), "x").result(0)
    assert "no system message, please" in failure.why
    assert failure.why.startswith("rows row 1")


def test_other_models_are_refused(tiny_folder, folder, tmp_path) -> None:
    two = write_reward_model(tiny_folder, tmp_path / "two", labels=2)
    with pytest.raises(Refusal, match="gives 2 labels; a reward is one number"):
        load_reward_model(str(two), CPU)
    with pytest.raises(Refusal, match="not a sequence classification model; its architecture is Qwen2ForCausalLM"):
        load_reward_model(str(tiny_folder), CPU)
    with pytest.raises(Refusal, match=r"reward\.model .*no such folder"):
        load_reward_model(str(tmp_path / "missing"), CPU)
    headless = copied(folder, tmp_path / "headless")
    shutil.copy(tiny_folder / "model.safetensors", headless / "model.safetensors")
    with pytest.raises(Refusal, match=r"the weights lack score\.weight"):
        load_reward_model(str(headless), CPU)


def test_weights_that_give_no_number_are_failures(folder, tmp_path) -> None:
    from safetensors.torch import load_file, save_file

    broken = copied(folder, tmp_path / "rm")
    weights = load_file(broken / "model.safetensors")
    weights["score.weight"][:] = 3e38  # finite, and too large for a sum
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    part = ModelPart(str(broken), CPU)
    future = part.submit(question(), "x")
    part.flush()
    assert future.result(0) == Failure("model", "the score is nan")


def test_closing_answers_what_waits(folder) -> None:
    part = ModelPart(str(folder), CPU)
    future = part.submit(question(), "x")
    part.close()
    outcome = future.result(0)
    assert isinstance(outcome, Failure)
    assert "the run ended" in outcome.why


def test_batches_hold_the_padded_rows() -> None:
    assert list(batches([5, 1, 9, 5, 2], 10)) == [[1, 4], [0, 3], [2]]
    assert list(batches([50, 3], 10)) == [[1], [0]]
    assert list(batches([], 10)) == []
