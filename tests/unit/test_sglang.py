"""The adapter of SGLang, against a server with the schema of its source (`tests/support/sglang_server.py`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, native, prompts, run, write_model
from transformers import Qwen2Config

from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.device.serving import SERVING
from lockstep.errors import Refusal
from lockstep.kernels.sampling import Truncation
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy, Scoring
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Lora
from lockstep.rollout.engine import RunPlace
from lockstep.rollout.servers import weight_check as probe
from lockstep.rollout.servers.adapter import (
    Answer,
    PushedWeights,
    ServerFailed,
    ServerNeeds,
    ServerStart,
    WantedSample,
    prompt_digest,
)
from lockstep.rollout.servers.server_client import KEY_VARIABLE
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.sglang import Sglang
from lockstep.types import Completion, Example, Origin, Request, Sampling
from sglang_schema import FORMS
from sglang_server import Server, parser, serving

FLAGS = ("--enable-deterministic-inference", "--dtype", "float32")
# End tokens of the model, of the tokenizer, and of nobody but the recipe.
END, STOPS = 7, (7, 257, 9, 11)
GREEDY = Sampling(max_tokens=8, temperature=0.0, stop_ids=STOPS)
DRAWN = Sampling(max_tokens=8, temperature=0.7, stop_ids=STOPS, seed=5)
MIXED = Sampling(max_tokens=64, temperature=0.9, seed=5)


@pytest.fixture(autouse=True, scope="module")
def short_probes() -> Iterator[None]:
    """What the probe finds here it finds in a few tokens, and every push asks for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "PROMPTS", 2)
        patch.setattr(probe, "NEW_TOKENS", 5)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    # An end token of the model's own, as real ones have it.
    config = Qwen2Config(**SIZES, eos_token_id=END)
    return write_model(tmp_path_factory.mktemp("sglang") / "model", config, tiny_folder)


@pytest.fixture
def policy(folder: Path) -> Policy:
    return load(folder)


@pytest.fixture(scope="module")
def still(folder: Path) -> Policy:
    """A policy that no test moves."""
    return load(folder)


@pytest.fixture(scope="module")
def shared(folder: Path) -> Iterator[Server]:
    with serving(folder, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def engine(still: Policy, folder: Path, shared: Server) -> Iterator[ServerEngine]:
    with engine_at(still, folder, shared) as engine:
        yield engine


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(ids, 100 + key, 2) for key, ids in enumerate(prompts(3, longest=12))]


@contextmanager
def engine_at(
    policy: Policy, folder: Path, *servers: Server, server_adapter: Sglang | None = None, **settings: Any
) -> Iterator[ServerEngine]:
    """An engine over running servers, with the policy's weights."""
    told = RolloutSettings(engine="sglang", url=[server.url for server in servers], **settings)
    place = RunPlace(World(), str(folder), folder)
    engine = ServerEngine(server_adapter or Sglang(), policy, Cpu(), told, load_tokenizer(str(folder)), place)
    try:
        engine.sync(policy.stored.named_parameters())
        yield engine
    finally:
        engine.close()


def moved(policy: Policy, by: float = 0.05) -> None:
    """An update of every weight."""
    torch.manual_seed(11)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=by)


def scored(policy: Policy, request: Request, made: Completion, sampling: Sampling) -> torch.Tensor:
    """The trainer's log-probs of a completion."""
    truncation = Truncation(sampling.top_k, sampling.top_p, sampling.min_p)
    how = truncation if truncation.active and sampling.score_truncated else None
    row = Example([*request.ids, *made.ids], [0] * len(request.ids) + [1] * len(made.ids), Origin("x", 0))
    before, policy.scoring = policy.scoring, Scoring(temperature=sampling.temperature or 1.0, truncation=how)
    try:
        with torch.no_grad():
            return policy.eval()(micro_batch([row], packed=True, pad_id=0)).logprobs_K
    finally:
        policy.scoring = before


def assert_scored(policy: Policy, requests: list[Request], made: list[Completion], sampling: Sampling) -> None:
    assert len(made) == sum(request.n for request in requests)
    for each in made:
        trainers = scored(policy, requests[each.request], each, sampling)
        torch.testing.assert_close(torch.tensor(each.logprobs), trainers, rtol=0, atol=1e-4)


# Generation.


