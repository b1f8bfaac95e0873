"""Recipe keys of the data: sources, columns, templates and limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lockstep.recipe.section import COLUMN, GROUPS, LIMIT, Effect, Field, Section


def _as_sources(value: Any) -> Any:
    """Expands `train: rows.parquet` and `train: [a.jsonl, b.jsonl]` to a list of sources."""
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


class Source(Section):
    path: str = Field(
        description="A parquet, arrow, jsonl, json or csv file, a folder or glob of such files, or "
        "`hub:name[:config[:split]]`.",
        resumable=True,
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Weight of this source in the mixture. Set it for all sources or for none.",
        effect=Effect("blocks", "the mixture of sources differs"),
    )
    rows: int | None = Field(
        None,
        ge=1,
        description="Number of rows to read from the start. Default: all.",
        effect=Effect("blocks", "different rows are read"),
    )
    shape: Literal["messages", "prompt_response", "text"] | None = Field(
        None, description="As `data.shape`, for this source."
    )
    messages_key: str | None = Field(None, description="As `data.messages_key`, for this source.")
    prompt_key: str | None = Field(None, description="As `data.prompt_key`, for this source.")
    response_key: str | None = Field(None, description="As `data.response_key`, for this source.")
    text_key: str | None = Field(None, description="As `data.text_key`, for this source.")
    chosen_key: str | None = Field(None, description="As `data.chosen_key`, for this source.")
    rejected_key: str | None = Field(None, description="As `data.rejected_key`, for this source.")
    margin_key: str | None = Field(None, description="As `data.margin_key`, for this source.")
    responses_key: str | None = Field(None, description="As `data.responses_key`, for this source.")
    scores_key: str | None = Field(None, description="As `data.scores_key`, for this source.")
    label_key: str | None = Field(None, description="As `data.label_key`, for this source.")
    steps_key: str | None = Field(None, description="As `data.steps_key`, for this source.")


def _as_switch(value: object) -> object:
    """Converts true and false back to on and off, which YAML reads as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Sources = Annotated[list[Source], BeforeValidator(_as_sources)]


