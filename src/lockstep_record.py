"""Records a training loop of any framework as a lockstep tape. This file needs only torch (2.1 or newer).

    from lockstep_record import record

    with record(model, optimizer, "tape-old"):
        train()

Copy this file to the training machine, and copy the recorded folder back. With the copied folder, run `lockstep compare
tape-old tape-new` or `lockstep replay tape-old --model MODEL`. docs/recorder.md lists what is recorded and what is not.

An update ends with `optimizer.step()`. Each rank records its own tape. If a parameter is sharded, the tape has only the
shard of this rank. Recording does not change the training, with one exception: in a snapshot that traces modules,
autograd may sum gradients in a different order, which changes their rounding. If recording fails, training continues,
and a warning and `tape.json` report the error.
"""

from __future__ import annotations

import ctypes
import inspect
import json
import math
import os
import platform
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatch
from functools import lru_cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

__all__ = ["MicroBatch", "Recorder", "digest", "record", "write_tensors"]

# The constants of the tape format that lockstep/tape reads.
VERSION, LEARNER, ROOT = 1, "train", "(root)"
BLOCKS, SKETCH, MARKS = 8, 4, 8
SAMPLED, STACKED = 64, 64
# If `weights` is not set, snapshots contain the weights of models with up to this many parameters.
KEPT_PARAMETERS = 16_000_000
# `CHUNK` is the number of elements that `digest` processes at a time. `MOST` is the maximum number of elements of a
# module's input or output that are digested; later rows are ignored.
CHUNK = MOST = 2**22
# Parameters with more elements than this are not sampled, because the random indices would differ between versions of
# torch.
LARGEST_SAMPLED = 2**28
# For each dtype, the maximum relative size of the part of the logits' gradient that does not come from
# log-probabilities (see `_read_slopes`).
EXACT = {torch.float16: 3e-2, torch.bfloat16: 3e-2}
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
COARSER = ("fp32", "fp16", "bf16")
SHORT_NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16"}
# Matches the parts of module names that wrappers such as FSDP add.
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)\.")
# Matches the names of module inputs that are not recorded: no module computes them, and library versions pass them in
# different ways.
PASSED_ALONG = re.compile(r"mask|position|cache|past|cos$|sin$")

Digested = tuple  # digest, shape, dtype
Places = tuple[torch.Tensor, torch.Tensor]  # for each target: its row of the flattened logits, and its token id
Guard = Callable[[Callable[..., Any]], Callable[..., Any]]


def record(model: torch.nn.Module, optimizer: Any = None, folder: Any = "tape", **settings: Any) -> Recorder:
    """Records all updates inside the `with` block to `folder`, or to `folder/rank_N` if there are several ranks.

    `model` is the trained module, wrapped or not. If `optimizer` is None, the recorder finds the optimizer of the model
    at its first step, for trainers that create the optimizer themselves. Settings: `steps` is the number of updates to
    record (default: 100). With `every=10`, the first and then every tenth update is a snapshot with details. `modules`
    are name patterns of the modules to trace (`()` traces none). `weights` says whether snapshots contain weights and
    optimizer states; by default they do up to 16 million parameters. `temperature` is the number by which the trainer
    divides the logits. `first_step` is the step number of the first update.
    """
    return Recorder(model, optimizer, folder, **settings)


# --- Digests: the same numbers as in lockstep/tape/digest.py, computed in float64 on the CPU.


