"""Sequences that share their beginning on a packed line: the same numbers as whole sequences, and as each alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import SIZES, load, write_model
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MistralConfig

from draws import draws
from lockstep.data.batching import micro_batch, packed_tokens, shared_beginnings
from lockstep.kernels.attention.flash import cascade_attention
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.partial import PLAIN
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.types import Example, MicroBatch, Origin, Ranking, ScoredExample

CPU = torch.device("cpu")
MODELS = {
    "grouped queries": LlamaConfig(**SIZES),
    "every query its key": LlamaConfig(**{**SIZES, "num_key_value_heads": 4}),
    "sliding window": MistralConfig(**SIZES, sliding_window=5),
    "learned positions": GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=128),
}


def response(prompt: Sequence[int], answer: Sequence[int]) -> Example:
    return Example([*prompt, *answer], [0] * len(prompt) + [1] * len(answer), Origin("rows.jsonl", 0))


def groups() -> list[tuple[Example, ...]]:
    """Everything that may stand on one line, one after the other."""
    draw = torch.Generator().manual_seed(3)

    def words(count: int) -> list[int]:
        return torch.randint(1, 256, (count,), generator=draw).tolist()

    long, short, begun = words(21), words(4), words(7)
    return [
        (response(words(9), words(6)),),
        # The answers begin alike too.
        (response(long, [*begun, *words(5)]), response(long, [*begun, *words(11)])),
        # The rejected one is a beginning of the chosen one, then the other way round.
        (response(short, [*begun, 7, 8]), response(short, begun)),
        (response(short, begun), response(short, [*begun, 7, 8])),
        (response(words(3), words(12)),),
        # A third that shares more with the second than with the first.
        (response(long, [1, 2, 3]), response(long, [9, *begun]), response(long, [9, *begun[:4], 5])),
        # Nothing in common at all, and a single token as prompt.
        (response([17], words(5)), response([18], words(5))),
        (response([17], [4, 4]), response([17], [4, 5])),
    ]


def line_of(items: Sequence[tuple[Example, ...]], *, share: bool) -> MicroBatch:
    examples = [example for item in items for example in item]
    shares = [count for item in items for count in shared_beginnings(item)] if share else None
    return micro_batch(examples, packed=True, pad_id=0, shares=shares)


def test_a_line_with_a_shared_beginning_written_out() -> None:
    """Prompt 1 2, of which both answers go on with 3."""
    pair = (response([1, 2], [3, 4, 5]), response([1, 2], [3, 9]))
    assert shared_beginnings(pair) == [0, 3]
    line = line_of([pair], share=True)
    assert line.input_ids_NT.tolist() == [[1, 2, 3, 4, 5, 9]]
    assert line.position_ids_NT.tolist() == [[0, 1, 2, 3, 4, 3]]
    assert line.packed_index_E is not None
    assert line.packed_index_E.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5]
    assert line.lengths == (5, 4)
    assert line.targets_K.tolist() == [3, 4, 5, 3, 9]
    # The shared 2 predicts both first words, the shared 3 what comes after it on either side.
    assert line.predictors_K.tolist() == [1, 2, 3, 1, 2]
    assert line.index_K.tolist() == [0, 1, 2, 3, 4]


def test_the_last_token_stays_an_examples_own() -> None:
    """A score is read there, and it must not be that of another response."""
    assert shared_beginnings([response([1, 2], [3, 4, 5]), response([1, 2], [3, 4])]) == [0, 3]
    pair = (response([1, 2], [3]), response([1, 2], [3, 4, 5]))
    assert shared_beginnings(pair) == [0, 2]
    scored = tuple(ScoredExample(e.ids, bytes(len(e)), e.origin, positions=(len(e) - 1,)) for e in pair)
    line = line_of([scored], share=True)
    assert line.input_ids_NT.tolist() == [[1, 2, 3, 3, 4, 5]]
    assert line.position_ids_NT.tolist() == [[0, 1, 2, 2, 3, 4]]
    assert line.predictors_K.tolist() == [2, 5]


def test_three_share_with_the_first_and_a_stranger_begins_anew() -> None:
    group = (response([1, 2], [3]), response([1, 2], [4]), response([7, 2], [5]), response([7, 2], [6]))
    assert shared_beginnings(group) == [0, 2, 0, 2]
    line = line_of([(response([9], [9, 9]),), group], share=True)
    assert line.input_ids_NT.tolist() == [[9, 9, 9, 1, 2, 3, 4, 7, 2, 5, 6]]
    assert line.position_ids_NT.tolist() == [[0, 1, 2, 0, 1, 2, 2, 0, 1, 2, 2]]
    assert line.packed_index_E is not None
    assert line.packed_index_E.tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 6, 7, 8, 9, 7, 8, 10]
    assert line.predictors_K.tolist() == [0, 1, 4, 4, 8, 8]


def test_the_line_is_shorter_by_what_is_shared() -> None:
    whole, shared = line_of(groups(), share=False), line_of(groups(), share=True)
    # 21 + 7 of the pair, 4 + 6 and 4 + 6 of the prefixes, 21 and 21 of the three, 0 of the strangers, 1 + 1.
    saved = 28 + 10 + 10 + 42 + 0 + 2
    assert whole.input_ids_NT.numel() - shared.input_ids_NT.numel() == saved
    assert shared.tokens == whole.tokens == whole.input_ids_NT.numel()
    sizes = [packed_tokens(Ranking(item)) for item in groups()]
    assert sum(sizes) == shared.input_ids_NT.numel()


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model") / "model", MODELS[request.param], tiny_folder)


def gradients(model: torch.nn.Module, logprobs: torch.Tensor, upstream: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    (logprobs * upstream).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_transformers(folder: Path, examples: Sequence[Example]) -> tuple[torch.nn.Module, torch.Tensor]:
    """One sequence after another through the library's own attention."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    found = []
    for example in examples:
        ids = torch.tensor([list(example.ids)])
        every = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        found += [every[place, word] for place, word in example.scored_tokens()]
    return model.train(), torch.stack(found)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert (ours[name] - gradient).norm() <= 3e-5 * gradient.norm() + 1e-5, name


