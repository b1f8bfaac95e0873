"""Doors for functions of the user's own: advantage, loss, reader. What they may return, and what is refused and how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from hang import HANG
from lockstep.algorithms.advantage import Signals
from lockstep.algorithms.policy_loss import LOSSES, PolicyTokens
from lockstep.algorithms.user_functions import user_estimator, user_policy_loss
from lockstep.data.sources.read import read_rows
from lockstep.data.sources.user_reader import UserReader
from lockstep.errors import Refusal
from lockstep.functions import load_user_function
from lockstep.preflight.user_trials import try_advantage, try_loss
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_online import Algorithm
from lockstep.recipe.loader import dump_recipe, recipe_with
from lockstep.train.update_terms import make_policy_loss

SIGNALS = Signals(
    rewards_K=torch.tensor([0.0, 0.0, 1.0, 0.25, 0.0, -0.5]),
    sequence_K=torch.tensor([0, 0, 0, 1, 2, 2]),
    group_S=torch.tensor([0, 0, 1]),
)


def tokens(weights: list[float] | None = None) -> PolicyTokens:
    return PolicyTokens(
        logprobs_K=torch.tensor([-0.1, -0.7, -1.5, -2.0], requires_grad=True),
        old_K=torch.tensor([-0.3, -0.6, -1.0, -2.0]),
        advantages_K=torch.tensor([1.0, 1.0, -2.0, -2.0]),
        weights_K=torch.tensor(weights or [1.0, 0.5, 1.0, 1.0]),
        sequence_K=torch.tensor([0, 0, 1, 1]),
    )


def place(tmp_path: Path, text: str, name: str = "mine") -> str:
    file = tmp_path / "own.py"
    file.write_text(text, encoding="utf-8")
    return f"{file}:{name}"


def refusal(act: Any) -> str:
    with pytest.raises(Refusal) as caught:
        act()
    return str(caught.value)


def test_an_advantage_for_each_response_goes_to_all_its_tokens(tmp_path: Path) -> None:
    where = place(tmp_path, "def mine(signals):\n    return signals.scores_S - 0.5\n")
    estimate = user_estimator(where, HANG)(SIGNALS, gamma=1.0, lam=1.0)
    assert estimate.advantages_K.tolist() == [0.5, 0.5, 0.5, -0.25, -1.0, -1.0]
    assert estimate.returns_K.tolist() == [1.0, 1.0, 1.0, 0.25, -0.5, -0.5]


def test_an_advantage_for_each_token_stays_there(tmp_path: Path) -> None:
    where = place(tmp_path, "def mine(signals):\n    return [float(i) for i in range(6)]\n")
    assert user_estimator(where, HANG)(SIGNALS, gamma=1.0, lam=1.0).advantages_K.tolist() == [0, 1, 2, 3, 4, 5]


def test_built_in_losses_are_found_by_name() -> None:
    for name in LOSSES:
        found = make_policy_loss(Algorithm.model_construct(**{**Algorithm().model_dump(), "loss": name}))
        assert found.func is LOSSES[name]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return [1.0, 2.0]", "returned the shape (2,)"),
        ("return None", "[invalid-return]: returned a NoneType"),
        ("return ['a', 'b', 'c']", "[invalid-return]: returned a list"),
        ("return signals.scores_S / 0", "[not-finite]"),
        ("return signals.scores_S[:, None]", "returned the shape (3, 1)"),
        ("raise KeyError('x')", "raised KeyError: 'x' (own.py line 2)"),
    ],
)
def test_an_advantage_that_is_none_is_refused_by_key_file_and_name(tmp_path: Path, body: str, said: str) -> None:
    where = place(tmp_path, f"def mine(signals):\n    {body}\n")
    told = refusal(lambda: user_estimator(where, HANG)(SIGNALS, gamma=1.0, lam=1.0))
    assert told.startswith(f"algorithm.advantage {where} [")
    assert said in told
    assert "\n    -> " in told


CLIP = """
import torch