def test_greedy_tokens_and_log_probs_are_the_built_in_engines(
    engine: ServerEngine, still: Policy, folder: Path, requests: list[Request]
) -> None:
    theirs = run(engine, requests, GREEDY)
    ours = run(native(still, folder), requests, GREEDY)
    assert [(each.ids, each.stop) for each in theirs] == [(each.ids, each.stop) for each in ours]
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=2e-4)


@pytest.mark.slow
def test_samples_are_scored_alike_differ_from_each_other_and_come_again(
    engine: ServerEngine, still: Policy, requests: list[Request]
) -> None:
    made = run(engine, requests, DRAWN)
    assert_scored(still, requests, made, DRAWN)
    assert made[0].ids != made[1].ids
    # In another order, and so in other batches.
    again = run(engine, list(reversed(requests)), DRAWN)
    turned = {(len(requests) - 1 - each.request, each.sample): each.ids for each in again}
    assert {(each.request, each.sample): each.ids for each in made} == turned
    assert [each.ids for each in run(engine, requests, replace(DRAWN, seed=6))] != [each.ids for each in made]


@pytest.mark.parametrize("how", [{"top_k": 3, "score_truncated": True}, {"top_p": 0.6, "top_k": 4}], ids=str)
def test_log_probs_of_truncated_sampling_are_those_that_the_trainer_scores(
    engine: ServerEngine, still: Policy, requests: list[Request], how: dict[str, Any]
) -> None:
    sampling = replace(DRAWN, **how)
    assert_scored(still, requests, run(engine, requests, sampling), sampling)


@pytest.mark.parametrize(("truncated", "top_p"), [("mask", 1.0), ("ignore", 0.9)])
def test_a_truncated_probe_is_passed(still: Policy, folder: Path, shared: Server, truncated: str, top_p: float) -> None:
    with engine_at(still, folder, shared, truncated_sampling=truncated, top_k=3, top_p=top_p):
        asked = [body for path, body in shared.engine.asked if path == "/generate"]
    assert asked[-1]["sampling_params"]["top_k"] == 3
    assert asked[-1].get("return_sampling_mask", False) == (truncated == "mask")


@pytest.mark.slow
def test_stop_texts_end_a_response_where_the_built_in_engine_ends_it(
    engine: ServerEngine, still: Policy, folder: Path, requests: list[Request]
) -> None:
    free = run(native(still, folder), requests, GREEDY)
    text = load_tokenizer(str(folder)).decode(max((each.ids for each in free), key=len)[3:5])
    assert text.strip()
    sampling = replace(GREEDY, stop_strings=(text,))
    ours = run(native(still, folder), requests, sampling)
    assert "string" in {each.stop for each in ours}
    theirs = run(engine, requests, sampling)
    assert [(each.ids, each.stop) for each in theirs] == [(each.ids, each.stop) for each in ours]


WANTED = WantedSample([1, 2], Sampling(max_tokens=3, stop_ids=(END,), stop_strings=("so",)), 3, 1)


def answered(ids: list[int], reason: dict[str, Any], **told: Any) -> dict[str, Any]:
    meta = {"finish_reason": reason, "output_token_logprobs": [[-0.5, each, None] for each in ids]}
    asked = {"id": f"{prompt_digest(WANTED.ids)}-1", "prompt_tokens": len(WANTED.ids)}
    return {"output_ids": ids, "meta_info": {**meta, **asked, "weight_version": "a-1", **told}}


