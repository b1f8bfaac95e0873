"""Every call of torch_npu in the package, held against the real one: names, arguments, and shapes on Meta tensors."""

from __future__ import annotations

import ast
import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig
from transformers.models.llama import modeling_llama

import lockstep
from hang import HANG
from lockstep.kernels import fused_modules_npu as npu_modules
from lockstep.kernels.attention import npu_attention
from lockstep.kernels.attention import npu_attention as npu_parts
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.partial_attention import sections
from lockstep.kernels.quantized import int8_npu

pytestmark = pytest.mark.ascend

HOUSE = Path(lockstep.__file__).parent
ROOT = HOUSE.parents[1]
META = torch.device("meta")


# ---- calls and schemas ----


class Called(NamedTuple):
    where: str
    name: str
    """What follows `torch_npu.`, with its dots."""
    call: ast.Call


def dotted(node: ast.expr) -> list[str]:
    """The names of `a.b.c`; empty for anything else."""
    if isinstance(node, ast.Name):
        return [node.id]
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return [*before, node.attr]
    return []


def trees(root: Path, word: str = "torch_npu") -> Iterator[tuple[str, ast.Module]]:
    """The files that have the word; to parse all of them takes longer than the rest of the tests here."""
    for path in sorted(root.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if word in text:
            yield path.relative_to(root).as_posix(), ast.parse(text)


def calls(root: Path) -> list[Called]:
    return [
        Called(f"{file}:{node.lineno}", ".".join(names[1:]), node)
        for file, tree in trees(root)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and (names := dotted(node.func))[:1] == ["torch_npu"]
    ]


def unbound(call: ast.Call, schema: torch.FunctionSchema) -> list[str]:
    """What keeps the call from fitting the operator's schema."""
    if any(isinstance(given, ast.Starred) for given in call.args) or any(k.arg is None for k in call.keywords):
        return ["arguments behind a star cannot be checked: write them out"]
    places = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    known = {argument.name for argument in schema.arguments}
    required = {argument.name for argument in schema.arguments if not argument.has_default_value()}
    positional = places[: len(call.args)]
    keywords = [keyword.arg for keyword in call.keywords if keyword.arg is not None]
    problems = [f"unknown keyword {name}" for name in keywords if name not in known]
    problems += [f"{name} is given twice" for name in keywords if name in positional]
    problems += [f"{name} is not given" for name in sorted(required - {*positional, *keywords})]
    if len(call.args) > len(places):
        problems.append(f"{len(call.args)} arguments by place and {len(places)} are taken")
    return problems


def violations(root: Path) -> list[str]:
    found = []
    for where, name, call in calls(root):
        try:
            function = attrgetter(name)(torch_npu)
        except AttributeError:
            found.append(f"{where}: torch_npu has no {name}")
            continue
        if isinstance(function, torch._ops.OpOverloadPacket):
            found += [f"{where}: {name}: {problem}" for problem in unbound(call, function.default._schema)]
    return found


def operators(root: Path) -> set[str]:
    return {called.name for called in calls(root) if "." not in called.name}


def test_every_call_fits_its_schema() -> None:
    assert operators(HOUSE) == set(SHAPES), "a new operator needs its case of shapes below"
    assert violations(HOUSE) == []


WRONG = {
    "a misspelt keyword": (
        "actual_seq_qlen=ends",
        "actual_seq_q_len=ends",
        "npu_fusion_attention: unknown keyword actual_seq_q_len",
    ),
    "a missing argument": (
        '        query_THD.shape[1],\n        "TND",\n',
        "        query_THD.shape[1],\n",
        "npu_fusion_attention: input_layout is not given",
    ),
    "an argument too many": (
        "values.view(-1, block, groups * size),\n",
        "values.view(-1, block, groups * size),\n        None,\n",
        "npu_fused_infer_attention_score: 4 arguments by place and 3 are taken",
    ),
    "an argument given twice": (
        '        "TND",\n',
        '        "TND",\n        head_num=1,\n',
        "npu_fusion_attention: head_num is given twice",
    ),
    "an unknown operator": (
        "torch_npu.npu_fusion_attention(",
        "torch_npu.npu_fusion_atention(",
        "torch_npu has no npu_fusion_atention",
    ),
    "keywords behind a star": (
        "num_heads=heads,",
        "**{'num_heads': heads},",
        "npu_fused_infer_attention_score: arguments behind a star cannot be checked: write them out",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_is_caught(case: str, tmp_path: Path) -> None:
    right, wrong, problem = WRONG[case]
    copy = Path(shutil.copy(npu_attention.__file__, tmp_path))
    assert violations(tmp_path) == []
    source = copy.read_text(encoding="utf-8")
    assert right in source
    copy.write_text(source.replace(right, wrong, 1), encoding="utf-8")
    (found,) = violations(tmp_path)
    assert found.startswith("npu_attention.py:")
    assert found.endswith(f": {problem}")


def imported() -> list[tuple[str, str]]:
    """(module, name) of every `from torch_npu... import name`."""
    return [
        (node.module, alias.name)
        for _, tree in trees(HOUSE)
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "torch_npu"
        for alias in node.names
    ]


def reached() -> set[str]:
    """What follows `self.api.`, which is torch_npu.npu for this device; it shares the code with another one."""
    files = {"device/base.py", "device/npu.py"}
    nodes = [node for file, tree in trees(HOUSE, "self.api") if file in files for node in ast.walk(tree)]
    chains = [dotted(node) for node in nodes if isinstance(node, ast.Attribute)]
    return {".".join(names[2:]) for names in chains if names[:2] == ["self", "api"] and len(names) > 2}


def test_names_that_are_imported_or_reached_through_the_device_exist() -> None:
    assert imported()
    assert [pair for pair in imported() if not hasattr(importlib.import_module(pair[0]), pair[1])] == []
    names = reached()
    assert {"device_count", "set_device", "mem_get_info", "is_bf16_supported"} <= names
    # Options can only be set, and a name that torch_npu does not know is ignored in silence: ask its code.
    options = {name.removeprefix("config.") for name in names if name.startswith("config.")}
    assert options <= set(type(torch_npu.npu.config).__setattr__.__code__.co_consts)
    assert [name for name in names if "." not in name and not hasattr(torch_npu.npu, name)] == []


# ---- shapes ----

HEADS, GROUPS, SIZE, BLOCK = 4, 2, 16, 32
LENGTHS = [3, 5, 1]
TOKENS = sum(LENGTHS)


Shape = tuple[int, ...]
Case = Callable[[], tuple[Any, list[Shape]]]


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def fusion(window: int | None) -> Case:
    def run() -> tuple[Any, list[Shape]]:
        query, key, value = (meta(TOKENS, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
        layout = make_layout(LENGTHS, META, "npu_fusion")
        out = npu_attention.fusion_attention(query, key, value, layout, SIZE**-0.5, window)
        return out, [(TOKENS, HEADS, SIZE)]

    return run


def part() -> tuple[Any, list[Shape]]:
    query, key, value = (meta(TOKENS, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    out, lse_HT = npu_parts.fusion_part(query, key, value, sections(LENGTHS, LENGTHS, True, META), SIZE**-0.5)
    assert (tuple(lse_HT.shape), lse_HT.dtype) == ((HEADS, TOKENS), torch.float32)
    return out, [(TOKENS, HEADS, SIZE)]


def part_backward() -> tuple[Any, list[Shape]]:
    query, key, value = (meta(TOKENS, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS))
    whole = (query, meta(HEADS, TOKENS, dtype=torch.float32), sections(LENGTHS, LENGTHS, False, META))
    back = npu_parts.fusion_part_backward(query, query, key, value, *whole, SIZE**-0.5)
    return back, [(TOKENS, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS)]


def infer() -> tuple[Any, list[Shape]]:
    keys, values = (meta(6 * BLOCK, GROUPS, SIZE) for _ in range(2))
    table = meta(3, 2, dtype=torch.int64)
    query = meta(3, HEADS, SIZE)
    out = npu_attention.infer_decode(query, keys, values, table, [40, 1, 33], block=BLOCK, scale=SIZE**-0.5)
    return out, [(3, HEADS, SIZE)]


def rms_norm() -> tuple[Any, list[Shape]]:
    norm = modeling_llama.LlamaRMSNorm(48).to(META, torch.bfloat16)
    return npu_modules.rms_norm(norm, meta(2, 7, 48)), [(2, 7, 48)]


def rotary() -> tuple[Any, list[Shape]]:
    q, k, cos, sin = meta(2, HEADS, 7, SIZE), meta(2, GROUPS, 7, SIZE), meta(2, 7, SIZE), meta(2, 7, SIZE)
    return npu_modules.rotate(q, k, cos, sin), [(2, HEADS, 7, SIZE), (2, GROUPS, 7, SIZE)]


def swiglu() -> tuple[Any, list[Shape]]:
    config = LlamaConfig(hidden_size=48, intermediate_size=80, num_attention_heads=4)
    gated = modeling_llama.LlamaMLP(config).to(META, torch.bfloat16)
    return npu_modules.gated(gated, meta(2, 7, 48)), [(2, 7, 48)]


def int8_product() -> tuple[Any, list[Shape]]:
    x, codes, scales = meta(7, 48), meta(24, 48, dtype=torch.int8), meta(24, 1, dtype=torch.float32)
    return int8_npu.npu_int8_product(x, codes, scales), [(7, 24)]


# Our own functions around each operator: what they give, and the shapes that their callers expect.
SHAPES: dict[str, list[Case]] = {
    "npu_fusion_attention": [fusion(None), fusion(4), part],
    "npu_fusion_attention_grad": [part_backward],
    "npu_fused_infer_attention_score": [infer],
    "npu_rms_norm": [rms_norm],
    "npu_rotary_mul": [rotary],
    "npu_swiglu": [swiglu],
    "npu_dynamic_quant": [int8_product],
    "npu_quant_matmul": [int8_product],
}


class Recorder(TorchDispatchMode):
    """Names of the operators that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("operator", SHAPES)
def test_shapes_are_what_the_code_expects(operator: str) -> None:
    for case in SHAPES[operator]:
        with Recorder() as recorder:
            outputs, expected = case()
        assert f"npu::{operator}" in recorder.names
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        assert [tuple(out.shape) for out in outputs] == expected
        assert {(out.dtype, out.device) for out in outputs} == {(torch.bfloat16, META)}


# ---- evidence ----


@pytest.mark.skipif(Path("/dev/davinci_manager").exists(), reason="this machine has an Ascend driver")
def test_without_a_device_there_is_no_evidence(tmp_path: Path) -> None:
    """The emulator is none: what it gives must not be taken for a device's numbers."""
    script = ROOT / "tools" / "ascend_evidence.sh"
    done = subprocess.run(["sh", script], cwd=tmp_path, capture_output=True, text=True, timeout=HANG, check=False)
    assert done.returncode == 1
    assert "no Ascend device" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "emulated", "said"),
    [(["--trial"], "", "--trial needs the emulator around it"), (["--quick"], "npu", "unknown words: --quick")],
)
def test_a_trial_of_the_evidence_needs_the_emulator(tmp_path: Path, words: list[str], emulated: str, said: str) -> None:
    script = ROOT / "tools" / "ascend_evidence.sh"
    environment = {**os.environ, "LOCKSTEP_EMULATED": emulated}
    command = ["sh", str(script), *words]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG, check=False
    )
    assert done.returncode == 1
    assert said in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_evidence_says_first_how_long_it_takes_and_how_many_tests_there_are(request: pytest.FixtureRequest) -> None:
    text = (ROOT / "tools" / "ascend_evidence.sh").read_text(encoding="utf-8")
    assert text.index("It takes about an hour") < text.index('say "1. the machine"')
    tests = [item for item in request.session.items if item.get_closest_marker("ascend_hardware")]
    if not tests:
        pytest.skip("counts the tests of the session, and tests/ascend/test_hardware.py is no part of this one")
    count = str(len(tests))
    assert f"ascend_hardware, {count} of them" in text
    for page in ("ascend.md", "ascend.zh.md"):
        assert count in (ROOT / "docs" / page).read_text(encoding="utf-8")
