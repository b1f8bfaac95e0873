"""Reads the rows, prompts and validation questions of a run, and reports problems and remarks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.data.array_store import item_digests, sequences
from lockstep.data.dataset import Dataset, RowRequest, load_rows, open_sources, rows_taken
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.prompt_rows import (
    COLUMNS,
    PromptRows,
    PromptSet,
    find_question_columns,
    load_prompts,
    read_questions,
)
from lockstep.data.sources.read import read_rows
from lockstep.data.sources.user_reader import UserReader
from lockstep.data.streaming import stream_rows
from lockstep.data.updates import row_sizes, sequence_counts
from lockstep.errors import Problem, Refusal, refuse_all, shortened
from lockstep.kernels.rotary import fixed_length
from lockstep.methods import METHODS
from lockstep.model.load import load_config
from lockstep.model.resolve import image_folder
from lockstep.model.text_model import text_config
from lockstep.preflight.batch_plan import UNLIMITED, memory_loader, prompt_limit, row_limit
from lockstep.preflight.model_checks import refuse_placeholders
from lockstep.preflight.prepared import Context, problems_of
from lockstep.recipe import Recipe, Source
from lockstep.recipe.method_checks import reference_folder, reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES
from lockstep.reward.row_rewards import read_by_rewards
from lockstep.reward.rules import rule_for, rule_named, unmatched_rules
from lockstep.reward.scorer import recipe_weights
from lockstep.rollout.collect import encode_questions, prompt_format
from lockstep.rollout.native.native_engine import refuse_moving_positions
from lockstep.types import Example, Prompt, Question

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Reading.


def unreadable_files(context: Context) -> Iterator[Problem]:
    """Reports problems of the data files. This check runs if rows cannot be encoded, so that problems of the files are
    reported together with that problem."""
    data = context.recipe.data
    for source in (*data.train, *data.val):
        yield from problems_of(read_rows, source.path, reader=UserReader.of(data), sample_by=data.sample_by)


def read_limit(context: Context) -> None:
    """Sets the maximum length of a row or prompt. Refuses length limits that contradict each other."""
    context.limit = (prompt_limit if context.online else row_limit)(context.recipe, context.config)


def read_training(context: Context) -> None:
    """Reads and encodes the training rows or prompts."""
    if context.online:
        context.train = _encoded_prompts(context)
    elif context.recipe.data.streaming:
        context.train = _streamed_rows(context)
    else:
        context.train = _encoded_rows(context, context.recipe.data.taken, "training")


def read_validation(context: Context) -> None:
    """Reads and encodes the validation rows."""
    context.val = _encoded_rows(context, context.recipe.data.val, "validation")


def read_questions_of(context: Context) -> None:
    if context.tokenizer is not None:  # else the run is refused
        context.questions = validation_questions(context.recipe, context.tokenizer)


def _fields_read(recipe: Recipe) -> frozenset[str]:
    """Returns the fields of a row that the rewards or the environment read. An environment gets all columns."""
    interactive = recipe.rollout.interactive or recipe.val.environment is not None or recipe.val.agent is not None
    return read_by_rewards(recipe.reward, environment=recipe.rollout.gives_rewards) | (
        {COLUMNS} if interactive else frozenset()
    )


def _encoded_prompts(context: Context) -> PromptSet:
    data = context.recipe.data
    reward_fields = _fields_read(context.recipe)
    if data.streaming:
        if context.limit == UNLIMITED:
            raise Refusal.at(
                "data.max_prompt_tokens",
                "must be set with data.streaming: the longest prompt is unknown, and the model's configuration has no "
                "context length",
                "set it to the longest prompt that may be trained",
                code="not-set",
            )
        reader = partial(PromptRows, reward_fields=reward_fields)  # data.streaming is refused with model.vision
        check = partial(_prompt_problems, context)
        request = RowRequest(PromptSet, reader, data.train, data, context.tokenizer, context.limit)
        return stream_rows(request, check)
    opened = open_sources(data.taken, data)
    with context.console.task("Encoding prompts", sum(map(rows_taken, data.taken, opened))) as task:
        return load_prompts(
            data.taken,
            data,
            context.tokenizer,
            context.limit,
            task.advance,
            opened,
            reward_fields=reward_fields,
            images=image_folder(context.recipe.model),
        )


def _encoded_rows(context: Context, sources: list[Source], name: str) -> Dataset[Any]:
    data, reader = context.recipe.data, METHODS[context.recipe.method].reader(context.recipe)
    opened = open_sources(sources, data)
    request = RowRequest(Dataset, reader, sources, data, context.tokenizer, context.limit)
    with context.console.task(f"Encoding {name} rows", sum(map(rows_taken, sources, opened))) as task:
        return load_rows(request, task.advance, opened)


def _streamed_rows(context: Context) -> Dataset[Any]:
    data, reader = context.recipe.data, METHODS[context.recipe.method].reader(context.recipe)
    check = partial(_row_problems, context)
    return stream_rows(RowRequest(Dataset, reader, data.train, data, context.tokenizer, context.limit), check)


def validation_questions(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> list[Question]:
    """Reads the validation questions of `val.questions`. Raises Refusal for questions without a scoring rule."""
    if recipe.val.questions is None:
        return []
    paths = [recipe.val.questions] if isinstance(recipe.val.questions, str) else recipe.val.questions
    online, reader = recipe.method in ONLINE, UserReader.of(recipe.data)
    questions: list[Question] = []
    folder = image_folder(recipe.model)
    for path in paths:
        rows = read_rows(path, reader=reader, sample_by=recipe.data.sample_by)
        columns = None
        if online:
            # The questions of an online run use the columns and settings of its prompts.
            finder = ColumnFinder(Source(path=path), recipe.data, rows.columns)
            columns = find_question_columns(finder, _fields_read(recipe))
        images = None if folder is None else RowImages(folder, tokenizer, path)
        questions += read_questions(rows, recipe.val.question_rows, columns, images=images)
    if not online:
        # An online run scores the questions with its rewards, which are checked separately.
        for source, rule in recipe.val.rules.items():
            rule_named(rule, f"val.rules.{source}")
        sources = sorted({question.data_source for question in questions})
        refuse_all(unmatched_rules(recipe.val.rules, sources, "val.rules"))
        for source in sources:
            rule_for(source, recipe.val.rules, "val.rules")
    return questions


# Checks.


def long_questions(context: Context) -> list[Problem]:
    """Reports questions whose answers could exceed the model's context or the engine's cache."""
    recipe, text = context.recipe, text_config(context.config)
    max_positions = getattr(text, "max_position_embeddings", None)
    if not context.questions or max_positions is None:
        return []
    prompts = encode_questions(
        context.tokenizer, context.questions, recipe.data.system, prompt_format(recipe), image_folder(recipe.model)
    )
    longest_prompt = max(prompts, key=lambda prompt: len(prompt.ids))
    prompt_tokens = len(longest_prompt.ids)
    longest = prompt_tokens + recipe.val.max_new_tokens
    if longest > max_positions:
        why = f"{recipe.val.max_new_tokens} and the {prompt_tokens} tokens of the longest question"
        return [
            Problem(
                "val.max_new_tokens",
                f"{why} ({longest_prompt.question.origin}) exceed the model's context of {max_positions}",
                "lower it" if prompt_tokens < max_positions else "leave the question out",
                code="over-context",
            )
        ]
    if not ENGINES[recipe.rollout.engine].paged:
        return []
    return problems_of(refuse_moving_positions, text, longest, context.config.model_type, "val.max_new_tokens")


def method_rows(context: Context) -> Iterator[Problem]:
    """Reports problems that the training method finds when it checks all rows together."""
    for key, rows in context.row_sets.items():
        problems, remarks = METHODS[context.recipe.method].check(context.recipe, rows, key)
        context.remarks += remarks
        yield from problems


def oversized_rows(context: Context) -> Iterator[Problem]:
    """Reports rows with several sequences (such as preference pairs) that the loss needs in one micro-batch but that do
    not fit into a micro-batch."""
    for rows in context.row_sets.values():
        yield from _oversized(context.recipe, rows.items)


def _oversized(recipe: Recipe, items: Sequence[Any]) -> list[Problem]:
    tokens, context_parallel = recipe.line_tokens, recipe.parallel.context_parallel
    if tokens is None:
        return []
    counts, sizes = sequence_counts(items), row_sizes(items, packed=True, shared=context_parallel == 1)
    problems = [
        Problem(
            str(items[number].origin),
            f"its {counts[number]} sequences have {sizes[number]} tokens together, more than "
            f"batch.tokens={recipe.batch.tokens}"
            + (f" on each of {context_parallel} devices" if context_parallel > 1 else ""),
            "raise batch.tokens, or lower data.max_tokens and choose data.overlong",
            code="over-batch-tokens",
        )
        for number in np.flatnonzero((counts > 1) & (sizes > tokens)).tolist()
    ]
    return shortened(problems, "rows")


def _row_problems(context: Context, items: Sequence[Any]) -> Iterator[Problem]:
    """Checks the streamed rows of an update like the rows of a data set in memory."""
    yield from _oversized(context.recipe, items)
    examples = ((example.origin, example.ids) for example in sequences(items))
    yield from refuse_placeholders(context.config, examples)
    if context.recipe.batch.tokens is not None:
        yield from shared_and_moving(items, *_row_configs(context))


def _prompt_problems(context: Context, prompts: Sequence[Any]) -> Iterator[Problem]:
    """Checks the streamed prompts of a step like the prompts of a data set in memory."""
    yield from refuse_placeholders(context.config, ((one.question.origin, one.ids) for one in prompts))
    weights, _ = recipe_weights(context.recipe)
    if "rule" in weights:
        for name in sorted({prompt.question.data_source for prompt in prompts}):
            yield from problems_of(partial(rule_for, name, context.recipe.reward.rules))


def placeholder_tokens(context: Context) -> Iterator[Problem]:
    """Reports text rows and prompts with a placeholder token for images or audio."""
    if context.online:
        prompts = (prompt for source in context.prompts.sources for prompt in source)
        texts = ((prompt.question.origin, _text_ids(prompt)) for prompt in prompts)
        yield from refuse_placeholders(context.config, texts)
        return
    for rows in context.row_sets.values():
        examples = ((example.origin, _text_ids(example)) for example in sequences(rows.items))
        yield from refuse_placeholders(context.config, examples)


def _text_ids(example: Example | Prompt) -> Sequence[int]:
    """Returns the tokens of an example or prompt without the placeholders of its images."""
    if not example.images:
        return example.ids
    inside = {place for image in example.images for place in range(image.start, image.stop)}
    return [token for place, token in enumerate(example.ids) if place not in inside]


def moving_row_positions(context: Context) -> Iterator[Problem]:
    """Reports rows for which packing would produce wrong rotary positions in the policy or the reference."""
    configs = _row_configs(context)
    for rows in context.row_sets.values():
        yield from shared_and_moving(rows.items, *configs)


def _row_configs(context: Context) -> list[Any]:
    """Returns the configurations of the models that read the rows: the policy, and the reference if it is another
    model."""
    recipe = context.recipe
    configs = [context.config]
    if reference_kind(recipe) in ("model", "disk") and reference_folder(recipe) != recipe.model.path:
        configs.append(load_config(reference_folder(recipe)))
    return configs


def shared_and_moving(items: Sequence[Any], *configs: Any) -> list[Problem]:
    """Reports long rows whose packed sequences share a prefix, if the rotary positions of a model depend on the
    sequence length."""
    lengths = [(fixed_length(text_config(config)), config) for config in configs]
    moving = [(fixed, config) for fixed, config in lengths if fixed is not None]
    if not moving:
        return []
    fixed, config = min(moving, key=lambda pair: pair[0])
    longest = row_sizes(items, packed=False)
    problems = [
        Problem(
            str(items[number].origin),
            f"{longest[number]} tokens: over {fixed} tokens all positions of {config.model_type} depend on the length "
            "of a sequence (longrope or dynamic rotary embedding), and packed sequences of a row share their prefix",
            "set batch.micro_batch_size instead of batch.tokens, or lower data.max_tokens",
            code="rotary-limit",
        )
        for number in np.flatnonzero((sequence_counts(items) > 1) & (longest > fixed)).tolist()
    ]
    return shortened(problems, "rows")


def reward_rules(context: Context) -> Iterator[Problem]:
    """Reports missing reward weights, data sources without a reward rule, and reward rules without a data source."""
    recipe = context.recipe
    weights, problems = recipe_weights(recipe)
    yield from problems
    if "rule" not in weights:
        return
    prompts = (prompt for source in context.prompts.sources for prompt in source)
    questions: Iterable[Question] = [*context.questions, *(prompt.question for prompt in prompts)]
    sources = sorted({question.data_source for question in questions})
    for name in sources:
        yield from problems_of(partial(rule_for, name, recipe.reward.rules))
    yield from unmatched_rules(recipe.reward.rules, sources)


# Remarks.


def repeated_rows(recipe: Recipe, read: Dataset[Any] | PromptSet) -> list[str]:
    """Returns a remark if an update contains some rows several times because there are too few rows."""
    key, name = ("batch.prompts", "prompts") if isinstance(read, PromptSet) else ("batch.rows_per_update", "rows")
    if read.streamed:
        return []
    taken, different = memory_loader(recipe, read).different()
    if different == taken:
        return []
    rows = sum(len(source) for source in read.sources)
    cause = f"there are {rows:,}" if rows < taken else "a source is too small for its weight in an update"
    return [
        f"some {name} appear several times in one update: of its {taken:,} only {different:,} are different, because "
        f"{cause}; lower {key}, or add {name}"
    ]


def seen_in_training(train: Sequence[Any], held_out: Sequence[Any], key: str) -> list[str]:
    """Returns a remark if validation rows are also training rows."""
    both = int(np.isin(item_digests(held_out), item_digests(train)).sum())
    if not both:
        return []
    return [
        f"{key}: {both:,} of {len(held_out):,} rows are also in data.train, with the same tokens: metrics on them "
        "do not measure generalization"
    ]


def longest_row(recipe: Recipe, rows: Dataset[Any]) -> int:
    """Returns the number of tokens that the longest row takes in a micro-batch."""
    packed, shared = recipe.batch.tokens is not None, recipe.parallel.context_parallel == 1
    if rows.streamed:
        # The length of streamed rows is unknown, so each sequence of a row is assumed to have the maximum length.
        most = rows.limit * int(sequence_counts(rows.items).max())
        return min(most, recipe.line_tokens or most)
    sizes = row_sizes(rows.items, packed=packed, shared=shared)
    return int((sizes if packed else sizes * sequence_counts(rows.items)).max())
