"""Responses of a group on a line with their prompt once: what stands where, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moving_models import longrope
from small_models import SIZES, load, write_model
from transformers import LlamaConfig, MistralConfig

from hand_rollouts import plans_of, recipe_of, rollout
from lockstep.data.batching import MAX_FULL_LENGTHS, Outline, PackedRow, common_prompt, pack_groups, target_starts
from lockstep.data.updates import arrange
from lockstep.device.select import select
from lockstep.parallel.world import World
from lockstep.train.advantages import Advantages, TrainBatch
from lockstep.train.experience import Experience, ModelOutputs, build_experience, compute_model_outputs
from lockstep.train.models import Models, Packing, build_critic, build_learner, build_reference
from lockstep.train.update import update_policy
from lockstep.train.update_terms import update_critic
from lockstep.types import Example, MicroBatch, Origin

CPU = torch.device("cpu")


def answered(prompt: Sequence[int], *answers: Sequence[int]) -> list[Example]:
    return [Example([*prompt, *a], [0] * len(prompt) + [1] * len(a), Origin("rows.jsonl", 0)) for a in answers]


def lines(
    groups: Sequence[Sequence[Example]], tokens: int, world: World | None = None, **more: Any
) -> list[MicroBatch]:
    packing = Packing(world or World(), tokens, None, 0)
    laid = pack_groups(outlines(groups), packing.world.dp_size, tokens=tokens, **more)
    return batches(groups, laid[packing.world.dp_rank], packing)


def outlines(groups: Sequence[Sequence[Example]]) -> list[Outline]:
    return [Outline(number, len(one), common_prompt(group)) for number, group in enumerate(groups) for one in group]


def batches(groups: Sequence[Sequence[Example]], laid: Sequence[PackedRow], packing: Packing) -> list[MicroBatch]:
    examples = [example for group in groups for example in group]
    starts = target_starts(examples)
    return [
        packing.batch(line, [[examples[one.number]] for one in line], [starts[one.number] for one in line])
        for line in laid
    ]


def test_a_line_written_out() -> None:
    """Two prompts. What answers begin with alike is theirs: it was sampled, and every copy is trained."""
    groups = [answered([1, 2, 3], [4, 5], [4, 6], [7]), answered([1, 2], [9, 9])]
    (line,) = lines(groups, 100)
    assert line.input_ids_NT.tolist() == [[1, 2, 3, 4, 5, 4, 6, 7, 1, 2, 9, 9]]
    assert line.position_ids_NT.tolist() == [[0, 1, 2, 3, 4, 3, 4, 3, 0, 1, 2, 3]]
    assert line.lengths == (5, 5, 4, 4)
    assert line.packed_index_E is not None
    assert line.packed_index_E.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 5, 6, 0, 1, 2, 7, 8, 9, 10, 11]
    assert line.targets_K.tolist() == [4, 5, 4, 6, 7, 9, 9]
    assert line.predictors_K.tolist() == [2, 3, 2, 5, 2, 9, 10]
    assert line.index_K.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert line.tokens == 18


def test_a_group_that_does_not_fit_has_its_prompt_on_every_line() -> None:
    group = answered([1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11])
    batches = lines([group], 8)
    assert [batch.input_ids_NT.tolist() for batch in batches] == [[[1, 2, 3, 4, 5, 6, 7]], [[1, 2, 3, 8, 9, 10, 11]]]
    assert [batch.index_K.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ValueError, match=r"row of 5 tokens .* of 4"):
        lines([group], 4)


def test_lines_are_equally_long_and_as_many_on_every_device() -> None:
    """20 responses of 10 after prompts of 4. Lines of 100 hold 8 responses each (88 tokens) and leave 4: three lines,
    here of 4 + 3, 1 + 4 + 1 and 3 + 4 responses. On two devices four lines of 4 + 1, 3 + 2, 2 + 3 and 1 + 4."""
    groups = [answered([g, 0, 0, 0], *[[1] * 10] * 4) for g in range(5)]
    sizes = [batch.input_ids_NT.numel() for batch in lines(groups, 100)]
    assert sorted(sizes) == [72, 78, 78]
    ranks = [lines(groups, 100, World(rank, 2)) for rank in range(2)]
    assert [len(rank) for rank in ranks] == [2, 2]
    assert [batch.input_ids_NT.numel() for rank in ranks for batch in rank] == [58] * 4


def test_long_prompts_do_not_fill_a_line_with_more_than_its_budget_bears_whole() -> None:
    group = answered(range(1, 51), *[[g] for g in range(20)])
    batches = lines([group], 100)
    assert MAX_FULL_LENGTHS == 2
    # Three whole sequences of 51 are within 200 tokens, four are not.
    assert [len(batch.lengths) for batch in batches] == [3, 3, 3, 3, 3, 3, 2]


@settings(max_examples=60)
@given(
    sizes=st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=6), min_size=1, max_size=5),
    tokens=st.integers(24, 80),
    devices=st.integers(1, 3),
)
def test_every_token_is_asked_once_at_its_place(sizes, tokens, devices) -> None:
    """Read back from the lines: each target after exactly the tokens of its own sequence."""
    groups, word = [], 0
    for prompt, *answers in sizes:
        numbers = iter(range(word, word + prompt + sum(answers)))
        word += prompt + sum(answers)
        beginning = [next(numbers) for _ in range(prompt)]
        groups.append(answered(beginning, *([next(numbers) for _ in range(n)] for n in answers)))
    examples = [example for group in groups for example in group]
    wanted = [(list(e.ids[: place + 1]), target) for e in examples for place, target in e.scored_tokens()]
    found: dict[int, tuple[list[int], int]] = {}
    counts = set()
    for rank in range(devices):
        batches = lines(groups, tokens, World(rank, devices))
        counts.add(len(batches))
        for batch in batches:
            assert batch.input_ids_NT.numel() <= tokens
            if not len(batch.targets_K):
                continue
            ids = batch.input_ids_NT[0]
            line = batch.packed_index_E if batch.packed_index_E is not None else torch.arange(len(ids))
            sequences = [part.tolist() for part in line.split(list(batch.lengths))]
            for place, target, index in zip(batch.predictors_K.tolist(), batch.targets_K, batch.index_K, strict=True):
                (mine,) = [s for s in sequences if place in s and int(target) in ids[s].tolist()]
                found[int(index)] = ids[mine[: mine.index(place) + 1]].tolist(), int(target)
    assert len(counts) == 1
    assert [found[i] for i in range(len(wanted))] == wanted


def test_what_a_group_has_in_common() -> None:
    assert common_prompt(answered([1, 2, 3], [4], [4, 5])) == 3
    # Turns of an environment are no prompt: only what stands before the first token of the policy is.
    one, two = answered([1, 2], [3, 4, 5], [3, 4, 6])
    one = Example(one.ids, [0, 0, 1, 0, 1], one.origin)
    assert common_prompt([one, two]) == 2
    # Prompts that were cut differently.
    assert common_prompt([*answered([1, 2, 3], [4]), *answered([1, 2, 9], [4])]) == 2
    assert common_prompt([*answered([1, 2, 3], [4]), *answered([5, 2, 3], [4])]) == 0
    assert common_prompt(answered([1, 2, 3], [4])) == 0


def test_positions_that_move_with_the_length_are_not_shared() -> None:
    groups = [answered([1, 2], [3], [4]), answered([1, 2], [3], [4] * 9)]
    (line,) = lines(groups, 100, alike_up_to=8)
    # 2 + 1 + 1 and 3 + 11.
    assert line.input_ids_NT.numel() == 18
    # The longest sequence has 11 tokens: at that length the prompt is shared.
    (line,) = lines(groups, 100, alike_up_to=11)
    assert line.input_ids_NT.numel() == 16


def test_a_row_is_filled_up_to_its_budget() -> None:
    group = answered([1, 2, 3], [4, 5], [6, 7], [8, 9], [10, 11])
    assert [batch.input_ids_NT.numel() for batch in lines([group], 7)] == [7, 7]
    # Sequences of 51 tokens: four are exactly twice the budget of 102.
    long = answered(range(1, 51), *[[g] for g in range(8)])
    assert [len(batch.lengths) for batch in lines([long], 102)] == [4, 4]


# -- the whole step ----------------------------------------------------------------------------------------------------

MODELS = {
    "full attention": lambda: LlamaConfig(**SIZES),
    "sliding window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "moving positions": lambda: longrope(12),
}
PROMPTS, ANSWERS = (6, 1, 9), ((5, 2, 7, 1), (3, 3), (4, 8, 1))


def made() -> Experience:
    draw = torch.Generator().manual_seed(1)

    def ids(count: int) -> list[int]:
        return torch.randint(1, 256, (count,), generator=draw).tolist()

    every = []
    for index, (prompt, answers) in enumerate(zip(PROMPTS, ANSWERS, strict=True)):
        asked = ids(prompt)
        every += [
            rollout(index, ids(n), float(n % 3), sample=i, prompt=asked, logprobs=[-2.0] * n)
            for i, n in enumerate(answers)
        ]
    return build_experience(every)


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def step(folder: Path, shared: bool, monkeypatch: pytest.MonkeyPatch, **keys: Any) -> dict[str, torch.Tensor]:
    """Old and reference log-probs, values, and both gradients of one update, by name."""
    recipe = recipe_of(str(folder), "ppo", batch__prompts=3, rollout__n=4, **keys)
    where = (select("cpu"), World(), CPU)
    learner = build_learner(recipe, *where)
    critic = build_critic(recipe, *where)
    assert critic is not None
    torch.manual_seed(0)
    torch.nn.init.normal_(critic.module.head.weight)  # type: ignore[union-attr, arg-type]
    models = Models(
        learner.module, Packing.of(recipe, World(), 0), CPU, learner, critic, build_reference(recipe, *where)
    )
    if not shared:
        monkeypatch.setattr(
            Models, "pack", lambda self, some: self.packing.pack([replace(one, shared=0) for one in some], None)
        )
    experience = made()
    (plan,) = plans_of(experience, models, recipe.batch)
    tokens = sum(batch.input_ids_NT.numel() for batch in plan.batches)
    known = compute_model_outputs([plan], models, recipe, lambda name: monkeypatch.context(), torch.zeros(0))
    assert known.old_K is not None
    count = len(experience.sequence_K)
    vectors = torch.randn(2, count, generator=torch.Generator().manual_seed(5))
    advantages = Advantages(torch.zeros(count), *vectors, torch.ones(count), torch.ones(count), {})
    annotated = ModelOutputs(known.old_K - 0.1, known.reference_K, known.values_K)
    learned = TrainBatch(experience, annotated, advantages)
    for each in models.learners:
        monkeypatch.setattr(each, "optim_step", lambda lr: {})
    update_policy(plan, learned, models, recipe, 0.2, 0.0, (0,))
    update_critic(plan, learned, models, recipe, 0.0)
    found = {"old": known.old_K, "reference": known.reference_K, "values": known.values_K}
    named = [(f"{each.name}/{name}", g) for each in models.learners for name, g in gradients(each.module).items()]
    return {"tokens": torch.tensor(tokens), **found, **dict(named)}  # type: ignore[dict-item]


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("tokens", [4096, 20])
def test_a_shared_prompt_changes_nothing(
    kind: str, tokens: int, tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", MODELS[kind](), tiny_folder)
    keys = {"batch__tokens": tokens, "algorithm__entropy": 0.05, "algorithm__kl__where": "loss", "algorithm__epochs": 2}
    with monkeypatch.context() as patch:
        apart = step(folder, False, patch, **keys)
    with monkeypatch.context() as patch:
        shared = step(folder, True, patch, **keys)
    assert apart.pop("tokens") == sum(p * len(a) + sum(a) for p, a in zip(PROMPTS, ANSWERS, strict=True))
    fewer = int(shared.pop("tokens"))
    if tokens == 4096:
        # Of moving positions only the group that stays within the fixed length shares: 1 + 3 + 3.
        saved = 1 if kind == "moving positions" else 6 * 3 + 1 + 9 * 2
        assert fewer == sum(p * len(a) + sum(a) for p, a in zip(PROMPTS, ANSWERS, strict=True)) - saved
    assert apart.keys() == shared.keys()
    for name, wanted in apart.items():
        far = (shared[name] - wanted).abs().max()
        assert far <= 2e-5 * wanted.abs().max() + 1e-7, (name, float(far))


def test_padded_rows_and_single_responses_are_as_ever(tiny_folder: Path) -> None:
    groups = [answered([1, 2], [3], [4, 5]), answered([1, 2], [3])]
    examples = [example for group in groups for example in group]
    packing = Packing(World(), None, 2, 0)
    padded = batches(groups, packing.pack(outlines(groups), None)[0], packing)
    for ours, theirs in zip(padded, arrange(examples, World(), tokens=None, rows=2, pad_id=0).batches, strict=True):
        assert torch.equal(ours.input_ids_NT, theirs.input_ids_NT)
    alone, packing = [groups[0][:1], groups[1]], Packing(World(), 64, None, 0)
    (single,) = batches(alone, packing.pack(outlines(alone), None)[0], packing)
    assert single.packed_index_E is None
    assert load(tiny_folder).alike_up_to is None
