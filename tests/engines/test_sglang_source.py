"""Does the server that stands in for SGLang take what SGLang's own source takes? Read, not run: it has no CPU build.

`LOCKSTEP_SGLANG_SOURCE` is a folder with the package unpacked; `make test-engines` makes it.
"""

from __future__ import annotations

import ast
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lockstep.device.serving import SERVING
from lockstep.rollout.servers.adapter import ServerNeeds, ServerStart
from lockstep.rollout.servers.sglang import Sglang
from sglang_schema import FORMS, GENERATE, MASK_LIMIT, SAMPLING, TOP_K_ALL
from sglang_server import VERSION, parser

SOURCE = Path(os.environ.get("LOCKSTEP_SGLANG_SOURCE", "."))
REQUIRED = object()


@cache
def tree(path: str) -> ast.Module:
    return ast.parse((SOURCE / "sglang" / path).read_text(encoding="utf-8"))


def classes(path: str) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in ast.walk(tree(path)) if isinstance(node, ast.ClassDef)}


def fields(found: ast.ClassDef) -> dict[str, Any]:
    """Names and defaults; what is computed counts as some default."""
    told: dict[str, Any] = {}
    for node in found.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            value = REQUIRED if node.value is None else ...
            if node.value is not None:
                try:
                    value = ast.literal_eval(node.value)
                except ValueError:
                    value = ...
            told[node.target.id] = value
    return told


@cache
def routes() -> dict[tuple[str, str], str]:
    """(method, path) to the name of the class that its body is read into."""
    found: dict[tuple[str, str], str] = {}
    for node in ast.walk(tree("srt/entrypoints/http_server.py")):
        if not isinstance(node, ast.AsyncFunctionDef):
            continue
        bodies = [ast.unparse(each.annotation) for each in node.args.args if each.arg == "obj" and each.annotation]
        body = (
            bodies[0].removeprefix("Annotated[").removeprefix("Optional[").partition(",")[0].rstrip("]")
            if bodies
            else ""
        )
        for mark in node.decorator_list:
            if not (isinstance(mark, ast.Call) and isinstance(mark.func, ast.Attribute) and mark.args):
                continue
            if not isinstance(mark.args[0], ast.Constant):
                continue
            path = str(mark.args[0].value)
            methods = [ast.literal_eval(each.value) for each in mark.keywords if each.arg == "methods"]
            for method in methods[0] if methods else [mark.func.attr.upper()]:
                found[method, path] = body
    return found


def test_the_source_is_of_the_version_that_was_read() -> None:
    (info,) = SOURCE.glob("sglang-*.dist-info")
    assert info.name == f"sglang-{VERSION}.dist-info"


@pytest.mark.parametrize("path", FORMS)
def test_a_form_is_that_of_the_route(path: str) -> None:
    real = fields(classes("srt/managers/io_struct.py")[routes()["POST", path]])
    real |= {"rid": None} if path == "/abort_request" else {}  # of the class above it
    form = FORMS[path]
    for name in form.fields:
        assert name in real, f"{path} has no {name}"
        if path != "/abort_request" or name != "rid":
            assert form.defaults.get(name, REQUIRED) == real[name], name


def test_generate_takes_what_is_asked_by_both_of_its_parsers() -> None:
    assert routes()["POST", "/generate"] == "GenerateReqInput"
    assert set(GENERATE) <= set(fields(classes("srt/managers/io_struct.py")["GenerateReqInput"]))
    contract = classes("api/v1/api_types.py")
    assert set(SAMPLING) <= set(fields(contract["SamplingParams"]))
    assert set(SAMPLING) <= set(fields(classes("srt/sampling/sampling_params.py")["SamplingParams"]))
    assert fields(contract["SamplingParams"])["top_k"] == TOP_K_ALL


def test_what_is_only_asked_for_is_there() -> None:
    for asked in (("GET", "/model_info"), ("GET", "/server_info"), ("GET", "/health"), ("POST", "/flush_cache")):
        assert asked in routes()


