"""Keys that settings of other trainers need: each against a hand computation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from lockstep.algorithms.advantage import ESTIMATORS, Signals, Whitening, whiten
from lockstep.data.dataset import Loader, steps_and_rows
from lockstep.data.encode.chat_template import with_arguments
from lockstep.data.encode.encoding import Encoding
from lockstep.data.encode.prompt_rows import QuestionColumns, prompt_ids, read_questions, with_format
from lockstep.data.encode.sft_rows import Encoder, SupervisedColumns
from lockstep.data.sources.read import read_rows
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_data import Data
from lockstep.recipe.keys_online import Algorithm, DynamicSampling
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.function import FunctionPart
from lockstep.reward.remote import RemotePart, scores_in
from lockstep.reward.row_rewards import shaped
from lockstep.rollout.engine import validation_sampling
from lockstep.train.advantages import estimate_advantages
from lockstep.train.experience import ModelOutputs, build_experience, rollout_metas
from lockstep.train.monitor import has_signal as worth_a_place
from lockstep.train.optim import Optimizer
from lockstep.types import Failure, Origin, Prompt, Question, Rollout, Score
from refusals import refuses


@pytest.mark.parametrize(("decay_all", "bias"), [(False, 1.0), (True, 0.9)])
def test_decay_reaches_biases_when_asked(decay_all: bool, bias: float) -> None:
    """Without a gradient AdamW's step is the decay alone: p (1 - lr decay) = 1 - 0.5 x 0.2 = 0.9."""
    layer = nn.Linear(2, 2)
    nn.init.ones_(layer.weight)
    nn.init.ones_(layer.bias)
    settings = Optim(lr=0.5, weight_decay=0.2, decay_all=decay_all)
    optimizer = Optimizer(layer.named_parameters(), settings, masters=False, fused=False)
    for parameter in layer.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.5, torch.tensor(0.0))
    assert layer.weight.flatten().tolist() == pytest.approx([0.9] * 4)
    assert layer.bias.tolist() == pytest.approx([bias] * 2)


def test_an_epoch_may_end_with_its_last_whole_update() -> None:
    """10 rows, 3 an update: 3 whole updates an epoch, one row left over; 2 epochs are 6 updates of 18 rows."""
    assert steps_and_rows(10, 3, epochs=2, steps=None, drop_last=True) == (6, 18)
    loader = Loader([list(range(10))], None, rows_per_update=3, seed=0, shuffle=False, total_rows=18, drop_last=True)
    assert [loader.take(step) for step in (0, 2, 3, 5)] == [[0, 1, 2], [6, 7, 8], [0, 1, 2], [6, 7, 8]]


def test_fewer_rows_than_an_update_leave_an_empty_epoch() -> None:
    with refuses("data.drop_last", "too-few-rows", "2 rows", "the 3 of one update"):
        steps_and_rows(2, 3, epochs=1, steps=None, drop_last=True)


def test_whitening_with_n_and_without_the_division() -> None:
    """1, 2, 6: mean 3, squares 4 + 1 + 9 = 14; variance 14/2 with n - 1, 14/3 with n."""
    values = torch.tensor([1.0, 2.0, 6.0], dtype=torch.float64)
    centred = [-2.0, -1.0, 3.0]
    assert whiten(values).tolist() == pytest.approx([x / 7**0.5 for x in centred])
    assert whiten(values, biased=True).tolist() == pytest.approx([x / (14 / 3) ** 0.5 for x in centred])
    assert whiten(values, divide=False).tolist() == pytest.approx(centred)


