"""Reward functions with TRL's signature, in real processes. Expected calls follow TRL's GRPOTrainer: every argument by
keyword, `prompts`, `completions` and each column of the rows as a list, None for a completion that is not scored."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hang import HANG
from lockstep.data.dataset import RowRequest, load_rows
from lockstep.data.encode.prompt_rows import PromptRows, PromptSet
from lockstep.functions import register_callable
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data
from lockstep.reward.function import BATCH_RESPONSES, FunctionPart
from lockstep.reward.parts import PartOutcome
from lockstep.reward.row_rewards import read_by_rewards
from lockstep.reward.scorer import FormatPart, Scorer
from lockstep.types import Failure, Origin, Question, Score
from refusals import refuses
from reward_functions import settings

FUNCTIONS = '''
import json, math

def record(completions, **kwargs):
    with open(SEEN, "a") as file:
        state = kwargs.pop("trainer_state")
        steps = None if state is None else [state.global_step, state.max_steps]
        file.write(json.dumps({"completions": completions, "steps": steps, **kwargs}) + "\\\\n")
    return [float(len(completion)) for completion in completions]

def chat_length(completions, **kwargs):
    return [len(completion[0]["content"]) for completion in completions]

def matches(completions, solution, **kwargs):
    return [1.0 if completion == wanted else 0.0 for completion, wanted in zip(completions, solution)]

def prompt_and_completion(prompts, completions):
    return [len(prompt) + 100 * len(completion) for prompt, completion in zip(prompts, completions)]

def only_some(completions, **kwargs):
    return [None if "skip" in completion else 1 for completion in completions]

def odd(completions, **kwargs):
    return [math.nan if completion == "nan" else "text" if completion == "text" else 2 for completion in completions]

def too_few(completions, **kwargs):
    return [1.0]

def fails(completions, **kwargs):
    raise ValueError("not today")

async def later(completions, **kwargs):
    return [0.25] * len(completions)

def ranks(completions, **kwargs):
    """A reward that compares the completions of a call."""
    ordered = sorted(set(completions))
    return [ordered.index(completion) for completion in completions]

def scaled(completions, scale, **kwargs):
    return [scale * len(completion) for completion in completions]

def late_bonus(completions, trainer_state, **kwargs):
    return [trainer_state.global_step / trainer_state.max_steps] * len(completions)

def two_styles(completions, solution_str, **kwargs):
    return [0.0]

def three_styles(queries, prompts, labels, completions):
    return [0.0]

def by_ids(completions, completion_ids, **kwargs):
    return [0.0]

def by_position(completions, /, **kwargs):
    return [0.0]
'''


def row(number: int, **columns: Any) -> Question:
    """A question as `PromptRows` builds it for a function with TRL's signature."""
    prompt = columns.pop("prompt", f"question {number}")
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    return Question("sums", chat, "", Origin("rows", number), columns={"prompt": prompt, **columns})


@pytest.fixture
def opened(tmp_path: Path) -> Callable[..., Any]:
    file = tmp_path / "rewards.py"
    file.write_text(f"SEEN = {str(tmp_path / 'seen.jsonl')!r}\n" + FUNCTIONS.replace("\\\\n", "\\n"))

    @contextmanager
    def open_part(name: str, **keys: Any) -> Iterator[FunctionPart]:
        part = FunctionPart(f"{file}:{name}", settings(**keys))
        try:
            yield part
        finally:
            part.close()

    return open_part


def outcomes(part: FunctionPart, responses: list[tuple[Question, str]]) -> list[PartOutcome]:
    futures = [part.submit(question, text) for question, text in responses]
    part.flush()
    return [future.result(timeout=HANG) for future in futures]


def scores(part: FunctionPart, responses: list[tuple[Question, str]]) -> list[float]:
    return [found["function"] for found in outcomes(part, responses) if isinstance(found, dict)]