def test_logprobs_and_gradients_are_those_of_whole_and_of_lone_sequences(folder: Path) -> None:
    policy, items = load(folder).eval(), groups()
    examples = [example for item in items for example in item]
    upstream = torch.randn(sum(e.targets for e in examples), generator=torch.Generator().manual_seed(0))
    shared = policy(line_of(items, share=True)).logprobs_K
    grads = gradients(policy.model, shared, upstream)
    whole = policy(line_of(items, share=False)).logprobs_K
    torch.testing.assert_close(shared, whole, rtol=1e-4, atol=3e-5)
    assert_same(grads, gradients(policy.model, whole, upstream))
    alone = torch.cat([policy(line_of([(example,)], share=True)).logprobs_K for example in examples])
    torch.testing.assert_close(shared, alone, rtol=1e-4, atol=3e-5)
    assert_same(grads, gradients(policy.model, alone, upstream))
    model, theirs = by_transformers(folder, examples)
    torch.testing.assert_close(shared, theirs, rtol=1e-4, atol=3e-5)
    assert_same(grads, gradients(model, theirs, upstream))


def test_gradient_checkpointing_sees_the_sharing_again(tiny_folder: Path) -> None:
    """The backward pass runs the layers a second time."""
    policy, items = load(tiny_folder), groups()
    line = line_of(items, share=True)
    upstream = torch.linspace(-1, 1, len(line.targets_K))
    plain = gradients(policy.model, policy(line).logprobs_K, upstream)
    policy.causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    assert_same(gradients(policy.model, policy(line).logprobs_K, upstream), plain)


