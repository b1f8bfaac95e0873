"""The numpy references against torch, with which they share no code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from lockstep.parity.replay.numpy_modules import (
    ACTIVATIONS,
    NotedValues,
    PackedTokens,
    array,
    directional,
    host_digest,
    layer_norm,
    linear,
    reference_of,
    rms_norm,
)
from lockstep.parity.replay.numpy_operators import OPERATORS, numpy_results
from lockstep.parity.replay.operator_log import Operator, OperatorLog, log_module
from lockstep.tape.digest import BLOCKS, SKETCH, digest, sketch
from lockstep.tape.module_trace import ROOT, fixed_sum

LENGTHS = (5, 9, 3)
TOKENS = sum(LENGTHS)
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 8},
}


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module", params=CONFIGS)
def model(request: pytest.FixtureRequest) -> Any:
    """A tiny model of transformers in float64, all of whose weights matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = AutoConfig.for_model(request.param, vocab_size=40, **sizes, **CONFIGS[request.param])
    found = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double().eval()
    with torch.no_grad():
        for number, weight in enumerate(found.parameters()):
            weight.copy_(0.3 * draw(*weight.shape, seed=number) + (weight.ndim == 1))
    return found


def line() -> PackedTokens:
    ids = np.random.default_rng(0).integers(0, 40, TOKENS)
    positions = np.concatenate([np.arange(n) for n in LENGTHS])
    return PackedTokens(ids, positions, LENGTHS, np.arange(TOKENS - 1), np.roll(ids, -1)[:-1])


def mask() -> torch.Tensor:
    owner = np.repeat(np.arange(len(LENGTHS)), LENGTHS)
    seen = (owner[:, None] == owner[None]) & np.tril(np.ones((TOKENS, TOKENS), dtype=bool))
    return torch.from_numpy(np.where(seen, 0.0, -np.inf))[None, None]


class InDouble(TorchFunctionMode):
    """Norms, softmax and rotary embeddings of transformers convert to float32; here they stay in float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        words = {key: torch.float64 if value is torch.float32 else value for key, value in (kwargs or {}).items()}
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        return func(*(torch.float64 if value is torch.float32 else value for value in args), **words)


def run(model: Any) -> Any:
    given = line()
    ids, positions = torch.from_numpy(given.ids)[None], torch.from_numpy(given.positions)[None]
    with InDouble():
        states = model.model(input_ids=ids, position_ids=positions, attention_mask=mask(), use_cache=False)
    return states.last_hidden_state


class Wrapped(torch.nn.Module):
    """As our policy holds it, whose names for modules are then those of the folder."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model


MODULES = {
    "model.embed_tokens": "Embedding",
    "model.rotary_emb": "RotaryEmbedding",
    "model.layers.0.input_layernorm": "RMSNorm",
    "model.layers.0.self_attn.q_proj": "Linear",
    "model.layers.0.self_attn": "Attention",
    "model.layers.0.mlp.act_fn": "SiLUActivation",
    "model.layers.0.mlp": "MLP",
    "model.layers.0": "DecoderLayer",
}


def reference(model: Any, module: str, kind: str) -> Any:
    weights = {name: array(weight) for name, weight in model.named_parameters()}
    found = reference_of(module, kind, model.config.to_dict(), weights, line(), 0.7)
    assert found is not None
    return found


@pytest.mark.parametrize("module", MODULES)
def test_modules_compute_what_transformers_computes(model: Any, module: str) -> None:
    heard = log_module(Wrapped(model), module, lambda: run(model))
    found = reference(model, module, MODULES[module])
    names = sorted((n for n in heard.border if n.startswith("input/")), key=lambda n: int(n.split("/")[1]))
    computed = found.compute([array(heard.border[name]) for name in names], found.weights, NotedValues())
    # The frequencies of rotary embeddings are a buffer that transformers computes in float32.
    bound = 1e-7 if module.endswith("rotary_emb") else 1e-12
    # Attention gives its weights too.
    for mine, theirs in zip(computed, heard.outputs[: len(computed)], strict=True):
        torch.testing.assert_close(torch.from_numpy(mine), theirs.double(), rtol=bound, atol=bound)