def test_a_call_gets_the_arguments_of_trl(opened: Callable[..., Any], tmp_path: Path) -> None:
    a, b = row(0, solution="3", level=1), row(1, solution="5", tags=["x"])
    with opened("record", arguments={"scale": 2}) as part:
        part.progress = (7, 20)
        # Responses come in any order; those of a prompt are adjacent in the call.
        assert scores(part, [(b, "bbb"), (a, "z"), (b, "cc"), (a, "yy")]) == [3.0, 1.0, 2.0, 2.0]
        part.progress = None
        scores(part, [(a, "z")])
    first, second = map(json.loads, (tmp_path / "seen.jsonl").read_text().splitlines())
    assert first == {
        "completions": ["yy", "z", "bbb", "cc"],
        "prompts": ["question 0", "question 0", "question 1", "question 1"],
        "solution": ["3", "3", "5", "5"],
        "level": [1, 1, None, None],
        "tags": [None, None, ["x"], ["x"]],
        "scale": 2,
        "steps": [7, 20],
    }
    assert second["steps"] is None


@pytest.mark.daily("later-responses3-expected3", "matches-responses0-expected0", "ranks-responses4-expected4")
@pytest.mark.parametrize(
    ("name", "responses", "expected"),
    [
        ("matches", [(row(0, solution="3"), "3"), (row(0, solution="3"), "4"), (row(1, solution="5"), "5")], [1, 0, 1]),
        ("prompt_and_completion", [(row(0, prompt="four"), "abc")], [304]),
        ("chat_length", [(row(0, prompt=[{"role": "user", "content": "hi"}]), "four")], [4]),
        ("later", [(row(0), "a"), (row(1), "b")], [0.25, 0.25]),
        ("ranks", [(row(0), "c"), (row(0), "a"), (row(0), "b")], [2, 0, 1]),
    ],
)
def test_scores_by_hand(opened: Callable[..., Any], name: str, responses: Any, expected: list[float]) -> None:
    with opened(name) as part:
        assert scores(part, responses) == expected


def test_arguments_and_trainer_state(opened: Callable[..., Any]) -> None:
    with opened("scaled", arguments={"scale": 0.5}) as part:
        assert scores(part, [(row(0), "abcd")]) == [2.0]
    with opened("late_bonus") as part:
        part.progress = (5, 20)
        assert scores(part, [(row(0), "a")]) == [0.25]
        part.progress = None
        (failed,) = outcomes(part, [(row(0), "a")])
        assert isinstance(failed, Failure)


def test_none_is_no_score_and_other_rewards_count(opened: Callable[..., Any]) -> None:
    with opened("only_some") as part:
        assert outcomes(part, [(row(0), "a"), (row(0), "skip")]) == [{"function": 1.0}, {}]
        alone = Scorer([part], {"function": 1.0}, {})
        both = Scorer([part, FormatPart("s.*")], {"function": 1.0, "format": 0.5}, {})
        logged = Scorer([part, FormatPart("s.*")], {"function": 1.0, "format": 0.0}, {})
        found = [scorer.submit(row(0), "skip") for scorer in (alone, both, logged)]
        part.flush()
        first, second, third = [future.result(timeout=HANG) for future in found]
    assert second == Score(0.5, {"format": 1.0})
    for failed in (first, third):
        assert isinstance(failed, Failure)
        assert "None" in failed.why


def test_what_is_not_a_number_fails_its_response_alone(opened: Callable[..., Any]) -> None:
    with opened("odd") as part:
        good, nan, text = outcomes(part, [(row(0), "a"), (row(0), "nan"), (row(0), "text")])
    assert good == {"function": 2.0}
    for failed in (nan, text):
        assert isinstance(failed, Failure)
        assert "not a finite number" in failed.why


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("too_few", "1 rewards for 2"),
        ("fails", "not today"),
        ("matches", "needs the column solution, and the rows have level"),
    ],
)
def test_a_call_that_fails_fails_its_batch(opened: Callable[..., Any], name: str, why: str) -> None:
    with opened(name) as part:
        for found in outcomes(part, [(row(0, level=1), "a"), (row(0, level=1), "b")]):
            assert isinstance(found, Failure)
            assert why in found.why