@torch.no_grad()
def digest(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a digest of 60 numbers: four statistics, projections of eight blocks of rows, and profiles of columns and
    rows."""
    rows_RC = tensor.detach().reshape(-1, 1) if tensor.ndim < 2 else tensor.detach().flatten(0, -2)
    rows, columns = rows_RC.shape
    run = max(1, -(-rows // BLOCKS))
    sketch_BS = torch.zeros(BLOCKS, SKETCH, dtype=torch.float64)
    sum_C, square_C = (torch.zeros(columns, dtype=torch.float64) for _ in range(2))
    square_R, largest = torch.zeros(rows, dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    step = max(1, CHUNK // max(1, columns))
    for start in range(0, rows if columns else 0, step):
        part = rows_RC[start : start + step].cpu().double()
        end = start + len(part)
        projected = (part @ _signs(columns, 1)) * _signs(rows, 2)[start:end]
        sketch_BS.index_add_(0, torch.arange(start, end) // run, projected)
        squares = part.square()
        sum_C += part.sum(0)
        square_C += squares.sum(0)
        square_R[start:end] = squares.sum(1)
        largest = torch.maximum(largest, part.abs().max())
    norm, mean = square_R.sum().sqrt(), sum_C.sum() / max(1, rows * columns)
    bad = (~torch.isfinite(norm.float())).double()
    marks_C = _signs(columns, 3, MARKS)
    profiles = sum_C @ marks_C, square_C @ marks_C, square_R @ _signs(rows, 4, MARKS)
    return torch.cat([torch.stack([norm, mean, largest, bad]), sketch_BS.flatten(), *profiles]).float()


@lru_cache(maxsize=64)
def _signs(count: int, seed: int, each: int = SKETCH) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1_000_003 * seed + count)
    return torch.randint(0, 2, (count, each), generator=generator).double() * 2 - 1


@lru_cache(maxsize=256)
def _sampled(count: int) -> torch.Tensor:
    """Returns the indices of the recorded elements of a parameter, as in lockstep/tape/tape_recorder.py."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, count, (min(SAMPLED, count),), generator=generator)


def _pick(tensor: torch.Tensor) -> torch.Tensor:
    tensor = _local(tensor)
    return tensor.take(_sampled(tensor.numel()).to(tensor.device)).cpu().float()


def _local(tensor: Any) -> torch.Tensor:
    """Returns the shard of the tensor on this rank."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _cut(tensor: torch.Tensor) -> torch.Tensor:
    """Returns only the first rows of a large tensor. The number of rows depends only on the shape, so two recordings
    keep the same rows."""
    if tensor.numel() <= MOST or tensor.ndim < 2:
        return tensor
    return tensor.detach().flatten(0, -2)[: max(1, MOST // tensor.shape[-1])]


# --- Writes safetensors files without the package safetensors.


def write_tensors(path: str, tensors: Mapping[str, torch.Tensor], info: Mapping[str, Any], small: int = 0) -> None:
    """Writes a safetensors file atomically. Tensors of the same shape with up to `small` elements are stacked, and the
    metadata lists their names."""
    by_shape: dict[Any, list[str]] = {}
    for name, tensor in tensors.items():
        by_shape.setdefault((tuple(tensor.shape), tensor.dtype), []).append(name)
    groups = [names for (shape, _), names in by_shape.items() if math.prod(shape) <= small and len(names) > 1]
    stacks = {f"stack/{number}": names for number, names in enumerate(groups)}
    content = dict(tensors)
    for stack, names in stacks.items():
        content[stack] = torch.stack([content.pop(name).detach().cpu() for name in names])
    header: dict[str, Any] = {"__metadata__": {"lockstep": json.dumps({**info, "stacks": stacks} if stacks else info)}}
    offset, written = 0, []
    for name, tensor in content.items():
        tensor = tensor.detach().cpu().contiguous()
        size = tensor.numel() * tensor.element_size()
        offsets = [offset, offset + size]
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        written.append((tensor, size))
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    aside = os.path.join(os.path.dirname(path), f".writing-{os.path.basename(path)}")
    with open(aside, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor, size in written:
            if size:  # reads the memory directly, because torch may be installed without numpy
                file.write((ctypes.c_char * size).from_address(tensor.data_ptr()))
    os.replace(aside, path)


# --- Module traces.


class _Tracer:
    """Traces the first micro-batch of a snapshot: digests of the inputs and outputs of every module, forward and
    backward."""

    def __init__(self, root: torch.nn.Module, patterns: Sequence[str], guarded: Guard, alive_BT: torch.Tensor | None):
        self.guarded = guarded
        # The positions that are not padding. Padding is excluded, because kernels may compute any values there.
        self.alive_BT = None if alive_BT is None or bool(alive_BT.all()) else alive_BT.bool()
        self.clock, self.forwards, self.dtype = 0, True, "fp32"
        self.events: list[dict[str, Any]] = []
        self.tensors: dict[str, torch.Tensor] = {}
        self.opened: dict[str, list[tuple[int, list[Digested]]]] = {}
        self.arrived: dict[str, list[tuple[int, Digested]]] = {}
        self.cache: OrderedDict[Any, tuple[torch.Tensor, Digested]] = OrderedDict()
        self.handles: list[Any] = []
        for name, module in root.named_modules():
            public = _public(name)
            if module is not root and any(fnmatch(public, pattern) for pattern in patterns):
                self.handles += [
                    module.register_forward_pre_hook(guarded(self._before(public)), with_kwargs=True),
                    module.register_forward_hook(guarded(self._after(public)), with_kwargs=True),
                ]

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.cache.clear()

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def _before(self, name: str) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
            if not self.forwards:
                return None  # a later micro-batch, or a recomputation by gradient checkpointing
            names = _names_of(module.forward)
            named = [names[i] if i < len(names) else "rest" for i in range(len(args))]
            seen: list[Digested] = []
            entered = self.tick()
            given = tuple(self._enter(name, key, value, seen) for key, value in zip(named, args))
            kwargs = {key: self._enter(name, key, value, seen) for key, value in kwargs.items()}
            self.opened.setdefault(name, []).append((entered, seen))
            return given, kwargs

        return hook

    def _enter(self, name: str, key: str, value: Any, seen: list[Digested]) -> Any:
        if not isinstance(value, torch.Tensor) or not value.numel() or PASSED_ALONG.search(key):
            return value
        seen.append(self.of(value))
        return self._aliased(value, lambda gradient: self._left_backwards(name, gradient))

    def _after(self, name: str) -> Callable[..., Any]:
        def hook(module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not self.forwards or not self.opened.get(name):
                return
            entered, seen = self.opened[name].pop()
            given = [value for value in _parts(output) if value.is_floating_point() and value.numel()]
            self.store(name, type(module).__name__, "forward", entered, seen, [self.of(value) for value in given])

            def arrives(gradient: torch.Tensor) -> None:
                self.arrived.setdefault(name, []).append((self.tick(), self.of(gradient)))

            # Outputs get no alias, because trainers may change logits in place, and a hook on a view would then be
            # lost.
            for value in given:
                if value.requires_grad:
                    value.register_hook(self.guarded(arrives))

        return hook

    def _aliased(self, tensor: torch.Tensor, then: Callable[[torch.Tensor], None]) -> torch.Tensor:
        """Returns a separate alias of an input, so that the gradient of the alias contains only the contribution of
        this module."""
        if not (tensor.requires_grad and tensor.is_floating_point()):
            return tensor
        alias = tensor.view_as(tensor)
        alias.register_hook(self.guarded(then))
        return alias

    def _left_backwards(self, name: str, gradient: torch.Tensor) -> None:
        came = self.arrived.get(name, [])
        entered = came[-1][0] if came else self.tick()
        self.store(name, "", "backward", entered, [one for _, one in came], [self.of(gradient)])

    def of(self, tensor: torch.Tensor) -> Digested:
        """Returns the digest of a tensor. If an output is also the input of the next module, its digest is computed
        once."""
        self.dtype = max(self.dtype, SHORT_NAMES.get(tensor.dtype, "fp32"), key=COARSER.index)
        key = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor._version)
        if key not in self.cache:
            part = _cut(self._without_padding(_local(tensor)))
            # The tensor is kept alive, so that its address is not reused.
            self.cache[key] = tensor, (digest(part), list(part.shape), str(tensor.dtype).replace("torch.", ""))
            if len(self.cache) > 8:
                self.cache.popitem(last=False)
        return self.cache[key][1]

    def _without_padding(self, tensor: torch.Tensor) -> torch.Tensor:
        alive_BT = self.alive_BT
        if alive_BT is None or alive_BT.ndim != 2:
            return tensor
        if tensor.ndim > 2 and tensor.shape[:2] == alive_BT.shape:
            return tensor[alive_BT.to(tensor.device)]
        if tensor.ndim == 2 and len(tensor) == alive_BT.numel():
            return tensor[alive_BT.flatten().to(tensor.device)]
        return tensor

    def store(
        self, name: str, kind: str, phase: str, entered: int, inputs: list[Digested], outputs: list[Digested]
    ) -> None:
        left, both = self.tick(), [*inputs, *outputs]
        event = {"module": name, "kind": kind, "phase": phase, "entered": entered, "left": left}
        counts = {"inputs": len(inputs), "outputs": len(outputs)}
        self.events.append({**event, **counts, "shapes": [one[1] for one in both], "dtypes": [one[2] for one in both]})
        for side, digests in (("input", inputs), ("output", outputs)):
            for i, one in enumerate(digests):
                self.tensors[f"{phase}/{left:05d}/{side}/{i}"] = one[0]


def _names_of(forward: Any) -> tuple[str, ...]:
    return _parameter_names(getattr(forward, "__func__", forward))  # a cached bound method would keep its module alive


@lru_cache(maxsize=1024)
def _parameter_names(function: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(name for name in inspect.signature(function).parameters if name != "self")
    except (TypeError, ValueError):
        return ()


def _public(name: str) -> str:
    return WRAPPERS.sub("", name + ".")[:-1] or ROOT


def _parts(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = list(output.values()) if isinstance(output, Mapping) else output
    return [value for value in values if isinstance(value, torch.Tensor)] if isinstance(values, (tuple, list)) else []


# --- Records the inputs of the model and its log-probabilities.


class MicroBatch:
    """One call of the model. `inputs` are the integer tensors and `arguments` the numbers and strings that the model is
    called with. `answers` are the log-probabilities of all tokens except the first of each sequence, or the values of a
    value model. `pulls` are the gradients of the loss with respect to `answers`."""

    def __init__(self, inputs: dict[str, torch.Tensor], arguments: dict[str, Any], left_out: Sequence[str] = ()):
        self.inputs, self.arguments, self.left_out = inputs, arguments, left_out
        self.answers: torch.Tensor | None = None
        self.pulls: torch.Tensor | None = None
        self.exact, self.reached = False, False
        self.locate(None)

    def locate(self, logits: torch.Tensor | None) -> bool:
        """Finds the sequences without padding, their target tokens, and the row of the logits for each target. Returns
        False if there are no usable logits."""
        ids = self.inputs.get("input_ids")
        self.ids = self.lengths = self.targets = self.tokens = self.index = torch.zeros(0, dtype=torch.int64)
        self.asked = torch.zeros((0, 2), dtype=torch.int64)
        if ids is None or ids.ndim != 2 or not ids.numel():
            return False
        width = ids.shape[1]
        mask, positions = self.inputs.get("attention_mask"), self.inputs.get("position_ids")
        alive = torch.ones_like(ids) if mask is None or mask.shape != ids.shape else mask
        valid = alive.reshape(-1).nonzero().flatten()
        new = torch.ones(len(valid), dtype=torch.bool)
        new[1:] = valid[1:] // width != valid[:-1] // width
        if positions is not None and positions.shape == ids.shape:  # a packed sequence starts at position 0
            counted = positions.reshape(-1)[valid]
            new[1:] |= counted[1:] != counted[:-1] + 1
        owner, count = new.long().cumsum(0) - 1, int(new.sum())
        self.ids, self.lengths = ids.reshape(-1)[valid], torch.bincount(owner, minlength=count)
        self.targets = torch.zeros(count, dtype=torch.int64)
        if logits is None or logits.ndim != 3 or len(logits) != len(ids):
            return False
        length, wide = logits.shape[1], logits.shape[2]
        first, value = width - length, wide == 1  # some trainers compute only the last logits
        if first < 0 or (not value and wide <= int(ids.max())):
            return False
        place = torch.arange(len(valid)) - (self.lengths.cumsum(0) - self.lengths)[owner]
        is_target = (valid % width) >= first
        if not value:
            is_target &= torch.cat([~new[1:], torch.zeros(min(1, len(new)), dtype=torch.bool)])
        at = is_target.nonzero().flatten()
        self.tokens = self.ids[at if value else at + 1]
        self.asked = torch.stack([place[at], self.tokens], 1)
        self.targets = torch.bincount(owner[at], minlength=count)
        self.index = valid[at] // width * length + valid[at] % width - first
        return True

    def read(self, logits: torch.Tensor | None, temperature: float, guarded: Guard) -> None:
        """Reads the model outputs for the targets, and registers a hook that reads the gradients of these outputs."""
        if not self.locate(logits) or logits is None:
            return
        here = self.index.to(logits.device), self.tokens.to(logits.device)
        flat, value = logits.detach().reshape(-1, logits.shape[2]), logits.shape[2] == 1
        self.answers = (flat[here[0], 0].float() if value else logprobs(flat, *here, temperature)).cpu()
        if logits.requires_grad:
            read = self._read_values if value else self._read_slopes
            logits.register_hook(guarded(lambda gradient: read(flat, gradient.detach(), here, temperature)))

    def _read_values(self, flat: torch.Tensor, gradient: torch.Tensor, here: Places, temperature: float) -> None:
        self.reached = self.exact = True
        self.pulls = gradient.reshape(-1)[here[0]].float().cpu()

    @torch.no_grad()
    def _read_slopes(self, flat: torch.Tensor, gradient: torch.Tensor, here: Places, temperature: float) -> None:
        """Computes the gradient of the loss with respect to each log-probability (the slope) from the gradient at the
        logits. If the loss depends only on log-probabilities, the gradient at the logits is slope * (onehot - p) /
        temperature. The function solves this equation for the slope. If the part of the gradient that does not fit this
        equation is larger than `EXACT` allows, the loss depends on more than log-probabilities (for example on an
        entropy bonus), or the temperature is wrong."""
        self.reached = True
        # Some trainers divide the logits by the temperature in place. If a trainer changes the logits in another way,
        # the slopes cannot be computed.
        errors = {scale: _off(logprobs(flat, *here, scale), self.answers) for scale in (1.0, temperature)}
        divided = min(errors, key=lambda scale: errors[scale])
        if not errors[divided] <= (5e-2 if flat.dtype in EXACT else 1e-4):
            return
        gradient = gradient.reshape(-1, gradient.shape[-1])
        total = float(torch.linalg.vector_norm(gradient, dtype=torch.float32)) ** 2
        pulls, left, reached = [torch.zeros(0)], 0.0, 0.0
        for index, token in _chunks(*here, flat.shape[1]):
            p, g = torch.softmax(flat[index].float() / divided, -1), gradient[index].float()
            p_token = p.gather(1, token[:, None])[:, 0]
            along = g.gather(1, token[:, None])[:, 0] - (g * p).sum(1)
            slope = along / (1 - 2 * p_token + p.square().sum(1)).clamp(min=1e-12)
            away = g + slope[:, None] * p
            away.scatter_add_(1, token[:, None], -slope[:, None])
            left += float(away.square().sum())
            reached += float(g.square().sum())
            pulls.append((slope * temperature).cpu())
        self.pulls = torch.cat(pulls)
        # The last logits of a sequence have no target, so a gradient there is also not explained by log-probabilities.
        left += max(0.0, total - reached * (1 + 1e-5))
        self.exact = left <= EXACT.get(gradient.dtype, 1e-3) ** 2 * total


def _chunks(index: torch.Tensor, token: torch.Tensor, width: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    step = max(1, 2**24 // max(1, width))
    for start in range(0, len(index), step):
        yield index[start : start + step], token[start : start + step]


def logprobs(flat: torch.Tensor, index: torch.Tensor, token: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns the fp32 log-probabilities of the tokens `token` at the rows `index` of the flattened logits."""
    found = [
        torch.log_softmax(flat[rows].float() / temperature, -1).gather(1, tokens[:, None])[:, 0]
        for rows, tokens in _chunks(index, token, flat.shape[1])
    ]
    return torch.cat(found) if found else flat.new_zeros(0, dtype=torch.float32)


def _off(a: torch.Tensor, b: torch.Tensor | None) -> float:
    return math.inf if b is None else float((a.cpu() - b).square().mean().sqrt()) if len(b) else 0.0


# --- The recorder.


class Recorder:
    """The context manager that `record` returns. `log` adds the trainer's metrics to the last update."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        folder: Any,
        *,
        steps: int = 100,
        every: int = 10,
        modules: Sequence[str] = ("*",),
        weights: bool | None = None,
        temperature: float = 1.0,
        first_step: int = 1,
    ):
        self.model, self.root, self.given = model, _unwrapped(model), optimizer
        while getattr(self.given, "optimizer", None) is not None:  # unwraps accelerate, DeepSpeed, Megatron
            self.given = self.given.optimizer
        self.steps, self.every, self.modules, self.temperature = steps, every, tuple(modules), temperature
        self.step = self.first_step = first_step
        self.rank, self.world_size = _ranks()
        self.folder = os.path.join(str(folder), f"rank_{self.rank}") if self.world_size > 1 else str(folder)
        self.parameters = {_public(n): p for n, p in self.root.named_parameters() if p.requires_grad}
        self.parameter_ids = {id(parameter) for parameter in self.parameters.values()}
        count = sum(parameter.numel() for parameter in self.parameters.values())
        self.keeps_weights = count <= KEPT_PARAMETERS if weights is None else weights
        self.dtype = self.weights_dtype = _coarsest(self.parameters.values())
        self.handles: list[Any] = []
        self.patched: list[tuple[Any, str, Any, bool]] = []
        self.notes: dict[str, str] = {}
        self.optimizer: Any = None
        self.stopped: str | None = None
        self.metrics: dict[str, float] | None = None
        self.clipped: float | None = None
        self.depth = 0
        self._begin()

    def __enter__(self) -> Recorder:
        if os.path.exists(os.path.join(self.folder, "tape.json")):
            raise FileExistsError(f"{self.folder} already holds a tape: use another folder, or remove the tape")
        os.makedirs(self.folder, exist_ok=True)
        try:
            self._hook()
        except BaseException:
            self._unhook()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._unhook()
        self._drop_tracer()
        self._write_metrics()
        self._write_manifest()

    def _hook(self) -> None:
        self.handles += [
            self.root.register_forward_pre_hook(self._guarded(self._forward), with_kwargs=True),
            self.root.register_forward_hook(self._guarded(self._forwarded), with_kwargs=True),
        ]
        self._hook_optimizer()
        self._patch(torch.autograd, "backward", self._backward)
        self._patch(torch.nn.utils, "clip_grad_norm_", self._clip)
        if hasattr(self.model, "clip_grad_norm_"):  # FSDP has its own clipping method
            self._patch(self.model, "clip_grad_norm_", self._clip_sharded)

    def _unhook(self) -> None:
        for handle in self.handles:
            handle.remove()
        for owner, name, before, inherited in reversed(self.patched):
            if inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self.handles, self.patched = [], []

    def log(self, values: Mapping[str, Any] | None = None, **more: Any) -> None:
        """Adds metrics of the trainer to the last update. `lockstep compare` compares the curves of logged metrics."""
        if self.metrics is not None:
            self.metrics.update({name: float(value) for name, value in {**(values or {}), **more}.items()})

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a hook so that training continues if recording fails. The error is reported once and written to the
        tape."""

        def guarded(*args: Any) -> Any:
            if self.stopped is not None or self.step >= self.first_step + self.steps:
                return None
            try:
                return call(*args)
            except Exception as error:  # noqa: BLE001
                self.stopped = f"update {self.step}: {type(error).__name__}: {error}"
                self._drop_tracer()
                warnings.warn(f"lockstep_record stopped recording at {self.stopped}", RuntimeWarning, stacklevel=2)
                return None

        return guarded

    def _patch(self, owner: Any, name: str, call: Callable[..., Any]) -> None:
        before = getattr(owner, name)
        self.patched.append((owner, name, before, name not in vars(owner)))
        setattr(owner, name, lambda *args, **kwargs: call(before, *args, **kwargs))

    def _hook_optimizer(self) -> None:
        before, after = self._guarded(self._before_step), self._guarded(self._after_step)
        if self.given is None:
            self.handles += [
                register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: before(optimizer)),
                register_optimizer_step_post_hook(lambda optimizer, args, kwargs: after(optimizer)),
            ]
        elif isinstance(self.given, torch.optim.Optimizer):
            self.handles += [
                self.given.register_step_pre_hook(lambda optimizer, args, kwargs: before(optimizer)),
                self.given.register_step_post_hook(lambda optimizer, args, kwargs: after(optimizer)),
            ]
        else:

            def step(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
                before(self.given)
                answer = original(*args, **kwargs)
                after(self.given)
                return answer

            self._patch(self.given, "step", step)

    # Forward and backward.

    def _begin(self) -> None:
        self.pending: list[MicroBatch] = []
        self.tracer: _Tracer | None = None
        self.traced: MicroBatch | None = None
        self.tensors: dict[str, torch.Tensor] = {}
        self.loss: float | None = None
        self.norm: Any = None
        self.clip: float | None = None
        self.had_gradients = False

    @property
    def detailed(self) -> bool:
        return (self.step - self.first_step) % self.every == 0

    def _forward(self, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if not torch.is_grad_enabled() or self.depth:
            return
        if self.had_gradients and not any(p.grad is not None for p in self.parameters.values()):
            self._note("discarded", f"gradients were cleared without an optimizer step before update {self.step}")
            self._drop_tracer()
            self._begin()
        given = {**dict(zip(_names_of(module.forward), args)), **kwargs}
        if args and "input_ids" not in given:
            given["input_ids"] = args[0]
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        integers = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items() if not t.is_floating_point()}
        plain = {name: value for name, value in given.items() if isinstance(value, (bool, int, float, str))}
        plain["training"] = module.training
        self.pending.append(MicroBatch(integers, plain, sorted(set(tensors) - set(integers))))
        if self.detailed and self.modules and self.tracer is None:
            ids, self.traced = integers.get("input_ids"), self.pending[-1]
            self.tracer = _Tracer(self.root, self.modules, self._guarded, integers.get("attention_mask"))
            self.tracer.opened[ROOT] = [(self.tracer.tick(), [] if ids is None else [self.tracer.of(ids)])]
        self._note_dropout()

    def _forwarded(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if not torch.is_grad_enabled() or self.depth or not self.pending:
            return
        logits = _logits_of(output)
        tracer = self.tracer if self.traced is self.pending[-1] else None
        if tracer is not None and tracer.forwards:
            entered, seen = tracer.opened[ROOT].pop()
            given = [] if logits is None else [tracer.of(logits)]
            tracer.store(ROOT, type(module).__name__, "forward", entered, seen, given)
            tracer.forwards = False
        self.pending[-1].read(logits, self.temperature, self._guarded)

    def _backward(self, original: Callable[..., Any], tensors: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.depth:
            self._guarded(self._backed)(tensors)
        self.depth += 1
        try:
            return original(tensors, *args, **kwargs)
        finally:
            self.depth -= 1
            if not self.depth and not self.had_gradients:
                self.had_gradients = any(p.grad is not None for p in self.parameters.values())

    def _backed(self, tensors: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        if self.pending and all(one.numel() == 1 for one in roots):
            self.loss = (self.loss or 0.0) + sum(float(one.detach()) for one in roots)

    def _clip(self, original: Callable[..., Any], parameters: Any, max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ours = any(id(parameter) in self.parameter_ids for parameter in parameters)
        if ours:
            self._guarded(self._take_gradients)()
        norm = original(parameters, max_norm, *args, **kwargs)
        if ours:
            self.norm, self.clip = norm, float(max_norm)
        return norm

    def _clip_sharded(self, original: Callable[..., Any], max_norm: Any, *args: Any, **kwargs: Any) -> Any:
        self._guarded(self._take_gradients)()
        self.norm, self.clip = original(max_norm, *args, **kwargs), float(max_norm)
        return self.norm

    # The optimizer's step.

    def _before_step(self, optimizer: Any) -> None:
        if self.given is None and not any(
            id(p) in self.parameter_ids for g in optimizer.param_groups for p in g["params"]
        ):
            return
        self.optimizer = optimizer
        gradients = self._gradients()
        if self.norm is None:
            norms = [torch.linalg.vector_norm(_local(g), dtype=torch.float32).cpu() for g in gradients.values()]
            self.norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        if not self.detailed:
            return
        self._take_gradients()
        if self.keeps_weights:
            self._write_weights()
        for name in gradients:
            weight = self.parameters[name]
            self._keep(f"start/{name}", digest(_local(weight)))
            if self._few(weight):
                state = self._state(weight)
                self._keep(f"sample/{name}/before", _pick(weight))
                self._keep(f"sample/{name}/count", torch.as_tensor(float(state.get("step", 0.0))))
                for key in ("exp_avg", "exp_avg_sq"):
                    if key in state:
                        self._keep(f"sample/{name}/{key}", _pick(state[key]))

    def _gradients(self) -> dict[str, torch.Tensor]:
        found = {}
        for name, parameter in self.parameters.items():
            gradient = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
            if gradient is not None and _local(gradient).numel():
                found[name] = gradient
        if len(found) < len(self.parameters):
            missing = len(self.parameters) - len(found)
            self._note("gradients", f"{missing} of {len(self.parameters)} parameters had no gradient on this rank")
        return found

    def _take_gradients(self) -> None:
        """Records the gradients before clipping. If the recorder cannot see the clipping, it records the gradients
        before the optimizer step."""
        if not self.detailed or any("/gradient" in name for name in self.tensors):
            return
        exact = self._by_formula()
        for name, gradient in self._gradients().items():
            weight = self.parameters[name]
            self._keep(f"gradient/{name}", digest(_local(gradient)))
            if exact and self._few(weight) and weight.dtype == torch.float32:
                self._keep(f"sample/{name}/gradient", _pick(gradient))

    def _by_formula(self) -> bool:
        """Returns whether the optimizer is AdamW with the same settings for all parameters, so that a replay can
        compute its update."""
        optimizer = self.given or self.optimizer
        if not isinstance(optimizer, (torch.optim.AdamW, torch.optim.Adam)):
            return False
        groups = optimizer.param_groups
        coupled = not isinstance(optimizer, torch.optim.AdamW) and any(group["weight_decay"] for group in groups)
        alike = {(float(group["lr"]), tuple(map(float, group["betas"])), group["eps"]) for group in groups}
        return not coupled and len(alike) == 1 and not any(g.get("amsgrad") or g.get("maximize") for g in groups)

    def _few(self, weight: torch.Tensor) -> bool:
        return 0 < _local(weight).numel() < LARGEST_SAMPLED

    def _state(self, weight: torch.Tensor) -> dict[str, Any]:
        return getattr(self.optimizer, "state", {}).get(weight, {})

    def _keep(self, name: str, value: torch.Tensor) -> None:
        self.tensors[f"{LEARNER}/0/{name}"] = value

    def _after_step(self, optimizer: Any) -> None:
        if self.optimizer is not optimizer:
            return
        started = f"{LEARNER}/0/start/"
        for name in [name[len(started) :] for name in self.tensors if name.startswith(started)]:
            weight = self.parameters[name]
            self._keep(f"weights/{name}", digest(_local(weight)))
            if self._few(weight):
                self._keep(f"sample/{name}/after", _pick(weight))
        self._write_step([one for one in self.pending if one.reached] or self.pending)
        if self.step == self.first_step:
            self._write_manifest()
        self.step += 1
        self._drop_tracer()
        self._begin()

    def _drop_tracer(self) -> None:
        if self.tracer is not None:
            self.tracer.close()
            self.tracer = None

    def _note(self, key: str, text: str) -> None:
        self.notes.setdefault(key, text)

    def _note_dropout(self) -> None:
        if "dropout" in self.notes:
            return
        dropped = any(isinstance(module, torch.nn.Dropout) and module.p > 0 for module in self.root.modules())
        config: Any = getattr(self.root, "config", None)
        if self.root.training and (dropped or bool(getattr(config, "attention_dropout", False))):
            self._note("dropout", "dropout is on: another device has different dropout masks")

    # Files.

    def _write_step(self, micros: Sequence[MicroBatch]) -> None:
        tensors = {**self.tensors, **_fed(micros)}
        update: dict[str, Any] = {"learner": LEARNER, "divisor": 1.0, "micro_batches": len(micros), "clip": self.clip}
        update["targets"] = len(tensors["fed/asked"])
        groups = getattr(self.optimizer, "param_groups", None)
        values = {"loss": self.loss, "grad_norm": self.norm, "lr": groups[0]["lr"] if groups else None}
        update.update({name: float(value) for name, value in values.items() if value is not None})
        answers = [one.answers for one in micros if one.answers is not None]
        pulls = [one.pulls for one in micros if one.pulls is not None]
        if answers and len(answers) == len(micros):
            tensors[f"{LEARNER}/0/answers"] = torch.cat(answers)
            if len(pulls) == len(micros):
                tensors[f"{LEARNER}/0/pulls"] = torch.cat(pulls)
            update["slopes_exact"] = len(pulls) == len(micros) and all(one.exact for one in micros)
        else:
            self._note("log-probs", "the output of the model has no logits over the vocabulary")
        for one in micros:
            if one.left_out:
                self._note("inputs", f"{', '.join(one.left_out)}: floating-point inputs of the model are not recorded")
        info: dict[str, Any] = {"carried": {}, "updates": [update], "calls": [one.arguments for one in micros]}
        if self.tracer is not None and self.traced in micros:
            self.dtype = max(self.dtype, self.tracer.dtype, key=COARSER.index)
            # A tape of this recorder has only one rank, so the rank of its trace is always 0.
            info["probe"] = {"traces": [{"learner": LEARNER, "rank": 0, "events": self.tracer.events}]}
            tensors.update({f"probe/{LEARNER}/0/{name}": value for name, value in self.tracer.tensors.items()})
        self.clipped = self.clip
        self._write_metrics()
        curves = {f"train/{name}": update[name] for name in values if name in update}
        self.metrics = {"step": self.step, **curves}
        write_tensors(os.path.join(self.folder, f"step_{self.step:06d}.safetensors"), tensors, info, STACKED)

    def _write_weights(self) -> None:
        tensors = {f"{LEARNER}/model/{name}": _local(weight) for name, weight in self.parameters.items()}
        for name, weight in self.parameters.items():
            for key, value in self._state(weight).items():
                if key in ("exp_avg", "exp_avg_sq", "step"):
                    tensors[f"{LEARNER}/optimizer/{key}/{name}"] = _local(torch.as_tensor(value)).float()
        write_tensors(os.path.join(self.folder, f"weights_{self.step:06d}.safetensors"), tensors, {})

    def _write_metrics(self) -> None:
        """Writes the metrics of the last update, after which no more metrics can be added to it."""
        if self.metrics is not None:
            with open(os.path.join(self.folder, "metrics.jsonl"), "a", encoding="utf-8") as file:
                file.write(json.dumps(self.metrics) + "\n")
            self.metrics = None

    def _write_manifest(self) -> None:
        device = next((parameter.device for parameter in self.parameters.values()), torch.device("cpu"))
        config = getattr(self.root, "config", None)
        model = {
            "dtype": self.dtype,
            "weights": self.weights_dtype,
            "path": str(getattr(config, "_name_or_path", "") or ""),
            "kind": type(self.root).__name__,
            "master_weights": False,
        }
        recorder = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": str(device),
            "chip": _chip(device),
            "rank": self.rank,
            "sharded": [name for name, weight in self.parameters.items() if _is_sharded(weight)],
            "notes": self.notes,
            "stopped": self.stopped,
            "temperature": self.temperature,
            "first_step": self.first_step,
            "every": self.every,
        }
        values = {
            "version": VERSION,
            "recorder": recorder,
            "recipe": {"method": "recorded", "model": model, "optim": self._optim()},
            "world_size": self.world_size,
            "parameters": {LEARNER: {name: list(_local(p).shape) for name, p in self.parameters.items()}},
        }
        path = os.path.join(self.folder, "tape.json")
        with open(path + ".writing", "w", encoding="utf-8") as file:
            json.dump(values, file, indent=2)
        os.replace(path + ".writing", path)

    def _optim(self) -> dict[str, Any]:
        groups = getattr(self.optimizer, "param_groups", None) or [{}]
        decays = {id(p): float(group.get("weight_decay") or 0.0) for group in groups for p in group.get("params", [])}
        return {
            "kind": type(self.optimizer).__name__,
            "by_formula": self._by_formula(),
            "betas": list(map(float, groups[0].get("betas", (0.9, 0.999)))),
            "eps": float(groups[0].get("eps", 1e-8)),
            "weight_decay": float(groups[0].get("weight_decay") or 0.0),
            "decays": {name: decays[id(p)] for name, p in self.parameters.items() if id(p) in decays},
            "clip": self.clipped,
        }


def _unwrapped(model: Any) -> torch.nn.Module:
    """Returns the module inside the wrappers of DDP, FSDP, DeepSpeed or Megatron."""
    while isinstance(getattr(model, "module", None), torch.nn.Module) and len(list(model.children())) == 1:
        model = model.module
    return model


def _ranks() -> tuple[int, int]:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def _coarsest(parameters: Iterable[torch.Tensor]) -> str:
    return max((SHORT_NAMES.get(one.dtype, "fp32") for one in parameters), key=COARSER.index, default="fp32")


def _chip(device: torch.device) -> str:
    module: Any = getattr(torch, device.type, None)
    return module.get_device_name(device) if hasattr(module, "get_device_name") else platform.machine()


def _is_sharded(parameter: Any) -> bool:
    return hasattr(parameter, "to_local") or hasattr(parameter, "ds_id") or "FlatParameter" in type(parameter).__name__


def _logits_of(output: Any) -> torch.Tensor | None:
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if found is None:
        found = next((value for value in _parts(output) if value.ndim == 3), None)
    return found if isinstance(found, torch.Tensor) and found.is_floating_point() else None


def _fed(micros: Sequence[MicroBatch]) -> dict[str, torch.Tensor]:
    """Returns the inputs of all calls of the model, and their sequences without padding."""
    found = {f"micro/{i}/{name}": _small(value) for i, one in enumerate(micros) for name, value in one.inputs.items()}
    for name, tail in (("ids", ()), ("lengths", ()), ("asked", (2,)), ("targets", ())):
        parts = [getattr(one, name) for one in micros]
        found[f"fed/{name}"] = (torch.cat(parts) if parts else torch.zeros((0, *tail))).to(torch.int32)
    return found


def _small(tensor: torch.Tensor) -> torch.Tensor:
    """Converts 64-bit integers to 32 bits if all values fit."""
    fits = tensor.dtype == torch.int64 and tensor.numel() and int(tensor.abs().max()) < 2**31
    return tensor.to(torch.int32) if fits else tensor
