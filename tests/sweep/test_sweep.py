"""Every class of transformers that generates text is right here or refused, and docs/models.md says which."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers
from sweep_cases import Case, all_cases
from sweep_judge import judge
from sweep_table import statuses

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
TEXT = PAGE.read_text(encoding="utf-8")
STATUSES = statuses(TEXT)
OF_THIS_VERSION = f"class of transformers {transformers.__version__}," in " ".join(TEXT.split())
# One of each kind; the others run under `make test-slow`.
SAMPLE = (
    "llama",
    "llama+yarn",
    "llama+dynamic",
    "phi3+longrope",
    "qwen2+window",
    "qwen2_moe+window",
    "phimoe+window",
    "gemma2",
    "gpt_oss",
    "granite+scaled_logits",
    "cohere2",
    "deepseek_v3",
    "deepseek_v32",
    "diffllama",
    "gemma4_text+shared_kv",
    "mimo_v2_flash",
    "doge",
    "minimax_m3_vl_text+layers",
    "lfm2+layers",
    "llama4_text",
    "falcon",
    "whisper",
    "bert",
    "llava",
    "qwen2_5_vl",
)
CASES = {str(case): case for case in all_cases()}


def held(case: Case, folder: Path) -> None:
    outcome = judge(case, folder)
    assert outcome.status != "WRONG", f"{case}: {outcome.why}"
    if outcome.status != "supported":
        # A reason is a sentence, not what some library stumbled over.
        assert len(outcome.why.split()) >= 3, f"{case}: {outcome.why}"
    if OF_THIS_VERSION:
        assert STATUSES[str(case)] == outcome.status, "run `make models`"


@pytest.mark.parametrize("name", SAMPLE)
def test_some_models(name: str, tmp_path: Path) -> None:
    held(CASES[name], tmp_path / "model")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SAMPLE])
def test_all_models(name: str, tmp_path: Path) -> None:
    held(CASES[name], tmp_path / "model")


def test_the_page_names_every_case() -> None:
    if not OF_THIS_VERSION:
        pytest.skip("the page was made with another transformers")
    assert set(STATUSES) == set(CASES)