@pytest.mark.parametrize(
    ("ids", "reason", "ended"),
    [
        ([4, END], {"type": "stop", "matched": END}, "token"),
        # Several things at once: an end token wins, whatever the server names.
        ([4, 5, END], {"type": "length", "length": 3}, "token"),
        ([4, END], {"type": "stop", "matched": "so"}, "token"),
        ([4, 5], {"type": "stop", "matched": "so"}, "string"),
        ([4, 5, 6], {"type": "length", "length": 3}, "length"),
        ([4], {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, "aborted"),
        ([], {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}, "aborted"),
    ],
)
def test_why_a_response_ended(ids: list[int], reason: dict[str, Any], ended: str) -> None:
    assert Sglang().read(answered(ids, reason), WANTED) == Answer(ids, [-0.5] * len(ids), ended, "a-1")  # type: ignore[arg-type]


def test_a_request_that_is_aborted_in_the_queue_is_asked_again() -> None:
    """SGLang has not counted its prompt yet."""
    said = answered([], {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None})
    del said["meta_info"]["prompt_tokens"]
    assert Sglang().read(said, WANTED).ended == "aborted"


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (answered([4, 8], {"type": "stop", "matched": 8}), "rollout.stop_ids"),
        (answered([4, 5], {"type": "stop", "matched": "NaN happened"}), "NaN happened"),
        (answered([4, 5], {"type": "length", "length": 2}), "cut after 2 of 3"),
        (answered([4], {"type": "stop", "matched": END}, output_token_logprobs=[[-0.5, 5, None]]), "log-probs"),
        (
            answered([4], {"type": "stop", "matched": END}, output_token_logprobs=[[None, 4, None]]),
            "not a finite number",
        ),
        (answered([4], {"type": "stop", "matched": END}, output_token_logprobs=[]), "log-probs"),
        (answered([END], {"type": "stop", "matched": END}, id="fedcba9876543210-1"), "another prompt"),
        (answered([END], {"type": "stop", "matched": END}, prompt_tokens=3), "a prompt of 3 tokens"),
        ({"text": "hello", "meta_info": {}}, "malformed answer"),
        ([answered([END], {"type": "stop", "matched": END})], "malformed answer"),
    ],
)
def test_an_answer_that_was_not_asked_for_is_refused(said: Any, why: str) -> None:
    with pytest.raises(ServerFailed, match=why):
        Sglang().read(said, WANTED)


def test_a_response_of_two_versions_of_the_weights_is_told_as_one_of_neither() -> None:
    spans = [{"version": "a-1", "start": 0, "end": 1}, {"version": "a-2", "start": 1, "end": 2}]
    said = answered([4, END], {"type": "stop", "matched": END}, weight_versions=spans)
    assert Sglang().read(said, WANTED).version == "a-1 and a-2"


@pytest.mark.parametrize(
    ("sampling", "why"),
    [
        (Sampling(max_tokens=3, min_p=0.1), "min_p"),
        (Sampling(max_tokens=3, repetition_penalty=1.1), "repetition_penalty"),
        (Sampling(max_tokens=3, top_p=0.9, score_truncated=True), "top_p"),
        (Sampling(max_tokens=3, top_p=0.9, top_k=5, score_truncated=True), "top_p"),
    ],
)
def test_what_sglang_would_tell_other_log_probs_of_is_not_asked_for(
    engine: ServerEngine, sampling: Sampling, why: str
) -> None:
    with pytest.raises(Refusal, match=why):
        run(engine, [Request([1, 2], 1)], sampling)


# Starting and finding a server.


@pytest.mark.parametrize("device", SERVING)
@pytest.mark.parametrize(("sleep", "rank"), [(False, None), (True, None), (True, 8)])
def test_the_command_line_has_flags_that_sglang_has(device: str, sleep: bool, rank: int | None) -> None:
    needs, args = ServerNeeds(device, sleep, rank), ("--mem-fraction-static", "0.5")
    start = ServerStart("python3", "model", "bf16", "127.0.0.1", 30000, 2, needs, args)
    command = Sglang().command(start)
    assert command[:3] == ["python3", "-m", "sglang.launch_server"]
    flags = parser().parse_args(command[3:])
    assert flags.enable_deterministic_inference
    assert (flags.tp_size, flags.dtype, flags.device, flags.mem_fraction_static) == (2, "bfloat16", device, 0.5)
    assert flags.enable_memory_saver == sleep
    # Without the weights under it an adapter is worth nothing.
    assert flags.enable_weights_cpu_backup == (sleep and rank is not None)
    assert (flags.enable_lora, flags.max_lora_rank if rank else None) == (rank is not None, rank)
    assert Sglang().environment(start)["SGLANG_RETURN_ORIGINAL_LOGPROB"] == "0"


def test_a_server_whose_log_probs_are_from_before_the_temperature_is_refused(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    differ = pytest.raises(Refusal, match="log-probs of the weight check differ")
    with serving(folder, *FLAGS) as server, differ, engine_at(policy, folder, server):
        pass


def test_a_server_that_asks_for_a_key_is_brought_it(
    policy: Policy, folder: Path, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(folder, *FLAGS, "--api-key", "s3cret") as server:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(Refusal, match="answered 401") as caught, engine_at(policy, folder, server):
            pass
        assert KEY_VARIABLE in str(caught.value)
        monkeypatch.setenv(KEY_VARIABLE, "s3cret")
        with engine_at(policy, folder, server) as engine:
            assert len(run(engine, requests[:1], GREEDY)) == 2


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--dtype", "float32"), "seeds have no effect"),
        (("--enable-deterministic-inference", "--dtype", "bfloat16"), "computes in bfloat16"),
    ],
)
def test_a_server_that_was_started_otherwise_is_refused_with_the_command_that_starts_it(
    policy: Policy, folder: Path, flags: tuple[str, ...], why: str
) -> None:
    refused = pytest.raises(Refusal, match=why)
    with serving(folder, *flags) as server, refused as refusal, engine_at(policy, folder, server):
        pass
    assert server.url in str(refusal.value)