@pytest.mark.parametrize(
    ("estimator", "whitening", "expected"),
    [
        # Two prompts with two answers of one token each: scores 1, 3 and 0, 0. Less the other's: -2, 2, 0, 0.
        ("rloo", Whitening(), [-2.0, 2.0, 0.0, 0.0]),
        # Variance with n: (4 + 4) / 4 = 2.
        ("rloo", Whitening("step", biased=True), [-(2.0**0.5), 2.0**0.5, 0.0, 0.0]),
        # Scores less the group's mean: -1, 1, 0, 0; their own whitening, with n - 1: variance 2/3.
        ("reinforce_pp_baseline", Whitening(), [-((3 / 2) ** 0.5), (3 / 2) ** 0.5, 0.0, 0.0]),
        ("reinforce_pp_baseline", Whitening("none"), [-1.0, 1.0, 0.0, 0.0]),
        # Scores 1, 3, 0, 0 less their mean of 1.
        ("reinforce_pp", Whitening(divide=False), [0.0, 2.0, -1.0, -1.0]),
    ],
)
def test_estimators_whiten_as_they_are_told(estimator: str, whitening: Whitening, expected: list[float]) -> None:
    signals = Signals(
        torch.tensor([1.0, 3.0, 0.0, 0.0]),
        torch.arange(4),
        torch.tensor([0, 0, 1, 1]),
        whitening=whitening,
    )
    estimate = ESTIMATORS[estimator](signals, gamma=1.0, lam=1.0)
    assert estimate.advantages_K.tolist() == pytest.approx(expected, abs=1e-6)


ONLINE = "method: grpo\nmodel: {path: m}\ndata: {train: q.parquet}\n"


def online(tmp_path: Path, *overrides: str):  # type: ignore[no-untyped-def]
    file = tmp_path / "recipe.yaml"
    file.write_text(ONLINE)
    return load_recipe(str(file), overrides)


@pytest.mark.parametrize(("score", "expected"), [(12.0, 10.0), (-30.0, -10.0), (3.5, 3.5)])
def test_a_score_is_held_within_its_bounds(tmp_path: Path, score: float, expected: float) -> None:
    recipe = online(tmp_path, "reward.clip=[-10, 10]")
    question = Question("s", [], "1", Origin("q", 1), {})
    rollout = Rollout(Prompt(question, [1]), 0, 0, [5], [-0.1], "token", "a", Score(score, {"model": score}))
    found = shaped(rollout, recipe).score
    assert isinstance(found, Score)
    assert (found.total, found.parts) == (expected, {"model": score})


def test_bounds_the_wrong_way_round_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match=r"reward\.clip"):
        online(tmp_path, "reward.clip=[1, -1]")


def test_validation_draws_as_its_own_keys_say(tmp_path: Path) -> None:
    recipe = online(tmp_path, "val.questions=[a, b]", "val.temperature=0.6", "val.top_p=0.7", "val.top_k=20")
    sampling = validation_sampling(recipe, [2])
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.7, 20)
    with refuses("val.top_p", "unused-key"):
        online(tmp_path, "val.questions=a", "val.top_p=0.7")


