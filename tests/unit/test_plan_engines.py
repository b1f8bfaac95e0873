"""What the plan says of engines: that of the recipe, how it starts on the device, and the others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lockstep.commands.plan import engine_lines
from lockstep.device.base import Device
from lockstep.device.cpu import Cpu
from lockstep.device.cuda import Cuda
from lockstep.device.npu import Npu
from lockstep.doctor.engine_packages import packages_in
from lockstep.doctor.local_machine import Machine
from lockstep.errors import Refusal
from lockstep.recipe import Recipe, load_recipe
from refusals import refuses
from sglang_server import write_package


def planned(online_file: Path, *words: str) -> Recipe:
    return load_recipe(str(online_file), list(words))


def test_the_built_in_engine_and_why_there_is_no_other(online_file: Path) -> None:
    lines = engine_lines(planned(online_file), Cpu())
    assert lines[0] == ("engine", "native (built in)")
    assert ("other engines", "not sglang: SGLang publishes no package for CPUs") in lines
    assert not [line for line in lines if line[0] == "engine setting"]


def test_an_engine_of_another_python_is_named_with_its_version(
    online_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(write_package(tmp_path / "package")))
    assert packages_in(Machine(), sys.executable) == {"sglang": "0.5.23"}
    assert packages_in(Machine(), "no-such-python") == {}
    recipe = planned(online_file, "rollout.engine=sglang", f"rollout.server.python={sys.executable}")
    assert engine_lines(recipe, Cpu())[0] == ("engine", "sglang, started by the run: sglang 0.5.23")


def test_settings_of_the_device_are_shown_with_their_reasons(online_file: Path) -> None:
    lines = engine_lines(planned(online_file, "rollout.engine=vllm", "rollout.sleep=true"), Npu())
    told = [text for label, text in lines if label == "engine setting"]
    assert any(text.startswith("VLLM_ASCEND_ENABLE_NZ=0: ") for text in told)
    assert any(text.startswith("PYTORCH_NPU_ALLOC_CONF=expandable_segments:False: ") for text in told)
    assert any(text.startswith("--enforce-eager: ") for text in told)
    assert any(text.startswith("--enable-sleep-mode: rollout.sleep") for text in told)


@pytest.mark.parametrize(
    ("engine", "device", "words", "flags"),
    [
        ("vllm", Cuda(), (), []),
        ("vllm", Cuda(), ("rollout.sleep=true",), ["--enable-sleep-mode"]),
        ("vllm", Cpu(), ("rollout.sleep=true",), ["--no-enable-chunked-prefill"]),
        ("vllm", Cuda(), ("model.lora.rank=12",), ["--enable-lora --max-loras 1 --max-lora-rank 16"]),
        ("sglang", Npu(), ("rollout.sleep=true",), ["--enable-memory-saver", "--attention-backend ascend"]),
        (
            "sglang",
            Cuda(),
            ("rollout.sleep=true", "model.lora.rank=4"),
            [
                "--enable-lora --max-lora-rank 4 --lora-target-modules all",
                "--enable-memory-saver",
                "--enable-weights-cpu-backup",
            ],
        ),
    ],
)
def test_flags_for_sleep_and_adapters_are_shown(
    online_file: Path, engine: str, device: Device, words: tuple[str, ...], flags: list[str]
) -> None:
    lines = engine_lines(planned(online_file, f"rollout.engine={engine}", *words), device)
    told = [text.partition(": ")[0] for label, text in lines if label == "engine setting"]
    assert [flag for flag in told if flag.startswith("--")] == flags


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ((), ("0.92", "8%", "while the run trains")),
        (("rollout.sleep=true",), ("0.92", "8%", "while it is awake", "rollout.server")),
        (("rollout.server.args=[--gpu-memory-utilization,'0.4']",), ("--gpu-memory-utilization 0.4",)),
        (("rollout.server.args=[--gpu-memory-utilization=0.3]",), ("--gpu-memory-utilization 0.3",)),
        (("rollout.server.devices=[1]",), None),
    ],
)
def test_the_share_of_the_runs_own_devices_is_told(online_file: Path, words: tuple[str, ...], told: str | None) -> None:
    lines = dict(engine_lines(planned(online_file, "rollout.engine=vllm", *words), Cuda()))
    assert all(part in lines["engine memory"] for part in told) if told else "engine memory" not in lines
    assert "engine memory" not in dict(engine_lines(planned(online_file, "rollout.engine=vllm", *words), Cpu()))


def test_the_way_of_the_weights_is_told(online_file: Path) -> None:
    by = {
        way: ("rollout.engine=vllm", f"rollout.weight_sync={way}") for way in ("auto", "files", "collective", "memory")
    }
    told = {way: dict(engine_lines(planned(online_file, *words), Cpu()))["engine weights"] for way, words in by.items()}
    files, memory = "through files", "through the run's device memory"
    assert told == {"auto": files, "files": files, "collective": "by gloo", "memory": memory}
    assert (
        dict(engine_lines(planned(online_file, *by["auto"]), Cuda()))["engine weights"]
        == f"{memory}, otherwise {files}"
    )
    assert "engine weights" not in dict(engine_lines(planned(online_file), Cpu()))


@pytest.mark.parametrize(
    ("words", "code", "remedy"),
    [
        (("weight_sync=files",), "needs-key", "rollout.max_staleness"),
        (("engine=sglang", "weight_sync=memory"), "unsupported-combination", "use files (in /dev/shm), or collective"),
        (("engine=vllm", "weight_sync=memory", "lora"), "unsupported-combination", "use files"),
        (("max_staleness=1", "weight_sync=files"), "unsupported-combination", "use memory, or collective"),
        (("engine=vllm", "weight_sync=collective", "lora"), "unsupported-combination", "use files"),
    ],
)
def test_a_way_that_does_not_lead_there_is_refused(
    online_file: Path, words: tuple[str, ...], code: str, remedy: str
) -> None:
    keys = ["model.lora.rank=4" if word == "lora" else f"rollout.{word}" for word in words]
    with refuses("rollout.weight_sync", code, remedy=remedy):
        planned(online_file, *keys)


def test_a_running_server_is_named_by_its_address(online_file: Path) -> None:
    lines = engine_lines(planned(online_file, "rollout.engine=sglang", "rollout.url=[http://a:1,http://b:2]"), Cpu())
    assert lines[0][1].startswith("sglang at http://a:1, http://b:2, ")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("rollout.engine=vllm", "rollout.top_k=5", "rollout.truncated_sampling=ignore"), "rollout.truncated_sampling"),
        (
            ("rollout.engine=sglang", "rollout.top_p=0.9", "rollout.truncated_sampling=mask"),
            "truncated_sampling: ignore",
        ),
        (("rollout.engine=sglang", "rollout.min_p=0.1", "rollout.truncated_sampling=ignore"), "rollout.min_p"),
        (("rollout.engine=sglang", "rollout.top_p=0.9"), "rollout.truncated_sampling"),
    ],
)
def test_truncations_that_an_engine_does_not_score_are_refused(
    online_file: Path, words: tuple[str, ...], why: str
) -> None:
    with pytest.raises(Refusal, match=why):
        planned(online_file, *words)


@pytest.mark.parametrize(
    "words",
    [
        ("rollout.engine=vllm", "rollout.top_p=0.9", "rollout.truncated_sampling=mask"),
        ("rollout.engine=sglang", "rollout.top_p=0.9", "rollout.top_k=5", "rollout.truncated_sampling=ignore"),
        ("rollout.engine=sglang", "rollout.top_k=5", "rollout.truncated_sampling=mask"),
        ("rollout.engine=native", "rollout.min_p=0.1", "rollout.truncated_sampling=ignore"),
    ],
)
def test_truncations_that_an_engine_scores_pass(online_file: Path, words: tuple[str, ...]) -> None:
    planned(online_file, *words)
