"""`lockstep plan --fit`: devices, settings that fit, and their arguments, which load and fit again."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from small_models import write_model
from transformers import Qwen3MoeConfig

from conftest import run, write_online_recipe, write_sft_recipe
from lockstep.commands.fit import show_fit
from lockstep.commands.plan import open_outlook
from lockstep.device.chips import CHIPS
from lockstep.model.tiny import write_tiny
from lockstep.preflight.cluster import TargetCluster
from lockstep.preflight.cluster_plan import Outlook
from lockstep.preflight.fit_levers import LEVERS
from lockstep.preflight.fit_plan import FitSearch, FittingSetting, device_to_fit
from lockstep.preflight.model_sizes import count_parameters
from lockstep.recipe import Recipe, load_recipe
from lockstep.run.console import Console
from preference_rows import write_recipe
from refusals import refuses


@pytest.mark.parametrize(
    ("text", "chip", "memory"),
    [
        ("h200", "h200", CHIPS["h200"].memory),
        ("H100", "h100", 80 * 2**30),
        ("24 GB", "h200", 24 * 10**9),
        ("24", "h200", 24 * 10**9),
        ("23.5GiB", "h200", int(23.5 * 2**30)),
        ("h200:80", "h200", 80 * 10**9),
        ("h100:40 gib", "h100", 40 * 2**30),
    ],
)
def test_devices_to_fit(text: str, chip: str, memory: int) -> None:
    found = device_to_fit(text)
    assert found.memory == memory
    assert found.devices == 1
    assert found.chip.bandwidth == CHIPS[chip].bandwidth


@pytest.mark.parametrize("text", ["", "0 GB", "24 TB", "h200:", "h200:x", "2x8:h200", "-4 GB"])
def test_other_words_are_refused(text: str) -> None:
    with refuses("--fit", "invalid-syntax", remedy="atlas-800t-a2"):
        device_to_fit(text)


def test_unknown_and_too_small_devices_are_refused() -> None:
    with refuses("--fit", "unknown-device", "h201", remedy="did you mean h20?"):
        device_to_fit("h201:24")
    with refuses("--fit", "out-of-range", "h100", "85.9"):
        device_to_fit("h100:90")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights take more memory than its logits."""
    found = tmp_path_factory.mktemp("fit") / "model"
    write_tiny(found, hidden=256, layers=4)
    return found


def opened(file: Path, words: list[str]) -> tuple[Outlook, TargetCluster]:
    """The recipe on a device that has a third of the memory that the unchanged recipe needs."""
    recipe = load_recipe(str(file), words)
    target = device_to_fit("h200")
    _, outlook = open_outlook(recipe, target, None, Console.silent())
    limit = max(phase.total for phase in outlook.phases(target)) // 3
    return outlook, replace(target, chip=replace(target.chip, memory=limit))


def planned(outlook: Outlook, target: TargetCluster, recipe: Recipe) -> tuple[int, float]:
    """Peak and seconds of a recipe that was loaded anew."""
    counted = count_parameters(recipe, outlook.models.config)
    again = replace(outlook, recipe=recipe, models=replace(outlook.models, counted=counted))
    return max(phase.total for phase in again.phases(target)), sum(time.open for time in again.times(target) or [])


def checked_settings(file: Path, words: list[str]) -> list[FittingSetting]:
    """The settings that fit; each one loads from its arguments and has the same prediction."""
    outlook, target = opened(file, words)
    found = FitSearch(outlook, target, lambda more: load_recipe(str(file), [*words, *more])).settings()
    assert found
    assert [one.seconds for one in found] == sorted(one.seconds or 0.0 for one in found)
    for setting in found:
        peak, seconds = planned(outlook, target, load_recipe(str(file), [*words, *setting.words]))
        assert peak == setting.peak.total <= target.memory
        assert seconds == pytest.approx(setting.seconds)
    return found


BF16 = ["model.dtype=bf16"]


def test_sft_settings_fit_and_load(folder: Path, tmp_path: Path) -> None:
    file = write_sft_recipe(tmp_path, folder)
    found = checked_settings(file, BF16)
    words = {word for setting in found for word in setting.words}
    assert "model.lora.rank=16" in words
    assert "model.quantize=nf4" in words
    # Keys that the recipe has already are not repeated.
    assert not words & {"parallel.offload=none", "model.gradient_checkpointing=false", "model.dtype=bf16"}


