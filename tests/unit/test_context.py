"""Context parallelism without processes: who has which tokens, ranks as threads, and what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig, MistralConfig, PreTrainedConfig

from context_ranks import SIZES, Case, check_attention, full_attention
from draws import draws
from lockstep.data.batching import micro_batch, own_part
from lockstep.data.updates import arrange
from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.kernels.attention.layout import make_layout
from lockstep.kernels.attention.partial import PLAIN
from lockstep.kernels.attention.partial_attention import merge, sections
from lockstep.kernels.attention.varlen import varlen_attention
from lockstep.kernels.logprob import Scores
from lockstep.model.policy import Policy
from lockstep.parallel.all_gather_attention import GatheredLayout, _GatheredAttention
from lockstep.parallel.context import ContextGroup
from lockstep.parallel.context_split import LAYOUTS, PLACES, Division, refuse_undivided
from lockstep.parallel.ring_attention import RingLayout, _RingAttention
from lockstep.parallel.world import World, refuse_ranks
from lockstep.preflight.batch_plan import OnlinePlan
from lockstep.preflight.memory_plan import plan_memory
from lockstep.preflight.model_sizes import activation_bytes, head_bytes
from lockstep.recipe import load_recipe
from lockstep.types import Example, MicroBatch, Origin, Ranking
from recipe_files import keys, refused, write
from thread_group import on_every_rank

LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=7).map(tuple)
RANKS = st.integers(2, 5)


def group(rank: int, ranks: int, layout: str) -> ContextGroup:
    return ContextGroup(rank, ranks, layout, tuple(range(ranks)))


@given(LENGTHS, RANKS, st.sampled_from(sorted(PLACES)))
def test_every_token_is_on_one_rank(lengths: tuple[int, ...], ranks: int, layout: str) -> None:
    places = PLACES[layout](lengths, ranks)
    assert torch.cat(places).sort().values.tolist() == list(range(sum(lengths)))


def test_zigzag_gives_every_rank_as_much_to_do() -> None:
    """Two chunks of 8 and 3 tokens: by hand, rank 0 of 2 has the first and the last quarter of each sequence."""
    first, second = PLACES["zigzag"]((8, 3), 2)
    assert first.tolist() == [0, 1, 6, 7, 10]  # 3 tokens in quarters: 0, 1, 1 and 1 of them
    assert second.tolist() == [2, 3, 4, 5, 8, 9]
    work = [float((place + 1).sum()) for place in PLACES["zigzag"]((4000,), 4)]
    assert max(work) / min(work) < 1.001


def examples(lengths: tuple[int, ...]) -> list[Example]:
    """Tokens of their own each, so that a target tells where it belongs; the third of every four is not trained."""
    rows, first = [], 1
    for number, length in enumerate(lengths):
        ids = list(range(first, first + length))
        rows.append(Example(ids, [int(i % 4 != 2) for i in range(length)], Origin("rows", number)))
        first += length
    return rows


@given(LENGTHS, RANKS, st.sampled_from(sorted(PLACES)), st.booleans())
def test_tokens_keep_what_they_predict(lengths: tuple[int, ...], ranks: int, layout: str, packed: bool) -> None:
    """The target of a token is the one after it on the whole line, on whichever rank that one is."""
    batch = micro_batch(examples(lengths), packed=packed, pad_id=0)
    parts = []
    for rank in range(ranks):
        divided = replace(batch, context=Division(batch, group(rank, ranks, layout)))
        part = own_part(divided)
        own = part.input_ids_NT[0]
        assert len(own) > 0
        assert torch.equal(own[part.predictors_K] + 1, part.targets_K)
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0) + 1
        sequence = torch.bucketize(own, starts, right=True) - 1
        # Rotary positions are those in the whole sequence; 0 is the token of a sequence of nothing.
        assert torch.equal(part.position_ids_NT[0][own > 0], (own - starts[sequence])[own > 0])
        parts.append(part)
    index = torch.cat([part.index_K for part in parts])
    assert index.sort().values.tolist() == list(range(len(batch.targets_K)))
    assert torch.equal(torch.cat([part.targets_K for part in parts]), batch.targets_K[index])


SHAPES = st.sampled_from([(4, 4, 8, 8), (4, 2, 8, 8), (4, 1, 4, 6), (12, 3, 4, 4), (12, 6, 4, 4)])


@settings(max_examples=draws(25, 60))
@given(LENGTHS, st.sampled_from([2, 3, 4]), st.sampled_from(sorted(LAYOUTS)), SHAPES, st.integers(0, 99), st.data())
def test_divided_attention_is_whole_attention(
    lengths: tuple[int, ...], ranks: int, layout: str, shape: tuple[int, int, int, int], seed: int, data: Any
) -> None:
    """Outputs and gradients, in fp64 to 1e-14 of the largest number and in fp32 to 1e-5."""
    if layout == "ulysses" and shape[0] % ranks:
        ranks = 2
    case = Case(lengths, *shape, sinks=data.draw(st.booleans()))
    if layout != "zigzag":
        case = replace(case, window=data.draw(st.sampled_from([None, 1, 4])))
    if layout == "ulysses":
        case = replace(case, softcap=data.draw(st.sampled_from([None, 1.5])))
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]))
    on_every_rank(ranks, layout, lambda one: check_attention(case, one, dtype, seed))


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_a_gradient_is_counted_once(layout: str) -> None:
    """All ranks have all numbers in their order and the same loss of them; each gets the gradient of its own alone."""
    batch = micro_batch(examples((9, 2, 7)), packed=True, pad_id=0)
    numbers_K = torch.randn(len(batch.targets_K), generator=torch.Generator().manual_seed(0))

    def work(one: ContextGroup) -> None:
        division = Division(batch, one)
        own_K = numbers_K[division.local_part(batch).index_K].clone().requires_grad_()
        scores = division.gather_outputs(Scores(own_K, 2 * own_K))
        assert torch.equal(scores.logprobs_K, numbers_K)
        assert torch.equal(scores.entropies_K, 2 * numbers_K)
        assert scores.divergences_K is None
        scores.logprobs_K.sum().square().backward()
        assert own_K.grad is not None
        assert torch.allclose(own_K.grad, 2 * numbers_K.sum().expand_as(own_K))

    on_every_rank(3, layout, work)


def test_parts_are_merged_by_their_sums() -> None:
    """By hand: scores 0 and log 3 give shares of 1/4 and 3/4."""
    query, value = torch.ones(1, 1, 1, dtype=torch.float64), torch.tensor([[[8.0]], [[4.0]]], dtype=torch.float64)
    key = torch.tensor([[[0.0]], [[3.0]]], dtype=torch.float64)
    key[1] = key[1].log()
    where = sections([1], [1], False, query.device)
    parts = [PLAIN.forward(query, key[i : i + 1], value[i : i + 1], where, 1.0) for i in range(2)]
    out, lse = merge(*parts[0], *parts[1])
    assert out.item() == pytest.approx(8 / 4 + 4 * 3 / 4, abs=1e-14)
    assert lse.exp().item() == pytest.approx(4, abs=1e-14)


class Kept:
    """In the place of autograd's context: on one device, autograd would run the ranks' backward passes one by one."""

    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device")
@pytest.mark.parametrize("layout", ["zigzag", "gather"])
@pytest.mark.parametrize("lengths", [(1,), (700,), (5, 1, 300, 64, 1, 129)])
def test_flash_attention_in_parts_is_as_near_as_whole(layout: str, lengths: tuple[int, ...]) -> None:
    """bf16 on the device, four ranks as threads: from fp64 no further than flash attention over the whole line."""
    device, case, scale = torch.device("cuda"), Case(lengths, 8, 2, 64, 64), 0.3
    total, ranks = sum(lengths), 4
    torch.manual_seed(0)
    shapes = [(total, 8, 64), (total, 2, 64), (total, 2, 64), (total, 8, 64)]
    *whole, upstream = (torch.randn(shape).bfloat16() for shape in shapes)
    exact = [tensor.double().requires_grad_() for tensor in whole]
    wanted = full_attention(*exact, torch.zeros(8), case)
    wanted.backward(upstream.double())
    wants = [wanted.detach(), *(tensor.grad for tensor in exact)]

    leaves = [tensor.to(device).requires_grad_() for tensor in whole]
    at_once = varlen_attention(*leaves, make_layout(lengths, device, "flash_varlen"), scale=scale)
    at_once.backward(upstream.to(device))
    usual = [at_once.detach(), *(leaf.grad for leaf in leaves)]

    def work(one: ContextGroup) -> tuple[torch.Tensor, list[torch.Tensor]]:
        batch = replace(micro_batch([Example([1] * total, [1] * total, Origin("rows", 0))], packed=True, pad_id=0))
        division = Division(replace(batch, lengths=lengths), one)
        filler, own_T = sum(division.lengths) - total, division.local_T
        mine = [torch.cat([t, t.new_zeros(filler, *t.shape[1:])])[own_T].to(device) for t in (*whole, upstream)]
        placed, kept = division.layout(device, "flash_varlen"), Kept()
        if isinstance(placed, RingLayout):
            out = _RingAttention.forward(kept, *mine[:3], None, placed, scale)
            gradients = _RingAttention.backward(kept, mine[3])[:3]
        else:
            assert isinstance(placed, GatheredLayout)
            out = _GatheredAttention.forward(kept, *mine[:3], None, placed, scale, None)
            gradients = _GatheredAttention.backward(kept, mine[3])[:3]
        return own_T, [out, *gradients]  # type: ignore[list-item]

    found = on_every_rank(ranks, layout, work)
    for number, (want, other) in enumerate(zip(wants, usual, strict=True)):
        assert want is not None
        assert other is not None
        joined = torch.empty_like(other, device="cpu")
        for own_T, tensors in found:
            real = own_T < total
            joined[own_T[real]] = tensors[number].cpu()[real]
        off, allowed = (float((one.cpu().double() - want).norm()) for one in (joined, other))
        assert off <= 1.5 * allowed + 1e-3 * float(want.norm()), (number, off, allowed, float(want.norm()))


def test_pairs_that_are_divided_share_no_beginning() -> None:
    pair = Ranking((Example([1, 2, 3, 4], [0, 0, 1, 1], Origin("r", 0)), Example([1, 2, 5], [0, 0, 1], Origin("r", 0))))
    alone = arrange([pair], World(), tokens=7, rows=None, pad_id=0).batches[0]
    assert alone.packed_index_E is not None
    assert alone.input_ids_NT.shape[1] == 5
    world = World(1, 2, context=group(1, 2, "zigzag"))
    (batch,) = arrange([pair], world, tokens=7, rows=None, pad_id=0).batches
    assert batch.packed_index_E is None
    assert batch.input_ids_NT.tolist() == [[1, 2, 3, 4, 1, 2, 5]]
    with pytest.raises(NotImplementedError, match="share"):
        Division(alone, group(0, 2, "zigzag"))


def test_ranks_of_a_group_have_the_same_rows() -> None:
    rows = examples((5, 9, 3, 4, 8))
    shares: list[list[MicroBatch]] = []
    for rank in range(4):
        world = World(rank, 4, context=group(rank % 2, 2, "gather"))
        shares.append(arrange(rows, world, tokens=20, rows=None, pad_id=0).batches)
    origins = [[batch.origins for batch in share] for share in shares]
    assert origins[0] == origins[1]
    assert origins[2] == origins[3]
    every = [origin for share in (origins[0], origins[2]) for batch in share for origin in batch]
    assert sorted(origin.row for origin in every) == list(range(5))


def loaded(config: PreTrainedConfig) -> Policy:
    register_attention()
    return Policy(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION), "sdpa")


@pytest.mark.parametrize(
    ("config", "ranks", "refusals"),
    [
        (LlamaConfig(**SIZES), 2, {}),
        (LlamaConfig(**SIZES), 3, {"ulysses": "4 heads"}),
        (MistralConfig(**SIZES, sliding_window=6), 2, {"zigzag": "window of 6 tokens"}),
        (Gemma2Config(**SIZES, sliding_window=600), 2, {"zigzag": "window of 600 tokens", "gather": "soft cap of 50"}),
        (LlamaConfig(**SIZES, attention_dropout=0.1), 2, {"zigzag": "dropout of 0.1", "gather": "dropout of 0.1"}),
    ],
)
def test_attention_that_a_layout_cannot_do_is_refused(
    config: PreTrainedConfig, ranks: int, refusals: dict[str, str]
) -> None:
    policy = loaded(config)
    for layout in LAYOUTS:
        if layout not in refusals:
            refuse_undivided(policy, group(0, ranks, layout), "folder")
            continue
        with pytest.raises(Refusal, match=refusals[layout]) as caught:
            refuse_undivided(policy, group(0, ranks, layout), "folder")
        assert caught.value.problems[0].where.startswith("parallel.context")
    refuse_undivided(policy, None, "folder")


def test_processes_that_do_not_divide_are_refused() -> None:
    refuse_ranks(2, 4)
    with pytest.raises(Refusal, match="3 process"):
        refuse_ranks(2, 3)


def test_the_plan_counts_the_tokens_of_one_device(tmp_path: Path) -> None:
    """Eight rows of 100 tokens are 800 on one device, and 400 on each of two that divide them."""
    recipe, config = write(tmp_path), LlamaConfig(**SIZES)
    for context, tokens in ((1, 800), (2, 400)):
        settings = load_recipe(recipe, ["batch.tokens=1000", f"parallel.context_parallel={context}"])
        forward = next(p for p in plan_memory(settings, config, 2, 100, 8).phases if p.name == "forward and backward")
        assert forward.activations == activation_bytes(config, tokens, 4, False) + head_bytes(config, tokens, True)
    groups = OnlinePlan(8, 4, 2, 4, 1, 2, devices=4, tokens=200, longest=100, group=2)
    assert re.findall(r"\d+", groups.lines()[2][1]) == ["1", "8", "2", "2", "2"]


def test_the_budget_of_tokens_is_of_each_device(tmp_path: Path) -> None:
    recipe = write(tmp_path)
    words = ["batch.tokens=100", "data.max_tokens=150"]
    assert keys(refused(recipe, *words)) == {"data.max_tokens"}
    found = load_recipe(recipe, [*words, "parallel.context_parallel=2"])
    assert found.line_tokens == 200
    assert load_recipe(recipe, ["data.max_tokens=10000", "parallel.context_parallel=2"]).batch.tokens == 5000
    assert keys(refused(recipe, "data.max_tokens=201", "batch.tokens=100", "parallel.context_parallel=2")) == {
        "data.max_tokens"
    }
    assert keys(refused(recipe, "tape=true", "parallel.context_parallel=2")) == {"tape"}