# torch takes seconds to import, and each case has a process of its own.
REWARD_FUNC = """
def tensor(queries, prompts, labels):
    import torch

    assert len(queries) == len(prompts) == len(labels) == 1
    return torch.tensor([len(queries[0]) - len(prompts[0]) + float(labels[0])])

def named(queries, prompts, labels, **more):
    return {"rewards": [2.5], "scores": [0.5], "extra_logs": {"seen": [queries[0].count("x")]}}

def wrong(queries, prompts, labels):
    return [1.0, 2.0]
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("tensor", {"function": 3 + 4.0}),  # a response of three letters, a label of 4
        ("named", {"function": 2.5, "function/seen": 4.0}),  # one x in the prompt, three in the response
        ("wrong", "gave 2 rewards for one response"),
    ],
)
def test_a_reward_function_over_batches_scores_one_response(
    tmp_path: Path, name: str, expected: dict[str, float] | str
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARD_FUNC)
    part = FunctionPart(f"{file}:{name}", Reward(workers=1, time_limit=120))
    try:
        question = Question("s", [{"role": "user", "content": "say x"}], "4", Origin("q", 1), {})
        outcome = part.submit(question, "xxx").result()
    finally:
        part.close()
    if isinstance(expected, dict):
        assert outcome == expected
    else:
        assert isinstance(outcome, Failure)
        assert expected in outcome.why


def test_an_endpoint_is_asked_in_openrlhfs_form() -> None:
    part = RemotePart.__new__(RemotePart)
    part._settings = Reward(remote="http://h/", remote_form="openrlhf")
    question = Question("s", [{"role": "user", "content": "1+1"}], "2", Origin("q", 1), {})
    bodies = [json.dumps(part._body(question, text)) for text in ("2", "3")]
    sent, key = part._request(bodies)
    assert json.loads(sent) == {"query": ["1+1\n2", "1+1\n3"], "prompts": ["1+1\n", "1+1\n"], "labels": ["2", "2"]}
    assert scores_in(b'{"rewards": [1.0, 0]}', 2, key) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("cut", "stop", "expected"), [(0.5, "length", 2.0), (-1.0, "length", -1.0), (0.5, "token", 4.0)]
)
def test_a_response_that_met_the_limit_loses_score(tmp_path: Path, cut: float, stop: str, expected: float) -> None:
    recipe = online(tmp_path, f"algorithm.overlong.truncated_reward={cut}")
    question = Question("s", [], "1", Origin("q", 1), {})
    rollout = Rollout(Prompt(question, [1]), 0, 0, [5], [-0.1], stop, "a", Score(4.0, {"model": 4.0}))
    found = shaped(rollout, recipe).score
    assert isinstance(found, Score)
    assert found.total == expected


def test_online_rows_with_columns_of_their_own(tmp_path: Path) -> None:
    row = {"question": "1+1?", "answer": 2, "chat": [{"role": "user", "content": "hi"}]}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    rows = read_rows(str(tmp_path / "rows.jsonl"))
    (found,) = read_questions(rows, columns=QuestionColumns("question", "answer", "rows.jsonl"))
    assert (found.data_source, found.prompt, found.ground_truth) == (
        "rows.jsonl", [{"role": "user", "content": "1+1?"}], "2",
    )  # fmt: skip
    (unjudged,) = read_questions(rows, columns=QuestionColumns("chat", "", "rows.jsonl"))
    assert (unjudged.prompt, unjudged.ground_truth) == (row["chat"], "")
    with pytest.raises(Refusal, match="data_source"):
        read_questions(rows, columns=QuestionColumns("question", "answer", required=frozenset({"data_source"})))


def test_a_format_around_the_prompt_inside_the_chat(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    data, origin = Data(train="x", prompt_format="Q: {}"), Origin("q", 1)
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+{}"}]
    asked = with_format(Question("s", chat, "2", origin), data)
    assert asked.prompt == [chat[0], {"role": "user", "content": "Q: 1+{}"}]
    encoder = Encoder(tokenizer, SupervisedColumns("prompt_response", prompt="p", response="r"), data)
    assert tokenizer.decode(list(encoder({"p": "1", "r": "2"}, origin)[0].ids)).startswith(
        "<|im_start|>user\nQ: 1<|im_end|>"
    )
    with refuses("", "unused-key", "data.prompt_format"):
        with_format(Question("s", [*chat, {"role": "assistant", "content": "a"}, chat[1]], "2", origin), data)
    with refuses("data.prompt_format", "unused-key", "messages"):
        Encoder(tokenizer, SupervisedColumns("messages", messages="m"), data)


def test_prompts_without_a_chat_template(tiny_folder: Path) -> None:
    """The text around the prompt, and nothing of a template, offline and online alike."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    data = Data(train="x", template="none", prompt_format="User: {}\nAssistant: ")
    question = Question("s", [{"role": "user", "content": "1+{}"}], "2", Origin("q", 1), {})
    text = "User: 1+{}\nAssistant: "
    ids = prompt_ids(tokenizer, question, data)
    assert ids == tokenizer(text)["input_ids"]
    example = Encoding(tokenizer, data).joined("1+{}", "2", Origin("q", 1))
    assert list(example.ids[: len(ids)]) == ids
    assert list(example.loss_mask) == [0] * len(ids) + [1] * (len(example.ids) - len(ids))