def test_an_engine_that_no_device_here_can_have_is_refused_with_what_to_take_instead(
    policy: Policy, folder: Path
) -> None:
    settings = RolloutSettings(engine="sglang")
    place = RunPlace(World(), str(folder), folder)
    with pytest.raises(Refusal, match="has no package sglang") as refusal:
        ServerEngine(Sglang(), policy, Cpu(), settings, load_tokenizer(str(folder)), place)
    assert "no package for CPUs" in str(refusal.value)


# Weights.


def test_an_update_reaches_the_server_and_is_proven(policy: Policy, folder: Path, requests: list[Request]) -> None:
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server) as engine:
        before = run(engine, requests, GREEDY)
        for _ in range(2):
            moved(policy)
            engine.sync(policy.stored.named_parameters())
            made = run(engine, requests, GREEDY)
            ours = run(native(policy, folder), requests, GREEDY)
            assert [each.ids for each in made] == [each.ids for each in ours]
        assert [each.ids for each in before] != [each.ids for each in made]
        pushes = [body for path, body in server.engine.asked if path == "/update_weights_from_disk"]
        # The first time twice, which tells what is noise.
        assert len(pushes) == 4
        assert server.engine.version == engine.fleet.version
        asked = len(server.engine.asked)
        engine.sync(policy.stored.named_parameters())
        assert len(server.engine.asked) == asked, "weights that have not changed are not pushed again"


def test_weights_by_a_collective_go_in_buckets_and_are_proven(
    policy: Policy, folder: Path, requests: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sglang, "bucket_bytes", 20_000)
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server, weight_sync="collective") as engine:
        moved(policy)
        engine.sync(policy.stored.named_parameters())
        made = run(engine, requests, GREEDY)
        assert [each.ids for each in made] == [each.ids for each in run(native(policy, folder), requests, GREEDY)]
        asked = [path for path, _ in server.engine.asked]
        assert "/update_weights_from_disk" not in asked
        assert asked.count("/init_weights_update_group") == 1
        buckets = [body["names"] for path, body in server.engine.asked if path == "/update_weights_from_distributed"]
        names = [name for name, _ in policy.stored.named_parameters()]
        # Three pushes: the first time twice.
        assert [name for bucket in buckets for name in bucket] == 3 * names
        assert len(buckets) > 6
        # It was started again, or says so: another group is made, and what was left open is closed.
        server.engine.groups.clear()
        moved(policy)
        engine.sync(policy.stored.named_parameters())
        assert [path for path, _ in server.engine.asked].count("/init_weights_update_group") == 2
        assert len(server.engine.groups) == 1
        server.engine.dropped_tensors = {"model.layers.1.mlp.down_proj.weight"}
        moved(policy)
        with pytest.raises(Refusal, match="does not generate with the weights"):
            engine.sync(policy.stored.named_parameters())
    assert not server.engine.groups, "destroyed with the engine"


@pytest.mark.slow
def test_later_pushes_reach_both_servers_by_one_broadcast(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Sglang, "bucket_bytes", 20_000)
    size = sum(parameter.nbytes for _, parameter in policy.stored.named_parameters())
    with (
        serving(folder, *FLAGS) as one,
        serving(folder, *FLAGS) as two,
        engine_at(policy, folder, one, two, weight_sync="collective") as engine,
    ):
        # The first server twice, to calibrate the weight check, and then the second one.
        assert engine.take_sync_metrics()["perf/weight_sync_bytes"] == 3 * size
        for _ in range(2):
            moved(policy)
            engine.sync(policy.stored.named_parameters())
            assert engine.take_sync_metrics()["perf/weight_sync_bytes"] == size
            for server in (one, two):
                own = dict(server.engine.model.named_parameters())
                assert all(torch.equal(own[name], sent) for name, sent in policy.stored.named_parameters())
        # A group of its own at first, and then one with the other server.
        joins = [
            [body["world_size"] for path, body in server.engine.asked if "init_weights" in path]
            for server in (one, two)
        ]
        assert joins == [[2, 3], [2, 3]]
        assert len(one.engine.groups) == len(two.engine.groups) == 1