def test_answers_have_the_parts_that_are_read() -> None:
    text = (SOURCE / "sglang/srt/managers/tokenizer_manager.py").read_text(encoding="utf-8")
    for name in ("output_ids", "finish_reason", "weight_version", "output_token_sampling_logprobs"):
        assert f'"{name}"' in text
    assert "output_token_logprobs" in text
    spans = (SOURCE / "sglang/srt/utils/weight_versions.py").read_text(encoding="utf-8")
    assert 'meta_info["weight_versions"]' in spans
    ends = classes("srt/managers/schedule_batch.py")
    kinds = {
        name: ast.unparse(ends[name])
        for name in ("FINISH_MATCHED_TOKEN", "FINISH_MATCHED_STR", "FINISH_LENGTH", "FINISH_ABORT")
    }
    for name, kind in zip(kinds, ("stop", "stop", "length", "abort"), strict=True):
        assert f"'type': '{kind}'" in kinds[name]
    assert "'matched': self.matched" in kinds["FINISH_MATCHED_TOKEN"]
    assert "NaN happened" in ast.unparse(ends["Req"])


def server_fields() -> dict[str, Any]:
    told: dict[str, Any] = {}
    for file in sorted((SOURCE / "sglang/srt/arg_groups/fields").glob("*.py")):
        for found in classes(f"srt/arg_groups/fields/{file.name}").values():
            told |= fields(found)
    return told


@pytest.mark.parametrize("device", SERVING)
@pytest.mark.parametrize("rank", [None, 8])
def test_flags_of_the_command_line_exist(device: str, rank: int | None) -> None:
    known = server_fields()
    assert {action.dest for action in parser()._actions} - {"help"} <= set(known)
    command = Sglang().command(
        ServerStart("python", "model", "bf16", "127.0.0.1", 1, 1, ServerNeeds(device, True, rank))
    )
    for word in command:
        if word.startswith("--"):
            assert word[2:].replace("-", "_") in known, word
    # What `facts` and `sleep` read of the server.
    assert {"enable_deterministic_inference", "quantization", "speculative_algorithm", "dtype"} <= set(known)
    assert {"context_length", "enable_memory_saver", "enable_weights_cpu_backup", "enable_lora"} <= set(known)
    assert {"tp_size", "dp_size", "pp_size"} <= set(known)
    assert known["sampling_mask_max_tokens"] == MASK_LIMIT


def test_variables_of_the_environment_exist() -> None:
    text = (SOURCE / "sglang/srt/environ.py").read_text(encoding="utf-8")
    start = ServerStart("python", "model", "bf16", "127.0.0.1", 1, 1, ServerNeeds("npu", True))
    for name in Sglang().environment(start):
        if name.startswith("SGLANG_"):
            assert f"    {name} = Env" in text, name


def test_a_load_from_disk_needs_no_session_and_others_do() -> None:
    updater = classes("srt/managers/scheduler_components/weight_updater.py")["SchedulerWeightUpdaterManager"]
    bodies = {node.name: ast.unparse(node) for node in updater.body if isinstance(node, ast.FunctionDef)}
    assert "self._session" not in bodies["update_weights_from_disk"]
    assert "self._session is None" in bodies["update_weights_from_tensor"]
    assert "self._session is None" in bodies["update_weights_from_distributed"]
    assert "already open" in bodies["begin_weight_update"]


def test_a_group_is_joined_by_the_rank_of_tensor_parallelism_and_its_absence_is_told() -> None:
    updater = classes("srt/model_executor/model_runner_components/weight_updater.py")["WeightUpdater"]
    bodies = {node.name: ast.unparse(node) for node in updater.body if isinstance(node, ast.FunctionDef)}
    assert "rank = rank_offset + self.tp_rank" in bodies["init_weights_update_group"]
    # What tells a server that was started again.
    assert "call `init_weights_update_group` first" in bodies["receive_weights_from_distributed"]
