"""Every class of transformers that generates text is right here or refused, and docs/models.md says which."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers
from sweep_cases import Case, all_cases
from sweep_families import NAMES, RELEASED
from sweep_judge import judge
from sweep_table import STORED, families, page, stored

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
OUTCOMES = stored()
OF_THIS_VERSION = json.loads(STORED.read_text(encoding="utf-8"))["transformers"] == transformers.__version__
of_this_version = pytest.mark.skipif(not OF_THIS_VERSION, reason="the page was made with another transformers")
# One of each kind; the others run under `make test-slow`.
SAMPLE = (
    "llama",
    "phi3+longrope",
    "gpt_oss",
    "granite+scaled_logits",
    "deepseek_v3",
    "doge",
    "falcon",
    "bert",
    "qwen2_5_vl",
    "mistral4",
    "modernbert-decoder",
)
CASES = {str(case): case for case in all_cases()}


def held(case: Case, folder: Path) -> None:
    outcome = judge(case, folder)
    assert outcome.status != "WRONG", f"{case}: {outcome.why}"
    if outcome.status != "supported":
        # A reason is a sentence, not what some library stumbled over.
        assert len(outcome.why.split()) >= 3, f"{case}: {outcome.why}"
    if OF_THIS_VERSION:
        assert OUTCOMES[str(case)].status == outcome.status, f"run tools/models_table.py --only {case}"


@pytest.mark.daily("llama", "phi3+longrope", "gpt_oss", "granite+scaled_logits", "falcon", "bert", "qwen2_5_vl")
@pytest.mark.parametrize("name", SAMPLE)
def test_some_models(name: str, tmp_path: Path) -> None:
    held(CASES[name], tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SAMPLE])
def test_all_models(name: str, tmp_path: Path) -> None:
    held(CASES[name], tmp_path / "model")


@of_this_version
def test_the_page_is_printed_from_the_stored_outcomes() -> None:
    assert set(OUTCOMES) == set(CASES)
    assert PAGE.read_text(encoding="utf-8") == page(OUTCOMES)


@of_this_version
def test_every_model_type_has_a_year_and_every_name_a_case() -> None:
    assert set(RELEASED) == {case.model_type for case in CASES.values()}
    assert set(NAMES) <= set(CASES)


@of_this_version
def test_most_new_families_train_and_generate() -> None:
    """The goals of the project: 90 % of the families since 2024 train, and 85 % generate with the built-in engine."""
    new = families(OUTCOMES)
    generated = sum(one.status == "supported" for one in new)
    trained = generated + sum(one.status == "training" for one in new)
    assert trained >= 0.9 * len(new)
    assert generated >= 0.85 * len(new)