def mine(tokens):
    ratio = (tokens.logprobs_K - tokens.old_K).exp()
    free = -tokens.advantages_K * ratio
    return torch.maximum(free, -tokens.advantages_K * ratio.clamp(0.8, 1.2))
"""


@pytest.mark.parametrize("weights", [[1.0, 0.5, 1.0, 1.0], [1.0, 0.0, 1.0, 0.0]])
def test_a_loss_of_ones_own_has_the_weights_and_the_gradient_of_ours(tmp_path: Path, weights: list[float]) -> None:
    ours, theirs = tokens(weights), tokens(weights)
    wanted = LOSSES["clip"](ours, low=0.2, high=0.2, dual=None)
    found = user_policy_loss(place(tmp_path, CLIP), HANG)(theirs)
    assert found.loss.item() == wanted.loss.item()
    assert found.metrics["ppo_kl"].item() == wanted.metrics["ppo_kl"].item()
    wanted.loss.backward()
    found.loss.backward()
    assert torch.equal(ours.logprobs_K.grad, theirs.logprobs_K.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return tokens.logprobs_K.sum()", "returned the shape ()"),
        ("return 1.0", "returned a float"),
        ("return tokens.logprobs_K.detach()", "[invalid-return]: returned losses without a gradient"),
        ("return tokens.logprobs_K / 0", "[not-finite]: returned 4 losses"),
        ("return tokens.nothing", "raised AttributeError"),
    ],
)
def test_a_loss_that_is_none_is_refused_by_key_file_and_name(tmp_path: Path, body: str, said: str) -> None:
    where = place(tmp_path, f"def mine(tokens):\n    {body}\n")
    told = refusal(lambda: user_policy_loss(where, HANG)(tokens()))
    assert told.startswith(f"algorithm.loss {where} [")
    assert said in told


def test_the_dry_run_tells_what_it_saw(tmp_path: Path) -> None:
    where = place(tmp_path, "def mine(signals):\n    return signals.scores_S\n")
    # Scores of the generated responses are 1, 0, 0.25 and 0.75.
    assert try_advantage(where, 4, HANG) == f"algorithm.advantage {where}: 0 to 1, tried on 4 generated responses"
    assert "tried on 2 generated responses" in try_advantage(where, 1, HANG)
    (tmp_path / "loss.py").write_text(CLIP)
    assert "tried on 10 generated tokens" in try_loss(f"{tmp_path / 'loss.py'}:mine", HANG)


def test_the_dry_run_refuses_a_loss_that_would_train_nothing(tmp_path: Path) -> None:
    where = place(tmp_path, "def mine(tokens):\n    return tokens.logprobs_K * 0\n")
    assert "has no gradient" in refusal(lambda: try_loss(where, HANG))
    where = place(tmp_path, "def mine(tokens):\n    return (tokens.logprobs_K - tokens.logprobs_K).sqrt()\n", "mine")
    (tmp_path / "two.py").write_text((tmp_path / "own.py").read_text())
    assert "[not-finite]" in refusal(lambda: try_loss(f"{tmp_path / 'two.py'}:mine", HANG))


@pytest.mark.parametrize(
    ("where", "text", "said"),
    [
        ("{}/none.py:mine", "", "[no-such-file]"),
        ("{}/own.py:other", "def mine(signals): ...", "-> the functions of the file are: mine"),
        ("{}/own.py:mine", "mine = 3", "[invalid-function]: mine is a int"),
        ("{}/own.py:mine", "def mine(): ...", "[invalid-function]: mine cannot be called"),
        ("{}/own.py:mine", "import nothing_of_that_name", "[import-failed]: cannot be imported: ModuleNotFoundError"),
        ("{}/own.py:mine", "def mine(:", "[import-failed]: cannot be imported: SyntaxError"),
        ("{}/own.py:1", "", "[invalid-function]"),
    ],
)
def test_a_function_that_cannot_be_had(tmp_path: Path, where: str, text: str, said: str) -> None:
    (tmp_path / "own.py").write_text(text)
    told = refusal(lambda: load_user_function(where.format(tmp_path), "algorithm.advantage", ("signals",)))
    assert told.startswith("algorithm.advantage")
    assert said in told


# The recipe -------------------------------------------------------------------------------------------------------


def test_a_function_from_python_stands_in_the_recipe_with_its_place(online_file: Path, tmp_path: Path) -> None:
    shift = 0.5

    def shifted(signals: Signals) -> torch.Tensor:
        return signals.scores_S - shift

    recipe = recipe_with(online_file, {"algorithm": {"advantage": shifted}})
    assert recipe.algorithm.advantage == f"{__file__}:shifted"
    # The very function that was given, not another of its name.
    assert user_estimator(recipe.algorithm.advantage, HANG)(SIGNALS, gamma=1.0, lam=1.0).advantages_K[0] == 0.5
    (tmp_path / "stored.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(str(tmp_path / "stored.yaml")) == recipe


def test_what_cannot_stand_in_a_recipe_is_refused(online_file: Path) -> None:
    assert "[invalid-function]" in refusal(lambda: recipe_with(online_file, {"algorithm.loss": lambda tokens: None}))
    assert "[invalid-function]" in refusal(lambda: recipe_with(online_file, {"algorithm.loss": torch.relu}))


def test_an_unknown_name_is_answered_with_the_nearest(online_file: Path) -> None:
    told = refusal(lambda: load_recipe(str(online_file), ["algorithm.advantage=grop"]))
    assert "did you mean grpo?" in told
    assert "path/to/file.py:name" in told


# The reader -------------------------------------------------------------------------------------------------------


def test_rows_of_a_reader_are_rows_like_any_other(tmp_path: Path) -> None:
    where = place(
        tmp_path, "def mine(path):\n    for i in range(3):\n        yield {'text': f'{path} {i}', 'n': (i, None)}\n"
    )
    rows = read_rows("db://numbers", reader=UserReader(where))
    assert list(rows) == [{"text": f"db://numbers {i}", "n": [i, None]} for i in range(3)]
    assert rows.columns == ("text", "n")
    assert str(rows.origin(2)) == "db://numbers row 2"
    same = tmp_path / "same.py"
    same.write_text("def mine(path):\n    return [{'text': f'{path} {i}', 'n': [i, None]} for i in range(3)]\n")
    assert read_rows("db://numbers", reader=UserReader(f"{same}:mine")).fingerprint == rows.fingerprint
    assert read_rows("db://others", reader=UserReader(where)).fingerprint != rows.fingerprint


@pytest.mark.daily
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return None", "[invalid-return]: returned a NoneType for rows.db"),
        ("return 'text'", "[invalid-return]: returned a str for rows.db"),
        ("return []", "[no-rows]"),
        ("yield from [{'a': 1}, 'b']", "rows.db row 1 [invalid-row]: is a str"),
        ("yield {}", "rows.db row 0 [invalid-row]"),
        ("yield {'a': object()}", "rows.db row 0 [invalid-row]: cannot be kept: Object"),
        ("yield {'a': float('nan')}", "rows.db row 0 [invalid-row]: cannot be kept: Out of range"),
        (
            "yield from [{'text': 'a'}, {'text': 'a'}, {'prompt': 'b'}]",
            "row 2 [mixed-rows]: has the extra column 'prompt'",
        ),
        ("yield {'a': 1}; raise OSError('gone')", "raised OSError: gone (own.py line 2)"),
    ],
)
def test_a_reader_that_gives_no_rows_is_refused_by_key_file_and_name(tmp_path: Path, body: str, said: str) -> None:
    where = place(tmp_path, f"def mine(path):\n    {body}\n")
    told = refusal(lambda: read_rows("rows.db", reader=UserReader(where)))
    assert f"data.reader {where}" in told
    assert said in told


def test_the_rows_of_a_json_file_and_of_a_reader_of_it_train_alike(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"text": f"row {i}"}) + "\n" for i in range(4)))
    where = place(tmp_path, "import json\ndef mine(path):\n    return map(json.loads, open(path))\n")
    assert list(read_rows(str(file), reader=UserReader(where))) == list(read_rows(str(file)))
