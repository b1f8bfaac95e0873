"""Answers that no engine would give: proxies between a run and a real server that change them, one fault each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import load, prompts, run

import faulty_proxy
from conftest import write_online_recipe
from faulty_proxy import TEMPERATURE, Fault, proxying
from lockstep.algorithms.correction import logprob_difference
from lockstep.algorithms.reduce import SINGLE_PROCESS
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.parallel.world import World
from lockstep.preflight.batch_plan import logprob_limit
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import RunPlace
from lockstep.rollout.servers import weight_check as probe
from lockstep.rollout.servers.adapter import Answer, ServerFailed, WantedSample, checked_answer
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.sglang import Sglang
from lockstep.run.metrics import read_metrics
from lockstep.train.start import train
from lockstep.types import Request, Sampling
from recipe_files import keys, refused
from sglang_server import Server, serving

FLAGS = ("--enable-deterministic-inference", "--dtype", "float32")
STOPS = (257, 9, 11)
SAMPLED = Sampling(max_tokens=6, temperature=TEMPERATURE, stop_ids=STOPS, stop_strings=(".",), seed=5)


@pytest.fixture(autouse=True, scope="module")
def short_probes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "PROMPTS", 2)
        patch.setattr(probe, "NEW_TOKENS", 5)
        yield


@pytest.fixture(scope="module")
def server(tiny_folder: Path) -> Iterator[Server]:
    with serving(tiny_folder, *FLAGS) as server:
        yield server


# -- every answer


@pytest.mark.daily(
    "answer_of_another_prompt-",
    "infinite_logprob-",
    "one_logprob_too_few-",
    "outside_the_vocabulary-",
    "positive_logprob-",
    "goes_on_after_its_end-",
)
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        (faulty_proxy.three_times_too_long, "18 tokens; the request allows 1 to 6"),
        (faulty_proxy.answer_of_another_prompt, "the answer belongs to another prompt"),
        (faulty_proxy.outside_the_vocabulary, "token 0 of an answer is 100000: .* 259"),
        (faulty_proxy.negative_token, "token 0 of an answer is -1"),
        (faulty_proxy.fractional_token, r"token 0 of an answer is 1\.5"),
        (faulty_proxy.one_logprob_too_few, "log-probs"),
        (faulty_proxy.positive_logprob, r"log-prob of token 0 .* 2\.0"),
        (faulty_proxy.infinite_logprob, "not a finite number"),
        (faulty_proxy.goes_on_after_its_end, "end token 9 at position 0"),
        (faulty_proxy.no_token, "an answer of 0 tokens"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_an_answer_that_cannot_be_a_response_is_refused(
    tiny_folder: Path, server: Server, fault: Fault, why: str
) -> None:
    asked = [Request(ids, 100 + key, 2) for key, ids in enumerate(prompts(3, longest=12))]
    sampling = replace(SAMPLED, stop_ids=(9, 11, 257))
    policy, place = load(tiny_folder), RunPlace(World(), str(tiny_folder), tiny_folder)
    with ExitStack() as stack:
        proxy = stack.enter_context(proxying(server.url, fault))
        settings = RolloutSettings(engine="sglang", url=proxy.url)
        engine = ServerEngine(Sglang(), policy, Cpu(), settings, load_tokenizer(str(tiny_folder)), place)
        stack.callback(engine.close)
        engine.sync(policy.stored.named_parameters())
        with pytest.raises(Refusal, match=why) as caught:
            run(engine, asked, sampling)
        assert proxy.url in str(caught.value)


WANTED = WantedSample([1, 2], Sampling(max_tokens=3, stop_ids=(7,), stop_strings=("so",)), 3, 1)


@pytest.mark.parametrize(
    ("answer", "ended"),
    [
        (Answer([4, 5, 6], [-1.0, 0.0, -2.0], "length"), "length"),
        (Answer([4, 7], [-1.0, 1e-3], "token"), "token"),
        (Answer([4, 5], [-1.0, -1.0], "string"), "string"),
        # Several things end it at once, and the server names another one.
        (Answer([4, 5, 7], [-1.0] * 3, "length"), "token"),
        (Answer([], [], "aborted"), "aborted"),
    ],
)
def test_an_answer_that_can_be_a_response_is_taken(answer: Answer, ended: str) -> None:
    assert checked_answer(answer, WANTED, 8) == replace(answer, ended=ended)  # type: ignore[arg-type]


def test_an_end_that_was_not_asked_for_is_refused() -> None:
    with pytest.raises(ServerFailed, match="not an end token"):
        checked_answer(Answer([4], [-1.0], "token"), WANTED, 8)
    plain = replace(WANTED, sampling=Sampling(max_tokens=3))
    with pytest.raises(ServerFailed, match="a stop string"):
        checked_answer(Answer([4], [-1.0], "string"), plain, 8)


# -- the log-probs of every step


def test_the_difference_of_log_probs_by_hand() -> None:
    """d = 0.5, 0, -1: mean |d| is 0.5; e^d - d - 1 is 0.148721, 0 and 0.367879."""
    trainer, engine = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([-1.5, -2.0, -3.0])
    mean, k3 = logprob_difference(trainer, engine, SINGLE_PROCESS)
    assert mean == pytest.approx(0.5)
    assert k3 == pytest.approx((0.1487212707 + 0.3678794412) / 3)
    for bad in (float("nan"),):
        assert not logprob_difference(trainer, torch.tensor([bad, -2.0, -3.0]), SINGLE_PROCESS)[0] <= 100


@pytest.mark.parametrize(
    ("words", "limit"),
    [
        ([], None),
        (["rollout.max_logprob_diff=0.3"], 0.3),
        (["rollout.engine=vllm"], 0.005),
        (["rollout.engine=vllm", "model.dtype=bf16"], 0.1),
        (["rollout.engine=vllm", "model.dtype=bf16", "rollout.temperature=0.5"], 0.2),
        (["rollout.engine=vllm", "model.dtype=bf16", "rollout.temperature=1.5"], 0.1),
        (["rollout.engine=vllm", "rollout.max_logprob_diff=null"], None),
    ],
)
def test_serving_engines_are_checked_unless_the_recipe_says_otherwise(
    tmp_path: Path, tiny_folder: Path, words: list[str], limit: float | None
) -> None:
    recipe = load_recipe(str(write_online_recipe(tmp_path, tiny_folder)), words)
    assert logprob_limit(recipe) == limit


def test_the_check_is_not_for_responses_of_older_weights(tmp_path: Path, tiny_folder: Path) -> None:
    path = write_online_recipe(tmp_path, tiny_folder)
    words = ["rollout.max_staleness=1", "rollout.max_logprob_diff=0.2"]
    assert "rollout.max_logprob_diff" in keys(refused(path, *words))
    assert "rollout.max_logprob_diff" in keys(refused(path, "rollout.max_logprob_diff=0"))


def trained(folder: Path, model: Path, url: str, *words: str) -> dict[int, dict[str, Any]]:
    said = ["rollout.engine=sglang", f"rollout.url={url}", f"rollout.temperature={TEMPERATURE}", "run.export=false"]
    train(load_recipe(str(write_online_recipe(folder, model)), [*said, *words]))
    return dict(read_metrics(folder / "runs" / "run" / "metrics.jsonl"))


@pytest.mark.daily("rotated_logprobs-")
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (faulty_proxy.rotated_logprobs, ()),
        (faulty_proxy.shifted_logprobs, ("algorithm.rollout_correction.weight=none",)),
        (faulty_proxy.scaled_logprobs, ("algorithm.rollout_correction.bypass=true",)),
        (faulty_proxy.other_tokens, ()),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_log_probs_of_other_samples_end_a_run_at_its_first_step(
    tmp_path: Path, tiny_folder: Path, server: Server, fault: Fault, words: tuple[str, ...]
) -> None:
    with proxying(server.url, fault) as proxy, pytest.raises(Refusal) as caught:
        trained(tmp_path, tiny_folder, proxy.url, "run.steps=2", *words)
    told = str(caught.value)
    assert told.startswith("rollout.max_logprob_diff [logprobs-differ]: ")
    assert "engine sglang" in told
    assert "(limit 0.00556), k3" in told
    assert "tokens of 12 responses" in told
    assert proxy.changed == 12
    assert not (tmp_path / "runs" / "run" / "metrics.jsonl").exists()


def test_a_run_with_a_true_server_passes_the_check(tmp_path: Path, tiny_folder: Path, server: Server) -> None:
    metrics = trained(tmp_path, tiny_folder, server.url, "run.steps=2", "algorithm.rollout_correction.weight=none")
    assert [metrics[step]["training/rollout_logprob_diff_mean"] < 1e-4 for step in (1, 2)] == [True, True]


@pytest.mark.slow
def test_the_check_can_be_switched_off(tmp_path: Path, tiny_folder: Path, server: Server) -> None:
    with proxying(server.url, faulty_proxy.rotated_logprobs) as proxy:
        off = ("run.steps=1", "rollout.max_logprob_diff=null")
        assert "training/rollout_logprob_diff_mean" not in trained(tmp_path, tiny_folder, proxy.url, *off)[1]
