"""A served reward model: its scores equal those of a local model, in both request formats."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hang import HANG
from lockstep.compat.openrlhf.openrlhf_inference import rewards_served
from lockstep.errors import Refusal
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.model import ModelPart
from lockstep.reward.remote import KEY_VARIABLE
from lockstep.reward.scorer import Scorer
from lockstep.serve.http_api import ListenAddress, ServeLimits
from lockstep.types import Failure, Origin, Question
from refusals import refuses
from reward_models import write_reward_model
from served import endpoint, opened_app

ANSWERS = ["18", "I do not know.", "", "x" * 40, "é"]


@pytest.fixture(scope="module")
def folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tiny_folder, tmp_path_factory.mktemp("rm") / "model", mean=0.25, std=2.0)


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    app = opened_app(folder)
    with endpoint(app) as found:
        yield found
    app.close()


def question(words: str = "9+9?") -> Question:
    return Question("sums", [{"role": "user", "content": words}], "18", Origin("rows", 1))


def scores(reward: Reward) -> list[float | Failure]:
    """The scores of a run's scorer, after its dry run on a row."""
    with Scorer.open(reward, ["sums"], torch.device("cpu")) as scorer:
        scorer.dry_run([question()])
        futures = [scorer.submit(question(), answer) for answer in ANSWERS]
        scorer.flush()
        outcomes = [future.result(HANG) for future in futures]
    return [outcome if isinstance(outcome, Failure) else outcome.total for outcome in outcomes]


def post_json(address: str, body: object, path: str = "/v1/rewards") -> dict:
    request = urllib.request.Request(address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=HANG) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        return {"status": error.code, **json.load(error)}


def by_hand(folder: Path, texts: list[str]) -> list[float]:
    """Each text alone through transformers."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        ids = [tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"] for text in texts]
        return [model(one).logits[0, 0].item() for one in ids]


def test_a_run_is_scored_as_by_a_model_beside_it(folder: Path, address: str) -> None:
    part = ModelPart(str(folder), torch.device("cpu"))
    futures = [part.submit(question(), answer) for answer in ANSWERS]
    part.flush()
    local = [future.result()["model"] for future in futures]
    remote = scores(Reward(remote=f"{address}/v1/rewards", remote_batch=2))
    assert remote == pytest.approx(local, abs=1e-5)
    assert len({round(score, 3) for score in local}) == len(ANSWERS)


def test_openrlhfs_form(folder: Path, address: str) -> None:
    texts = ["9+9?18", "9+9?no"]
    body = {"query": texts, "prompts": ["9+9?"] * 2, "labels": ["18"] * 2}
    expected = by_hand(folder, texts)
    for path in ("/get_reward", "/v1/rewards"):
        assert post_json(address, body, path)["rewards"] == pytest.approx(expected, abs=1e-5)
    reward = Reward(remote=f"{address}/get_reward", remote_form="openrlhf")
    by_run = scores(reward)
    assert by_run == pytest.approx(by_hand(folder, [f"9+9?\n{answer}" for answer in ANSWERS]), abs=1e-5)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, 'the body has neither "items" nor "query"'),
        ({"items": []}, "items: is empty"),
        ({"items": [{"prompt": "x", "response": "y"}]}, "items[0].prompt: is not a list of messages"),
        ({"items": [{"prompt": []}]}, "items[0].response: is not text"),
        ({"items": [{"prompt": [{"role": "user"}], "response": "y"}]}, "items[0].prompt[0].content: is not text"),
        ({"query": "x"}, "query: is not a list of texts"),
        ({"query": ["x"], "model": 5}, "model: 5 is not text"),
        ({"query": ["x", ""]}, "response 1 has no tokens"),
        ({"query": ["x" * 3000]}, "response 0 has 3000 tokens, over the model's context of 2048"),
    ],
)
def test_what_cannot_be_scored_is_told(address: str, body: dict, message: str) -> None:
    answer = post_json(address, body)
    assert (answer["status"], answer["error"]["message"]) == (400, message)


def test_serve_rm_scores_as_there(folder: Path) -> None:
    """0.7 puts one end token behind each query and cuts at --max_len; 0.11 does not. Scores are as the model gives
    them, or by the mean and deviation of config.json."""
    end, texts = AutoTokenizer.from_pretrained(folder).eos_token, ["ab", "abcdef"]
    flat = ["--reward_pretrain", str(folder), "--max_len", "5", "--port", "0"]
    dotted = ["--reward.model_name_or_path", str(folder), "--data.max_len", "5", "--ds.param_dtype", "bf16"]
    sent = [f"{end}{text}{end}{end}" for text in texts]
    for words, queries, expected in (
        (flat, sent, by_hand(folder, ["ab" + end, "abcde"])),
        ([*flat, "--normalize_reward"], sent, [(s - 0.25) / 2.0 for s in by_hand(folder, ["ab" + end, "abcde"])]),
        (dotted, texts, None),
    ):
        serving, address, limits = rewards_served(words)
        assert (address.host, limits.queue) == ("127.0.0.1", 4096)
        assert serving.dtype == ("bf16" if words is dotted else "auto")
        app = opened_app(folder, limits, max_length=serving.max_length, serve_rm=serving.serve_rm)
        try:
            with endpoint(app) as found:
                rewards = post_json(found, {"query": queries, "prompts": [""] * 2}, "/get_reward")["rewards"]
        finally:
            app.close()
        wanted = expected or by_hand(folder, ["ab", "abcde"])
        assert rewards == pytest.approx(wanted, abs=1e-5)


def test_a_key_on_both_sides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    app = opened_app(folder, ServeLimits(queue=3))
    try:
        with endpoint(app, api_key="s3cret") as address:
            reward = Reward(remote=f"{address}/v1/rewards", remote_retries=0)
            with pytest.raises(Refusal, match="the key is missing or wrong"):
                scores(reward)
            monkeypatch.setenv(KEY_VARIABLE, "s3cret")
            assert all(isinstance(score, float) for score in scores(reward))
    finally:
        app.close()


def test_a_host_that_others_reach_asks_for_a_key() -> None:
    with refuses("--host", "open-server", "0.0.0.0"):
        ListenAddress("0.0.0.0")
    assert not ListenAddress("0.0.0.0", api_key="x").loopback
    assert ListenAddress("::1").loopback
    with refuses("--host 0.0.0.0", "open-server"):
        rewards_served(["--reward_pretrain", "m", "--host", "0.0.0.0"])
    with refuses("--reward_pretrain", "not-set"):
        rewards_served([])