def test_log_probabilities_are_those_of_the_head(model: Any) -> None:
    with torch.no_grad():
        states = run(model)
        logits = (states[0, :-1] @ model.get_output_embeddings().weight.T) / 0.7
    wanted = logits.log_softmax(-1).gather(1, torch.from_numpy(line().targets)[:, None])[:, 0]
    found = reference(model, ROOT, "Policy")
    [computed] = found.compute([array(states)], found.weights, NotedValues())
    torch.testing.assert_close(torch.from_numpy(computed), wanted)


@pytest.mark.daily
@pytest.mark.parametrize("module", [name for name in MODULES if name not in ("model.embed_tokens", "model.rotary_emb")])
def test_gradients_are_those_of_autograd(model: Any, module: str) -> None:
    """By the projections of a digest: at the hidden states, and at the module's weights."""
    heard = log_module(Wrapped(model), module, lambda: run(model).flatten(), phase="backward")
    found = reference(model, module, MODULES[module])
    names = sorted(
        (n for n in heard.border if n.startswith("input/") and not n.endswith("gradient")),
        key=lambda n: int(n.split("/")[1]),
    )
    states, *rest = [array(heard.border[name]) for name in names]
    arrived = array(heard.border["output/0/gradient"])
    computed = directional(lambda x: found.compute([x, *rest], found.weights, NotedValues())[0], states, arrived)
    [wanted] = [one for one in heard.outputs if tuple(one.shape) == states.shape]
    np.testing.assert_allclose(computed, summed(host_digest(array(wanted))), rtol=1e-5, atol=1e-6)
    for name, theirs in heard.parameters.items():
        computed = directional(
            lambda w, name=name: found.compute([states, *rest], {**found.weights, name: w}, NotedValues())[0],
            found.weights[name],
            arrived,
        )
        size = float(theirs[0])
        np.testing.assert_allclose(computed, summed(theirs), rtol=1e-4, atol=1e-5 * size)


def summed(one: torch.Tensor) -> np.ndarray:
    found: np.ndarray = sketch(one).view(BLOCKS, SKETCH).sum(0).numpy()
    return found


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        ("Qwen2Attention", {"layer_types": ["sliding_attention"]}),
        ("Qwen2Attention", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("Qwen2Attention", {"model_type": "gemma2"}),
        ("Gemma2RMSNorm", {"model_type": "gemma2"}),
    ],
)
def test_what_is_not_the_plain_module_has_no_reference(kind: str, changed: dict[str, Any]) -> None:
    config = {"model_type": "qwen2", "hidden_size": 8, "num_attention_heads": 2, "hidden_act": "silu"}
    config |= {"rope_theta": 1e4, "rms_norm_eps": 1e-6}
    attention = {f"a.{name}_proj.weight": np.ones((8, 8)) for name in "qkvo"}
    weights = {"a.weight": np.ones(8)} if kind.endswith("Norm") else attention
    assert reference_of("a", kind.replace("Gemma2", "Qwen2"), config, weights, line(), None) is not None
    assert reference_of("a", kind, {**config, **changed}, weights, line(), None) is None


def test_single_functions_are_those_of_torch() -> None:
    x, weight, bias = draw(3, 7), draw(7, seed=1), draw(7, seed=2)
    for wanted, found in (
        (functional.linear(x, draw(4, 7, seed=3)), linear(array(x), array(draw(4, 7, seed=3)), None)),
        (functional.rms_norm(x, (7,), weight, 1e-3), rms_norm(array(x), array(weight), 1e-3, NotedValues())),
        (
            functional.layer_norm(x, (7,), weight, bias, 1e-3),
            layer_norm(*map(array, (x, weight, bias)), 1e-3, NotedValues()),
        ),
        (functional.silu(x), ACTIVATIONS["silu"][0](array(x))),
        (functional.gelu(x), ACTIVATIONS["gelu"][0](array(x))),
        (functional.gelu(x, approximate="tanh"), ACTIVATIONS["gelu_pytorch_tanh"][0](array(x))),
        (functional.relu(x), ACTIVATIONS["relu"][0](array(x))),
    ):
        torch.testing.assert_close(torch.from_numpy(found), wanted)


