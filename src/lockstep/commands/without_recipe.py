"""Loads generator, questions and rewards for commands that have options instead of a recipe; checks the options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.messages import SET_VISION
from lockstep.data.encode.prompt_rows import REWARD_FIELDS, find_question_columns, read_questions
from lockstep.data.sources.read import RowSet
from lockstep.device.base import Device
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.functions import locate
from lockstep.masking import comparable
from lockstep.model.fingerprint import model_files
from lockstep.model.load import load_config
from lockstep.model.load_folder import DTYPES
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import text_config
from lockstep.model.trials import REWARDS, run_trial
from lockstep.parallel.world import World
from lockstep.recipe.keys_data import Data, Source
from lockstep.recipe.keys_reward import Reward
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ENGINES
from lockstep.reward.rules import DEFAULT_RULES, RULES, rule_name
from lockstep.reward.scorer import Scorer, active_weights
from lockstep.rollout.generator import Generator
from lockstep.rollout.native.native_engine import NativeEngine, refuse_moving_positions
from lockstep.run.console import Console
from lockstep.run.files import checksum
from lockstep.types import Failure, Prompt, Question, Rollout
from lockstep.vision.families import FAMILIES
from lockstep.vision.images import has_images

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def refuse_options(dtype: str, n: int, temperature: float) -> None:
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}", code="unknown-name")
    if n > 1 and not temperature:
        raise Refusal.at(
            "--n", f"{n} greedy answers would be identical", "set --temperature too", code="identical-samples"
        )


def as_options(refusal: Refusal, options: Mapping[str, str]) -> Refusal:
    """Returns the `Refusal` with recipe keys in its texts replaced by command options."""

    def renamed(text: str) -> str:
        for key, option in options.items():
            text = text.replace(key, option)
        return text

    return Refusal(
        [Problem(renamed(p.where), renamed(p.why), renamed(p.remedy), code=p.code) for p in refusal.problems]
    )


def refuse_judge(folder: str, model: str) -> None:
    """Rejects a reward model: it has no output head for tokens, so generation would be noise."""
    if any(name.endswith("ForSequenceClassification") for name in load_config(folder).architectures or []):
        why = "is a reward model: it scores answers and does not generate"
        raise Refusal.at(model, why, "use the model with `lockstep eval` or `lockstep serve`", code="wrong-model-kind")


def over_context(prompts: Sequence[Prompt], max_new_tokens: int, config: Any) -> list[Problem]:
    """Returns one problem per prompt that leaves too little room for an answer in the model's context."""
    context = getattr(text_config(config), "max_position_embeddings", None)
    problems: list[Problem] = []
    for prompt in prompts:
        length = len(prompt.ids)
        if context and length + max_new_tokens > context:
            why = f"{length} tokens plus a response of {max_new_tokens} exceed the model's context of {context}"
            less = f"set --max-new-tokens to {context - length} or less, or " if length < context else ""
            problems.append(Problem(str(prompt.question.origin), why, f"{less}remove it", code="over-context"))
    return problems


def refuse_long_answers(prompts: Sequence[Prompt], max_new_tokens: int, folder: str) -> None:
    """Refuses prompts if prompt plus answer may exceed the model's context, before the model is loaded. Also refuses a
    length at which the rotary embedding would change, because cached keys would become invalid."""
    config = load_config(folder)
    refuse_all(over_context(prompts, max_new_tokens, config), "rows")
    longest = max(len(prompt.ids) for prompt in prompts) + max_new_tokens
    refuse_moving_positions(text_config(config), longest, config.model_type, "--max-new-tokens")


def option_images(
    rows: RowSet, first: int, limit: int | None, folder: str, tokenizer: PreTrainedTokenizerBase, path: str
) -> RowImages | None:
    """Returns the reader of images, if the model reads images and a row has some."""
    last = len(rows) if limit is None else min(first + limit, len(rows))
    if load_config(folder).model_type not in FAMILIES or not any(has_images(rows[i]) for i in range(first, last)):
        return None
    return RowImages(folder, tokenizer, path)


