"""Every model that a run trains is looked at for what its routers would add, not the policy alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from small_models import SIZES, write_model
from transformers import MixtralConfig

from conftest import run
from lockstep.preflight.model_checks import trained_folders
from lockstep.recipe import load_recipe

EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("extra", "why"),
    [
        ({"router_jitter_noise": 0.1}, "router noise"),
        ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, "load-balancing loss"),
    ],
    ids=["noise", "loss"],
)
def test_a_critics_router_is_refused_like_the_policys(
    extra: dict[str, Any],
    why: str,
    online_file: Path,
    tiny_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    critic = write_model(tmp_path / "critic", MixtralConfig(**SIZES, **EXPERTS, **extra), tiny_folder)
    capsys.readouterr()
    assert run("train", online_file, "method=ppo", f"critic.path={critic}") == 2
    printed = capsys.readouterr()
    said = " ".join((printed.out + printed.err).split())
    assert "1 problem:" in said
    assert f"critic.path {critic}" in said
    assert why in said


def test_only_what_is_trained_is_looked_at(online_file: Path, tmp_path: Path) -> None:
    def folders(*changes: str) -> dict[str, str]:
        return trained_folders(load_recipe(str(online_file), list(changes)))

    policy = folders()["model.path"]
    assert folders("algorithm.kl.reference=other", "algorithm.kl.where=loss") == {"model.path": policy}
    assert folders("method=ppo") == {"model.path": policy}
    assert folders("method=ppo", "critic.path=other") == {"model.path": policy, "critic.path": "other"}