def written_out(query, key, value, lengths, packed_index_E, first_T, scale, window):
    """Softmax attention of whole sequences, one at a time; of copies of one token the first is kept."""
    repeat = query.shape[1] // key.shape[1]
    query, key, value = (rows[packed_index_E] for rows in (query, key, value))
    outputs, start = [], 0
    for length in lengths:
        q = query[start : start + length].transpose(0, 1)
        k = key[start : start + length].repeat_interleave(repeat, 1).transpose(0, 1)
        v = value[start : start + length].repeat_interleave(repeat, 1).transpose(0, 1)
        back = torch.arange(length)[:, None] - torch.arange(length)[None, :]
        seen = (back >= 0) & (back < (window or length))
        weights = (q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")).softmax(-1)
        outputs.append((weights @ v).transpose(0, 1))
        start += length
    return torch.cat(outputs)[first_T]


def shared_line(sizes: Sequence[Sequence[int]]) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Groups as (prompt, answer, answer, ...) lengths: sequence lengths, the line of each token, its first copy."""
    lengths: list[int] = []
    line: list[int] = []
    used = 0
    for prompt, *answers in sizes:
        begun = used
        for number, answer in enumerate(answers):
            own = answer if number else prompt + answer
            line += [*(range(begun, begun + prompt) if number else ()), *range(used, used + own)]
            used += own
            lengths.append(prompt + answer)
    packed_index_E = torch.tensor(line)
    return lengths, packed_index_E, torch.tensor([line.index(place) for place in range(used)])


@settings(max_examples=draws(20, 40))
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=4), min_size=1, max_size=4),
    window=st.sampled_from([None, 1, 4]),
    heads=st.sampled_from([1, 2, 4]),
)
def test_attention_on_a_shared_line_equals_whole_sequences(sizes, window, heads) -> None:
    lengths, packed_index_E, first_T = shared_line(sizes)
    torch.manual_seed(0)
    inputs = [torch.randn(len(first_T), n, 8, dtype=torch.float64, requires_grad=True) for n in (4, heads, heads)]
    layout = make_layout(lengths, CPU, "sdpa", packed_index_E)
    ours = varlen_attention(*inputs, layout, scale=0.3, window=window)
    theirs = written_out(*inputs, lengths, packed_index_E, first_T, 0.3, window)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(max_examples=draws(20, 40))
@given(
    sizes=st.lists(st.lists(st.integers(1, 9), min_size=2, max_size=5), min_size=1, max_size=4),
    heads=st.sampled_from([1, 2, 4]),
)
def test_a_line_in_two_parts_equals_whole_sequences(sizes, heads) -> None:
    """What the flash kernel does on a shared line, with its parts written out in plain torch."""
    lengths, packed_index_E, first_T = shared_line(sizes)
    cascade = make_layout(lengths, CPU, "flash_varlen", packed_index_E).cascade
    assert (cascade is None) == all(len(group) == 2 for group in sizes)
    if cascade is None:
        return
    torch.manual_seed(0)
    inputs = [torch.randn(len(first_T), n, 8, dtype=torch.float64, requires_grad=True) for n in (4, heads, heads)]
    ours = cascade_attention(*inputs, cascade, 0.3, PLAIN)
    theirs = written_out(*inputs, lengths, packed_index_E, first_T, 0.3, None)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(ours)
    for a, b in zip(
        torch.autograd.grad(ours, inputs, upstream), torch.autograd.grad(theirs, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_the_two_parts_of_a_line_written_out() -> None:
    """A prompt of 3 with answers of 2, 4 and 1 tokens, a stranger of 5, and a prompt of 2 with answers of 1 and 3."""
    lengths, packed_index_E, _ = shared_line([[3, 2, 4, 1], [1, 4], [2, 1, 3]])
    cascade = make_layout(lengths, CPU, "flash_varlen", packed_index_E).cascade
    assert cascade is not None
    assert cascade.own.query_bounds.tolist() == cascade.own.key_bounds.tolist() == [0, 5, 9, 10, 15, 18, 21]
    assert (cascade.own.longest_query, cascade.own.longest_key) == (5, 5)
    # The second and the third answer are one sequence of queries on their prompt.
    assert cascade.shared.query_bounds.tolist() == [0, 5, 8]
    assert cascade.shared.key_bounds.tolist() == [0, 3, 5]
    assert (cascade.shared.longest_query, cascade.shared.longest_key) == (5, 3)
    assert cascade.rows_R.tolist() == [5, 6, 7, 8, 9, 18, 19, 20]
    assert cascade.keys_S.tolist() == [0, 1, 2, 15, 16]


def test_a_beginning_that_is_shared_in_part_is_no_cascade() -> None:
    """Two that share 2 and 1 tokens of the first: their keys would be named twice, so sequences are made whole."""
    assert make_layout([4, 3, 3], CPU, "flash_varlen", torch.tensor([0, 1, 2, 3, 0, 1, 4, 0, 5, 6])).cascade is None
    assert make_layout([4, 3], CPU, "flash_varlen").cascade is None


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("window", [None, 16])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_flash_on_a_shared_line_equals_its_twin(window, with_sinks) -> None:
    device = torch.device("cuda")
    lengths, packed_index_E, first_T = shared_line([[70, 33, 60], [1, 5], [130, 1, 90, 20], [4, 2, 2]])
    torch.manual_seed(0)
    inputs = [
        torch.randn(len(first_T), n, 64, device=device, dtype=torch.bfloat16, requires_grad=True) for n in (8, 2, 2)
    ]
    sinks = torch.linspace(-4, 6, 8, device=device, requires_grad=True) if with_sinks else None
    fast, twin = (
        varlen_attention(
            *inputs, make_layout(lengths, device, kernel, packed_index_E), scale=0.125, window=window, sinks_H=sinks
        )
        for kernel in ("flash_varlen", "sdpa")
    )
    inputs += [sinks] * with_sinks
    torch.testing.assert_close(fast, twin, rtol=2e-2, atol=2e-2)
    upstream = torch.randn_like(fast)
    for a, b in zip(
        torch.autograd.grad(fast, inputs, upstream), torch.autograd.grad(twin, inputs, upstream), strict=True
    ):
        assert (a - b).float().norm() <= 2e-2 * b.float().norm()