@pytest.mark.parametrize(
    ("overrides", "where"),
    [
        (["data.prompt_format=Q"], "data.prompt_format"),
        (["data.template=none", "data.prompt_format=Q"], "data.prompt_format"),
        (["data.response_key=a"], "data.response_key"),
    ],
)
def test_prompt_keys_that_contradict(tmp_path: Path, overrides: list[str], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        online(tmp_path, *overrides)
    assert [problem.where for problem in refused.value.problems] == [where]


def test_a_divergence_in_the_reward_beside_the_one_in_the_loss(tmp_path: Path) -> None:
    """Scores 1 and 3 of two tokens each; k1 = old - reference = 0.5 at each token, weight 0.2: 0.1 off each."""
    recipe = online(
        tmp_path, "algorithm.kl.where=loss", "algorithm.kl.coefficient=7", "algorithm.kl.reward_coefficient=0.2"
    )
    question = Question("s", [], "1", Origin("q", 1), {})
    rollouts = [
        Rollout(Prompt(question, [1]), 0, i, [5, 6], [-1.0, -1.0], "token", "a", Score(score, {"rule": score}))
        for i, score in enumerate((1.0, 3.0))
    ]
    known = ModelOutputs(old_K=torch.full((4,), -1.0), reference_K=torch.full((4,), -1.5), values_K=None)
    found = estimate_advantages(build_experience(rollouts, None), known, recipe, kl_coefficient=7.0)
    assert found.rewards_K.tolist() == pytest.approx([-0.1, 0.9, -0.1, 2.9])
    with pytest.raises(Refusal, match=r"algorithm\.kl\.reward_coefficient"):
        online(tmp_path, "algorithm.kl.where=reward", "algorithm.kl.reward_coefficient=0.2")


@pytest.mark.parametrize(
    ("scores", "between", "has_signal"),
    [
        ((0.0, 1.0), None, True),
        ((1.0, 1.0), None, False),
        ((1.0, 1.0), (0.0, 1.0), False),
        ((0.5, 0.5), (0.0, 1.0), True),  # equal, but of a mean within the bounds
        ((-1.0, 0.2), (0.0, 1.0), False),
    ],
)
def test_which_groups_are_replaced(
    scores: tuple[float, ...], between: tuple[float, float] | None, has_signal: bool
) -> None:
    question = Question("s", [], "1", Origin("q", 1), {})
    group = [
        Rollout(Prompt(question, [1]), 0, i, [5], [-1.0], "token", "a", Score(score, {}))
        for i, score in enumerate(scores)
    ]
    bounds = None if between is None else list(between)
    prompts = {0: group[0].prompt}
    algorithm = Algorithm(dynamic_sampling=DynamicSampling(max_gen_batches=2, between=bounds))
    assert worth_a_place(rollout_metas(group), prompts, algorithm) is has_signal


def test_arguments_of_the_chat_template(tiny_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% if think %}<t>{% endif %}{{ tone }}{% endfor %}"
    chat = [{"role": "user", "content": "hi"}]
    plain = tokenizer.apply_chat_template(chat, tokenize=False)
    told = with_arguments(tokenizer, {"think": True, "tone": 'a "b"'}).apply_chat_template(chat, tokenize=False)
    assert (plain, told) == ("hi", 'hi<t>a "b"')
    with pytest.raises(Refusal, match=r"data\.template_arguments\.unread"):
        with_arguments(tokenizer, {"unread": 1})
    with pytest.raises(Refusal, match=r"did you mean think\?"):
        with_arguments(tokenizer, {"thnk": True})


def test_arguments_of_a_reward_function(tmp_path: Path) -> None:
    """A function that must have them, and one that has no place for them."""
    file = tmp_path / "rewards.py"
    file.write_text(
        "def scaled(data_source, solution_str, ground_truth, extra_info, scale, word):\n"
        "    return scale * solution_str.count(word)\n"
        "def plain(data_source, solution_str, ground_truth, extra_info):\n"
        "    return 1.0\n"
    )
    question = Question("s", [{"role": "user", "content": "say x"}], "4", Origin("q", 1), {})
    part = FunctionPart(f"{file}:scaled", Reward(workers=1, arguments={"scale": 0.5, "word": "x"}))
    try:
        assert part.submit(question, "xxx").result() == {"function": 1.5}
    finally:
        part.close()
    with pytest.raises(Refusal, match="cannot be called with"):
        FunctionPart(f"{file}:plain", Reward(workers=1, arguments={"scale": 0.5})).close()
    with pytest.raises(Refusal, match=r"reward\.arguments"):
        online(tmp_path, "reward.arguments.scale=1")
    with refuses("reward.arguments.ground_truth", "duplicate-name"):
        online(tmp_path, "reward.function=f.py:f", "reward.arguments.ground_truth=1")