def load_generator(
    folder: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str,
    device: Device,
    world: World,
    console: Console,
    settings: RolloutSettings | None = None,
    *,
    images: bool = False,
) -> Generator:
    """Returns a generator with the built-in engine, or with transformers for models that the engine cannot run. Only
    the built-in engine reads images."""
    wanted = settings or RolloutSettings()
    if images and wanted.interactive:
        raise Refusal.at("DATA", "its rows have images", "remove --environment, --tool and --agent", code="not-text")
    try:
        return Generator.load(folder, tokenizer, dtype, device, world, wanted, images=images)
    except Refusal as refusal:
        if images or any(problem.remedy != NativeEngine.instead for problem in refusal.problems):
            raise as_options(refusal, CONVERSATION_OPTIONS) from refusal
        console.say(f"{refusal.problems[0].why}: using the slower generate of transformers instead")
    fallback = next(name for name, row in ENGINES.items() if not row.paged and not row.served)
    return Generator.load(folder, tokenizer, dtype, device, world, wanted.model_copy(update={"engine": fallback}))


@dataclass(frozen=True)
class ConversationOptions:
    """The environment, the tools or the agent of a command, from its options."""

    environment: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    tools: Sequence[str] = ()
    max_turns: int | None = None
    agent: str | None = None

    @property
    def any(self) -> bool:
        return self.gives_rewards or bool(self.tools)

    @property
    def gives_rewards(self) -> bool:
        """Whether the environment or the agent rewards the responses."""
        return self.environment is not None or self.agent is not None

    def settings(self, **more: Any) -> RolloutSettings:
        """Returns the rollout settings. Raises `Refusal` for options that do not fit together."""
        if self.environment is not None and self.tools:
            why = "an environment returns its tools itself"
            raise Refusal.at("--tool", why, "remove --tool or --environment", code="conflicting-keys")
        if self.agent is not None and (self.environment is not None or self.tools):
            other = "--tool" if self.tools else "--environment"
            why = f"and {other} both hold the conversation"
            raise Refusal.at("--agent", why, "remove one of them", code="conflicting-keys")
        unused = {"--environment-arg": bool(self.arguments) and not self.gives_rewards}
        unused["--max-turns"] = self.max_turns is not None and not self.any
        for option, found in unused.items():
            if found:
                others = "" if option == "--environment-arg" else ", --tool"
                needed = f"--environment{others} or --agent"
                raise Refusal.at(option, f"applies only with {needed}", f"set {needed}, or remove it", code="needs-key")
        keys: dict[str, Any] = {
            "environment": self.environment,
            "environment_args": dict(self.arguments),
            "tools": list(self.tools),
            "agent": self.agent,
            **({} if self.max_turns is None else {"max_turns": self.max_turns}),
            **more,
        }
        return RolloutSettings(**keys)

    def identity(self) -> dict[str, Any]:
        """Returns the options that responses depend on, with checksums of files. Empty without a conversation."""
        if not self.any:
            return {}
        return {
            "--environment": None if self.environment is None else _code(self.environment),
            "--environment-arg": dict(self.arguments),
            "--tool": [_code(tool) for tool in self.tools],
            "--max-turns": self.max_turns,
            **({} if self.agent is None else {"--agent": _code(self.agent)}),
        }


NO_CONVERSATIONS = ConversationOptions()
CONVERSATION_OPTIONS = {"rollout.environment": "--environment", "rollout.tools": "--tool", "rollout.agent": "--agent"}


def _code(reference: str) -> dict[str, str] | str:
    """Returns the name and the checksum of code in a file, or the name of installed or built-in code."""
    path, _, name = reference.rpartition(":")
    return {"name": name, "file": checksum(Path(path))} if path.endswith(".py") and Path(path).is_file() else reference


QUESTION_OPTIONS = {
    "data.prompt_key": "--prompt-key",
    "data.label_key": "--label-key",
    SET_VISION: "use a vision-language model",
}


@dataclass(frozen=True)
class NamedColumns:
    """Column names given by options; None means that the column is detected by name."""

    prompt: str | None = None
    label: str | None = None