@pytest.mark.parametrize("shape", [(7,), (64, 3), (5, 6, 32), (1, 512), (33, 257)])
def test_a_digest_by_numpy_is_that_of_the_tape(shape: tuple[int, ...]) -> None:
    tensor = draw(*shape)
    torch.testing.assert_close(host_digest(array(tensor)).float(), digest(tensor), rtol=2e-5, atol=2e-4)


# -- operators


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **how: Any) -> torch.Tensor:
    return functional.scaled_dot_product_attention(q, k, v, enable_gqa=q.shape[1] != k.shape[1], **how)


SEEN = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6)[:, None] != 2)
IDS = torch.tensor([[1, 3, 3], [0, 2, 1]])
CALLS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "products": lambda x: torch.addmm(x[0], x, x.T @ x, beta=0.5) + (x[None] @ x.T[None] @ x)[0],
    "elements": lambda x: (x * 2 - x / 3 + x.square() + (-x)).pow(3) + x.exp().sqrt().log() + x.abs().rsqrt(),
    "functions": lambda x: (
        x.cos() + x.sin() + x.tanh() + x.sigmoid() + functional.silu(x) + functional.gelu(x) + x.erf()
    ),
    "sums": lambda x: x.mean(-1, keepdim=True) + x.sum((0, 1)) + x.cumsum(0) + x.mean(),
    "softmax": lambda x: x.softmax(0) + x.log_softmax(-1),
    "moved": lambda x: torch.cat([x, x[:1]], 0).index_select(0, IDS[0]) + x.gather(0, IDS[:, :1]).sum(),
    "embedding": lambda x: functional.embedding(IDS, x),
    "norms": lambda x: functional.layer_norm(x, x.shape[-1:], x[0], x[1], 1e-3),
    "causal": lambda x: attend(*(x.repeat(1, 3)[:6, :16].reshape(1, 6, 4, 4).transpose(1, 2),) * 3, is_causal=True),
    "masked": lambda x: attend(*(x.repeat(1, 3)[:6, :16].reshape(1, 6, 4, 4).transpose(1, 2),) * 3, attn_mask=SEEN),
    "shared heads": lambda x: attend(
        x[:6].reshape(1, 6, 4, 2).transpose(1, 2), *(x[:6, :4].reshape(1, 6, 2, 2).transpose(1, 2),) * 2, is_causal=True
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_operators_compute_what_torch_computes_forwards_and_backwards(name: str) -> None:
    x = (0.5 * draw(8, 8)).requires_grad_()
    with OperatorLog(lambda: True) as log:
        answer = CALLS[name](x)
        fixed_sum(answer.flatten()).backward()
    judged = [call for call in log.calls if judge(call)]
    assert judged, "numpy has none of these"


def judge(call: Operator) -> bool:
    found = numpy_results(call)
    if found is None:
        return False
    for mine, theirs in zip(found, call.outputs, strict=False):
        torch.testing.assert_close(mine.to(theirs.dtype), theirs, msg=lambda text: f"{call.name}: {text}")
    return True


def test_every_operator_is_compared_with_torch() -> None:
    seen: set[str] = set()
    for build in CALLS.values():
        x = (0.5 * draw(8, 8)).requires_grad_()
        with OperatorLog(lambda: True) as log:
            fixed_sum(build(x).flatten()).backward()
        seen |= {call.name.split(".")[1].rstrip("_") for call in log.calls}
    # Operators that only some devices run, or other versions of torch.
    assert OPERATORS.keys() - seen <= {"baddbmm", "_fused_rms_norm", "reciprocal", "relu", "square"}, seen