class Data(Section):
    train: Sources = Field(
        min_length=1, description="Training rows: a path, a list of paths, or a list of sources.", effect=COLUMN
    )
    val: Sources = Field(
        default_factory=list,
        description="Validation rows, in the same forms as `train`.",
        effect=Effect("harmless", "changes only the val/ metrics"),
    )
    reader: str | None = Field(
        None,
        description="Your function that yields the rows of each path in `train`, `val` and `val.questions`: "
        "`path/to/file.py:name`.",
        effect=Effect("matters", "a different function, or the same one at another path; compare the row checksums"),
    )
    reader_timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout in seconds for `reader` to yield all rows of a path. After it, the run stops with an "
        "error.",
        effect=Effect("harmless", "changes only when the run stops with an error"),
        resumable=True,
    )
    reader_memory_gb: float = Field(
        16.0,
        gt=0,
        description="Memory limit of the process that runs `reader`.",
        effect=Effect("harmless", "changes only when the run stops with an error"),
        resumable=True,
    )
    shape: Literal["auto", "messages", "prompt_response", "text"] = Field(
        "auto",
        description="`messages`: a chat, trained on every assistant turn; `prompt_response`: trained on the "
        "response; `text`: trained on every token; `auto`: detected from the columns and reported.",
    )
    messages_key: str | None = Field(
        None, description="Column of the chat. Default: `messages`, `conversations` or `conversation`."
    )
    prompt_key: str | None = Field(
        None,
        description="Column of the prompt, a text or a chat. Dots reach into nested columns "
        "(`extra_info.question`). Default: column names that other projects use; `data show` prints the one found.",
    )
    response_key: str | None = Field(None, description="Column of the response. Dots work as in `prompt_key`.")
    text_key: str | None = Field(None, description="Column of plain text. Default: `text`.")
    chosen_key: str | None = Field(None, description="Column of the better response. Default: `chosen`.")
    rejected_key: str | None = Field(None, description="Column of the worse response. Default: `rejected`.")
    margin_key: str | None = Field(
        None,
        description="Column of the required margin of a pair (`rm`). Default: `margin`, or `score_chosen` minus "
        "`score_rejected`.",
    )
    responses_key: str | None = Field(
        None, description="Column of a list of responses to rank. Default: `responses` or `completions`."
    )
    scores_key: str | None = Field(
        None,
        description="Column of the scores of these responses; higher is better. Default: `scores`, or the score "
        "inside each response object (`overall_score`, `score`, `rating`, `reward`). Without scores, the best "
        "response comes first.",
    )
    label_key: str | None = Field(
        None,
        description="Column of the label (`kto`) or of the step labels (`prm`). Default: `label`, `labels`. "
        "Online: column of the ground truth. Default: `reward_model.ground_truth`, `ground_truth`, `answer` (the "
        "part after `####` or inside `\\boxed{}`) or `solution`; none if `prompt_key` is set.",
    )
    steps_key: str | None = Field(None, description="Column of a list of steps (`prm`). Default: `completions`.")
    system: str | None = Field(
        None,
        description="System message added to rows that have none.",
        effect=Effect("blocks", "prompts start with a different text"),
    )
    template: str = Field(
        "auto",
        description="`auto` renders prompts with the tokenizer's chat template if it has one; `none` concatenates "
        "prompt and response; `chatml`, `llama3`, `qwen` (ChatML with tools) or the path of a `.jinja` file "
        "replaces the tokenizer's template, also in the export.",
        effect=Effect("blocks", "prompts are formatted differently"),
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Arguments of the chat template for every prompt of the run, such as `enable_thinking: false`.",
        effect=Effect("blocks", "prompts are formatted differently"),
    )
    prompt_format: str | None = Field(
        None,
        description="Text around each prompt; `{}` marks the place of the prompt. With a chat template, it goes "
        "into the user message.",
        effect=Effect("blocks", "prompts are formatted differently"),
    )
    require_end: bool = Field(
        True,
        description="Reject rows whose last trained token is not an end token: the model would not learn to stop.",
        effect=Effect("harmless", "rows are accepted or rejected; the trained tokens are the same"),
    )
    max_tokens: int | None = Field(
        None,
        ge=2,
        description="Maximum row length in tokens. Default: the model's context length, or `batch.tokens` (times "
        "`parallel.context_parallel`) if smaller.",
        effect=LIMIT,
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Online: maximum prompt length in tokens. Default: the context length minus `rollout.max_tokens`.",
        effect=LIMIT,
    )
    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = Field(
        "error",
        description="What to do with a row longer than `max_tokens` (online: a prompt longer than "
        "`max_prompt_tokens`). Dropped and truncated rows are counted.",
        effect=LIMIT,
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error",
        description="What to do with a row that cannot be trained as it is: an empty answer, a chat that starts "
        "with the assistant, a part that the template drops. Dropped rows are counted, and the first ones are "
        "listed.",
        effect=LIMIT,
    )
    drop_last: bool = Field(
        False,
        description="End each epoch with its last full update and skip the remaining rows. `false`: updates "
        "continue across the end of an epoch.",
        effect=GROUPS,
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Number of rows to read from each source of `train` that does not set `rows`.",
        effect=Effect("blocks", "different rows are read"),
    )
    cache: Annotated[str, BeforeValidator(_as_switch)] = Field(
        "on",
        description="Where encoded rows are cached by content for later runs: `on`: the user's cache "
        "directory (`LOCKSTEP_CACHE`); `off`: nowhere; otherwise a folder.",
        effect=Effect("harmless", "changes only the start-up time"),
        resumable=True,
    )
    cache_gb: float = Field(
        20.0,
        gt=0,
        description="Size limit of the row cache in GiB. The least recently used entries are deleted first.",
        effect=Effect("harmless", "changes only the start-up time"),
        resumable=True,
    )
    shuffle: bool = Field(
        True,
        description="Shuffle the rows with the seed, anew in each epoch.",
        effect=Effect("matters", "rows come in another order; metrics agree only in distribution"),
    )

    @property
    def taken(self) -> list[Source]:
        """The sources of `train`, with `max_rows` applied."""
        if self.max_rows is None:
            return self.train
        return [source if source.rows else source.model_copy(update={"rows": self.max_rows}) for source in self.train]