BY_NAME = NamedColumns()


def read_option_questions(
    rows: RowSet,
    limit: int | None,
    named: NamedColumns,
    *,
    first: int = 0,
    required: frozenset[str] = REWARD_FIELDS,
    images: RowImages | None = None,
) -> list[Question]:
    """Reads the questions of a command; its errors name command options instead of recipe keys."""
    source = Source(path=rows.files[0].name, prompt_key=named.prompt, label_key=named.label)
    try:
        columns = find_question_columns(ColumnFinder(source, Data(train=[source]), rows.columns), required)
        return read_questions(rows, limit, columns, first=first, images=images)
    except Refusal as refusal:
        raise as_options(refusal, QUESTION_OPTIONS) from refusal


# Maps recipe keys of rewards to the command options that set them.
REWARD_OPTIONS = {
    "reward.function": "--reward-function",
    "reward.model": "--reward-model",
    "reward.remote": "--reward-remote",
    "reward.format": "--format",
    "reward.rules.": "--rule ",
    "reward.rules": "--rule",
}


def identity_of(reward: Reward) -> dict[str, Any]:
    """Returns the values of the reward options. Files are represented by checksums, so that a change is noticed."""
    model = model_folder(reward.model) if isinstance(reward.model, str) else None
    return {
        "--rule": reward.rules,
        "--reward-function": _function(reward.function) if reward.function else None,
        # A path that is not a folder is rejected when the model is loaded.
        "--reward-model": model_files(model) if model and Path(model).is_dir() else model,
        "--reward-remote": comparable(reward.remote),
        "--format": reward.format,
    }


def _function(function_path: str) -> dict[str, str]:
    file, name = locate(function_path, "--reward-function")
    return {"name": name, "file": checksum(file)}


def opened_scorer(
    reward: Reward,
    prompts: Sequence[Prompt],
    torch_device: torch.device,
    console: Console,
    output: Path | None,
    options: Mapping[str, str] = REWARD_OPTIONS,
    conversations: ConversationOptions = NO_CONVERSATIONS,
) -> Scorer:
    """Opens the rewards and tests them on real rows; errors name command options, not recipe keys.

    The last lines that a reward function prints are kept in log files next to `output`, which are named after `output`.
    """
    sources = sorted({prompt.question.data_source for prompt in prompts})
    unruled = [source for source in sources if rule_name(source, {**DEFAULT_RULES, **reward.rules}) is None]
    environment = conversations.gives_rewards
    if unruled and "rule" in active_weights(reward, environment=environment)[0]:
        remedy = f"set {options['reward.function']}, or --rule SOURCE=RULE with RULE one of {', '.join(RULES)}"
        raise Refusal([Problem(f"data_source {source!r}", "has no rule", remedy, code="no-rule") for source in unruled])
    try:
        policy = next((image.folder for prompt in prompts for image in prompt.images), None)
        scorer = Scorer.open(reward, sources, torch_device, output=output, environment=environment, policy=policy)
        questions = [prompt.question for prompt in prompts]
        try:
            run_trial(REWARDS, lambda: scorer.dry_run(questions, conversations=conversations.any), console=console)
        except BaseException:
            scorer.close()
            raise
    except Refusal as refusal:
        raise as_options(refusal, options) from refusal
    return scorer


def refuse_failures(made: Sequence[Rollout], most: float, folder: Path) -> None:
    """Raises a `Refusal` if more than the fraction `most` of the responses has no score; keeps finished chunks."""
    failed = [(rollout, rollout.score) for rollout in made if isinstance(rollout.score, Failure)]
    if len(failed) <= most * len(made):
        return
    first, failure = failed[0]
    raise Refusal.at(
        REWARD_OPTIONS.get(f"reward.{failure.part}", f"reward {failure.part}"),
        f"{len(failed)} of {len(made)} responses could not be scored, more than --max-failures {most:g}; the first, "
        f"for {first.prompt.question.origin}: {failure.message}; response: {first.text[:200]!r}",
        f"fix the reward, or raise --max-failures; finished chunks stay in {folder}",
        code="reward-failed",
    )