@pytest.mark.slow
def test_grpo_settings_fit_and_load(folder: Path, tmp_path: Path) -> None:
    """The KV cache of all responses is larger than the rest, so its share of the memory is a setting."""
    file = write_online_recipe(tmp_path, folder)
    more = ["model.lora.rank=4", "model.quantize=nf4", "rollout.max_tokens=300", "rollout.n=64"]
    found = checked_settings(file, [*BF16, *more])
    words = {word.partition("=")[0] for setting in found for word in setting.words}
    assert "rollout.cache_gb" in words


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dpo", "kto", "rm", "orpo", "prm"])
def test_offline_methods_have_settings(method: str, folder: Path, tmp_path: Path) -> None:
    checked_settings(write_recipe(tmp_path, folder, method), BF16)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["method=ppo", "rollout.n=1"], ["method=rloo"], ["method=grpo", "model.lora.rank=4"]]
)
def test_online_methods_have_settings(words: list[str], folder: Path, tmp_path: Path) -> None:
    checked_settings(write_online_recipe(tmp_path, folder), [*BF16, *words])


def test_quantised_experts_get_no_adapter(tmp_path: Path, tiny_folder: Path) -> None:
    """`plan` refuses what `train` refuses, and --fit adapts the attention of a model whose experts it quantises."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "head_dim": 16}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512}
    model = write_model(tmp_path / "moe", Qwen3MoeConfig(**sizes, **heads), tiny_folder)
    file = write_sft_recipe(tmp_path, model)
    quantised = [*BF16, "model.lora.rank=4", "model.quantize=nf4"]
    outlook, _ = opened(file, BF16)
    with refuses("model.lora.targets", "unfit-adapter", "experts", remedy="[k_proj,o_proj,q_proj,v_proj]"):
        count_parameters(load_recipe(str(file), quantised), outlook.models.config)
    excluded = [*quantised, "model.quantize_exclude=[experts]"]
    assert count_parameters(load_recipe(str(file), excluded), outlook.models.config).trained
    found = [one.words for one in checked_settings(file, BF16) if "model.quantize=nf4" in one.words]
    assert found
    assert all("model.lora.targets=[q_proj, k_proj, v_proj, o_proj]" in words for words in found)


@pytest.mark.slow
def test_padded_rows_get_smaller_micro_batches(folder: Path, tmp_path: Path) -> None:
    words = [*BF16, "batch.tokens=null", "batch.micro_batch_size=8", "model.lora.rank=4"]
    found = checked_settings(write_sft_recipe(tmp_path, folder), words)
    assert any(word.startswith("batch.micro_batch_size=") for setting in found for word in setting.words)


@pytest.mark.slow
def test_the_first_setting_is_the_fastest_of_all(folder: Path, tmp_path: Path) -> None:
    """Every combination of its keys, one by one, without the search."""
    words = [*BF16, "model.lora.rank=16", "batch.tokens=2048", "model.quantize=nf4"]
    file = write_sft_recipe(tmp_path, folder)
    outlook, target = opened(file, words)
    search = FitSearch(outlook, target, lambda more: load_recipe(str(file), [*words, *more]))
    best = search.settings()[0]
    fits = []
    for checkpointing, host, tokens in product((False, True), (False, True), (2048, 1024, 512, 256, 128)):
        keys = [
            f"model.gradient_checkpointing={str(checkpointing).lower()}",
            f"model.activation_offload={str(host).lower()}",
            f"batch.tokens={tokens}",
        ]
        peak, seconds = planned(outlook, target, load_recipe(str(file), [*words, *keys]))
        if peak <= target.memory and not (host and not checkpointing):
            fits.append(seconds)
    assert fits
    assert best.seconds == pytest.approx(min(fits), rel=0.01)


@pytest.mark.slow
def test_the_table_fits_and_the_arguments_are_whole(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write_sft_recipe(tmp_path, folder)
    assert run("plan", file, *BF16, "--fit", "h200:0.03") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(len(line) for line in lines if set(line) & set("│┃━")) <= 80
    listed = [line.partition(": ")[2] for line in lines if line[:1].isdigit() and "=" in line]
    assert listed
    for words in listed:
        assert load_recipe(str(file), [*BF16, *words.split()])


def test_nothing_fits(folder: Path, tmp_path: Path) -> None:
    file = write_sft_recipe(tmp_path, folder)
    recipe = load_recipe(str(file), BF16)
    with refuses("--fit", "not-enough-memory", "GB more", "model.quantize=nf4", "model.gradient_checkpointing=true"):
        show_fit(recipe, "0.001 GB", None, lambda words: load_recipe(str(file), [*BF16, *words]))


def test_several_devices_are_refused(folder: Path, tmp_path: Path) -> None:
    file = write_sft_recipe(tmp_path, folder)
    for word in ("parallel.devices=2", "parallel.tensor_parallel=2"):
        with refuses(word.partition("=")[0], "wrong-process-count"):
            show_fit(load_recipe(str(file), [word]), "h200", None, lambda words: load_recipe(str(file), list(words)))
    assert run("plan", file, "--fit", "h200", "--cluster", "1x1:h200") != 0
    assert run("plan", file, "--fit", "h200", "--devices", "2") != 0


def test_levers_have_names() -> None:
    assert len({lever.name for lever in LEVERS}) == len(LEVERS)