def test_batches_hold_whole_groups_and_do_not_depend_on_the_workers(opened: Callable[..., Any], tmp_path: Path) -> None:
    responses = [(row(number % 10), f"{number:03}") for number in range(100)]
    found = []
    for workers in (1, 3):
        with opened("ranks", workers=workers) as part:
            found.append(scores(part, responses))
    assert found[0] == found[1]
    with opened("record") as part:
        scores(part, responses)
    calls = [json.loads(line) for line in (tmp_path / "seen.jsonl").read_text().splitlines()]
    assert [len(call["completions"]) for call in calls] == [60, 40]
    assert all(len(call["completions"]) <= BATCH_RESPONSES for call in calls)


def test_close_answers_what_waits(opened: Callable[..., Any]) -> None:
    with opened("record") as part:
        waiting = part.submit(row(0), "a")
    assert isinstance(waiting.result(timeout=HANG), Failure)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("two_styles", "solution_str is verl's"),
        ("three_styles", "queries is OpenRLHF's"),
        ("by_ids", "completion_ids"),
        ("by_position", "by keyword"),
    ],
)
def test_unclear_signatures_are_refused(opened: Callable[..., Any], name: str, value: str) -> None:
    with (
        refuses("reward.function", "invalid-function", value, remedy=f"def {name}(completions, **kwargs)"),
        opened(name),
    ):
        pass


def test_an_argument_that_the_function_lacks_is_refused(opened: Callable[..., Any]) -> None:
    keys = {"arguments": {"scale": 2}}
    with refuses("reward.function", "invalid-function", "scale"), opened("prompt_and_completion", **keys):
        pass


def test_a_function_of_this_process_is_called_with_batches() -> None:
    def longest(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(one) == max(map(len, completions))) for one in completions]

    reference = register_callable("reward.function", longest)
    part = FunctionPart(reference, settings())
    assert scores(part, [(row(0), "a"), (row(0), "bb")]) == [0.0, 1.0]
    part.close()
    assert read_by_rewards(settings(function=reference)) == {"columns"}


def test_rows_keep_their_columns_only_for_such_functions(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "r.py").write_text("def f(prompts, completions, **kwargs):\n    return kwargs['answer']\n")
    fields = read_by_rewards(settings(function=f"{tmp_path / 'r.py'}:f"))
    assert fields == {"columns"}
    rows = [{"prompt": "1+1?", "answer": "2", "level": 3}, {"prompt": "2+2?", "answer": "4", "level": None}]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(one) + "\n" for one in rows))
    data = Data.model_validate({"train": str(file)})
    tokenizer = load_tokenizer(str(tiny_folder))

    def columns(fields: frozenset[str]) -> list[dict[str, Any]]:
        def reader(*given: Any) -> PromptRows:
            return PromptRows(*given, reward_fields=fields)

        loaded = load_rows(RowRequest(PromptSet, reader, data.train, data, tokenizer, 100))
        return [question.columns for question in loaded.questions]

    assert columns(fields) == rows
    assert columns(frozenset()) == [{}, {}]


@pytest.mark.slow
def test_a_run_scores_whole_groups_and_tells_the_step(online_file: Path, tmp_path: Path) -> None:
    from conftest import run, write_jsonl

    seen = tmp_path / "seen.txt"
    (tmp_path / "reward.py").write_text(
        "def letters(completions, index, trainer_state, **kwargs):\n"
        f"    with open({str(seen)!r}, 'a') as file:\n"
        "        print(trainer_state.global_step, trainer_state.max_steps, *index, file=file)\n"
        "    return [len(set(text)) / 20 for text in completions]\n"
    )
    rows: list[dict[str, object]] = [{"prompt": f"{n}+{n}?", "index": n} for n in range(8)]
    train = write_jsonl(tmp_path / "texts.jsonl", rows)
    settings = [f"data.train={train}", "data.shuffle=false", "run.steps=2", "run.export=false"]
    assert run("train", online_file, *settings) == 0
    tested, *steps = seen.read_text().splitlines()
    assert tested.startswith("0 2 ")
    # Two steps of four prompts, each with three responses.
    expected = [range(4), range(4, 8)]
    assert steps == [
        f"{step} 2 {' '.join(str(n) for n in prompts for _ in range(3))}" for step, prompts in enumerate(expected)
    ]