def test_a_release_without_sessions_for_weights_is_refused_for_a_collective_with_the_way_that_it_has(
    policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As 0.5.17 is: it has the routes of the group, and none that begins or ends an update.
    for path in ("/begin_weight_update", "/end_weight_update"):
        monkeypatch.delitem(FORMS, path)
    with serving(folder, *FLAGS) as server:
        refused = pytest.raises(Refusal, match=r"no /begin_weight_update.*rollout\.weight_sync=files")
        with refused, engine_at(policy, folder, server, weight_sync="collective"):
            pass
        assert "/update_weights_from_distributed" not in [path for path, _ in server.engine.asked]


def test_a_tensor_that_the_server_leaves_as_it_was_is_found_by_the_probe(policy: Policy, folder: Path) -> None:
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server) as engine:
        server.engine.dropped_tensors = {"model.layers.1.mlp.down_proj.weight"}
        moved(policy)
        with pytest.raises(Refusal, match="does not generate with the weights"):
            engine.sync(policy.stored.named_parameters())
        # What it said was all in order.
        assert server.engine.version == engine.fleet.version


def test_keys_and_values_of_earlier_weights_are_found_by_the_probe(policy: Policy, folder: Path) -> None:
    class Forgetful(Sglang):
        def push(self, line: Any, weights: PushedWeights) -> None:
            said = {"model_path": str(weights.files[0].parent), "flush_cache": False}
            line.post("/update_weights_from_disk", said)

        def flush(self, line: Any, images: bool) -> None:
            """Forgotten."""

    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server, server_adapter=Forgetful()) as engine:
        moved(policy)
        with pytest.raises(Refusal, match="log-probs of the weight check differ"):
            engine.sync(policy.stored.named_parameters())


def test_a_push_that_fails_half_way_ends_the_run(policy: Policy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server) as engine:
        name = list(dict(server.engine.model.named_parameters()))[3]
        parameter = dict(server.engine.model.named_parameters())[name]
        parameter.data = torch.zeros(3)
        moved(policy)
        with pytest.raises(Refusal, match="Failed to update weights") as refusal:
            engine.sync(policy.stored.named_parameters())
        assert "the last checkpoint is untouched" in str(refusal.value)


@pytest.mark.slow
def test_a_push_that_fails_half_way_leaves_a_server_that_the_next_run_can_use(
    policy: Policy, folder: Path, requests: list[Request]
) -> None:
    """It tells its health by generating, which a pause would hold up, and says that its weights are nobody's."""
    with serving(folder, *FLAGS) as server:
        with engine_at(policy, folder, server) as engine:
            parameter = list(server.engine.model.parameters())[3]
            whole, parameter.data = parameter.data, torch.zeros(3)
            moved(policy)
            with pytest.raises(Refusal, match="Failed to update weights"):
                engine.sync(policy.stored.named_parameters())
            assert server.engine.version == f"{engine.fleet.version}-incomplete"
        assert server.engine.paused is None
        parameter.data = whole
        with engine_at(policy, folder, server, server={"start_timeout": 2.0}) as engine:
            made = run(engine, requests, GREEDY)
            assert [each.ids for each in made] == [each.ids for each in run(native(policy, folder), requests, GREEDY)]


def test_a_server_that_a_lost_run_has_left_paused_is_resumed(
    policy: Policy, folder: Path, requests: list[Request]
) -> None:
    """As after a cut of the network in the middle of a push: nobody could resume it, and its health fails."""
    with serving(folder, *FLAGS) as server:
        server.engine.paused = "abort"
        with engine_at(policy, folder, server, server={"start_timeout": 2.0}) as engine:
            made = run(engine, requests, GREEDY)
        assert [each.ids for each in made] == [each.ids for each in run(native(policy, folder), requests, GREEDY)]


def test_files_that_do_not_hold_what_was_announced_are_not_pushed(policy: Policy, folder: Path, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ServerFailed, match=r"missing \['b'\]"):
        Sglang().push(None, PushedWeights([tmp_path / "model.safetensors"], ["a", "b"], [0, 0]))  # type: ignore[arg-type]
    save_file({"c": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ServerFailed, match="has files of another push"):
        Sglang().push(None, PushedWeights([tmp_path / "model.safetensors"], ["a"], [0]))  # type: ignore[arg-type]


@pytest.mark.slow
def test_an_adapter_is_pushed_alone_and_takes_the_place_of_the_one_before(
    folder: Path, requests: list[Request]
) -> None:
    policy = load(folder, Lora(rank=4, alpha=8.0))
    flags = ("--enable-lora", "--max-lora-rank", "4", "--lora-target-modules", "all")
    with serving(folder, *FLAGS, *flags) as server, engine_at(policy, folder, server) as engine:
        for _ in range(2):
            torch.manual_seed(3)
            with torch.no_grad():
                for name, parameter in policy.named_parameters():
                    if "lora_B" in name:
                        parameter.add_(torch.randn_like(parameter), alpha=0.2)
            engine.sync(policy.stored.named_parameters())
            made = run(engine, requests[:1], GREEDY)
            assert_scored(policy, requests[:1], made, GREEDY)
        assert not [path for path, _ in server.engine.asked if path == "/update_weights_from_disk"]
        assert list(server.engine.adapters) == [f"lockstep-{engine.fleet.version}"]


# Memory.


def test_weights_come_again_to_a_server_that_slept(policy: Policy, folder: Path, requests: list[Request]) -> None:
    saver = serving(folder, *FLAGS, "--enable-memory-saver")
    with saver as server, engine_at(policy, folder, server, sleep=True) as engine:
        before = run(engine, requests, GREEDY)
        engine.release_memory()
        assert server.engine.released == {"weights", "kv_cache"}
        engine.sync(policy.stored.named_parameters())
        assert not server.engine.released
        assert [each.ids for each in run(engine, requests, GREEDY)] == [each.ids for each in before]


@pytest.mark.parametrize(
    ("flags", "rank", "why"),
    [
        ((), None, "the server cannot release memory: start it with --enable-memory-saver"),
        (
            ("--enable-memory-saver",),
            4,
            "the server does not accept LoRA adapters, but the run has an adapter of rank 4",
        ),
        (
            ("--enable-memory-saver", "--enable-lora"),
            4,
            "start it with --enable-weights-cpu",
        ),
    ],
)
def test_a_server_that_cannot_sleep_or_take_the_adapter_is_refused_before_a_push(
    policy: Policy, folder: Path, flags: tuple[str, ...], rank: int | None, why: str
) -> None:
    policy = load(folder, Lora(rank=rank, alpha=8.0)) if rank else policy
    with serving(folder, *FLAGS, *flags) as server:
        with pytest.raises(Refusal, match=why) as refusal, engine_at(policy, folder, server, sleep=True):
            pass
        assert {path for path, _ in server.engine.asked} <= {"/health", "/server_info"}
    assert "--enable-memory-saver" in refusal.value.problems[0].remedy
    assert ("--enable-lora --max-lora-rank 4" in refusal.value.problems[0].remedy) == (rank is not None)


# Servers that are lost.


def drawn(server: Server) -> set[tuple[int, int]]:
    """Seed and most tokens of each sample that it was asked for; those of a probe have another temperature."""
    bodies = [body["sampling_params"] for path, body in server.engine.asked if path == "/generate"]
    return {(how["sampling_seed"], how["max_new_tokens"]) for how in bodies if how["temperature"] == MIXED.temperature}


@pytest.mark.slow
def test_what_a_killed_server_had_not_finished_is_asked_of_the_other(
    policy: Policy, folder: Path, requests: list[Request]
) -> None:
    """Of each server one sample is finished at once; when the first of them is there, the long ones are under way."""
    asked = [replace(requests[0], max_tokens=2), *requests[1:]]
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving(folder, *FLAGS)) for _ in range(2))
        engine = stack.enter_context(engine_at(policy, folder, one, other))
        whole = run(engine, asked, MIXED)
        halves = drawn(one), drawn(other)
        assert [sorted(most for _, most in half) for half in halves] == [[2, 64, 64], [2, 64, 64]]
        for server in (one, other):
            server.engine.asked.clear()
        made: list[Completion] = []
        for completion in engine.generate(asked, MIXED):
            if not made:
                one.die()
            made.append(completion)
        made.sort(key=lambda each: (each.request, each.sample))
        assert [(each.ids, each.stop) for each in made] == [(each.ids, each.stop) for each in whole]
        assert drawn(one) == halves[0]
        long = {sample for sample in halves[0] if sample[1] == 64}
        assert long | halves[1] <= drawn(other)
