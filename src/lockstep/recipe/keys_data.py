"""Keys of the rows: where they come from, what their columns are, how they become tokens."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lockstep.recipe.section import COLUMN, GROUPS, LIMIT, Effect, Field, Section


def _as_sources(value: Any) -> Any:
    """`train: rows.parquet` and `train: [a.jsonl, b.jsonl]` are short for a list of sources."""
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


class Source(Section):
    path: str = Field(
        description="parquet, arrow, jsonl, json or csv file, a folder or glob of them, or "
        "`hub:name[:config[:split]]`.",
        resumable=True,
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Share of this source in the mix; on all sources or on none.",
        effect=Effect("blocks", "the sources are mixed in other shares"),
    )
    rows: int | None = Field(
        None,
        ge=1,
        description="Read only the first so many rows.",
        effect=Effect("blocks", "other rows are read"),
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
    """YAML reads on and off as true and false."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Sources = Annotated[list[Source], BeforeValidator(_as_sources)]


class Data(Section):
    train: Sources = Field(
        min_length=1, description="Training rows: a path, a list of paths, or a list of sources.", effect=COLUMN
    )
    val: Sources = Field(
        default_factory=list,
        description="Validation rows, in the same forms.",
        effect=Effect("harmless", "only the val/ curves are of other rows"),
    )
    reader: str | None = Field(
        None,
        description="Your own function that yields the rows of each path of `train`, `val` and `val.questions`: "
        "`path/to/file.py:name`.",
        effect=Effect("matters", "another function, or the same one elsewhere: the rows' checksums tell"),
    )
    reader_limit: float = Field(
        600.0,
        gt=0,
        description="Seconds in which `reader` must have given all rows of a path; then the run is refused.",
        effect=Effect("harmless", "only when the run is refused"),
        resumable=True,
    )
    reader_memory_gb: float = Field(
        16.0,
        gt=0,
        description="Memory of the process that runs `reader`.",
        effect=Effect("harmless", "only when the run is refused"),
        resumable=True,
    )
    shape: Literal["auto", "messages", "prompt_response", "text"] = Field(
        "auto",
        description="`messages`: a chat, every assistant turn is trained; `prompt_response`: the response is trained; "
        "`text`: every token is trained; `auto` looks at the columns and says what it found.",
    )
    messages_key: str | None = Field(
        None, description="Column of the chat. Default `messages`, `conversations` or `conversation`."
    )
    prompt_key: str | None = Field(
        None,
        description="Column of the prompt, a text or a chat; dots reach into nested columns (`extra_info.question`). "
        "Default: by the names that rows of other projects have, and `data show` says which.",
    )
    response_key: str | None = Field(None, description="Column of the response; dots as in `prompt_key`.")
    text_key: str | None = Field(None, description="Column of plain text. Default `text`.")
    chosen_key: str | None = Field(None, description="Column of the better response. Default `chosen`.")
    rejected_key: str | None = Field(None, description="Column of the worse response. Default `rejected`.")
    margin_key: str | None = Field(
        None,
        description="Column of the margin asked of a pair (`rm`). Default `margin`, or `score_chosen` less "
        "`score_rejected`.",
    )
    responses_key: str | None = Field(
        None, description="Column of a list of responses to rank. Default `responses` or `completions`."
    )
    scores_key: str | None = Field(
        None,
        description="Column of their scores, higher is better. Default `scores`, or what responses that are objects "
        "hold (`overall_score`, `score`, `rating`, `reward`); without: best first.",
    )
    label_key: str | None = Field(
        None,
        description="Column of the verdict (`kto`) or of the verdicts on the steps (`prm`). Default `label`, `labels`. "
        "Online: of the ground truth; default `reward_model.ground_truth`, or `ground_truth`, `answer` (of which what "
        "follows its `####` or stands in its `\\boxed{}`), `solution`; none where `prompt_key` is set.",
    )
    steps_key: str | None = Field(None, description="Column of a list of steps (`prm`). Default `completions`.")
    system: str | None = Field(
        None,
        description="System message put before rows that have none.",
        effect=Effect("blocks", "prompts begin with another text"),
    )
    template: str = Field(
        "auto",
        description="`auto` renders prompts with the tokenizer's chat template where it has one; `none` joins prompt "
        "and response as they are; `chatml`, `llama3`, `qwen` (ChatML with tools) or the path of a `.jinja` file is a "
        "template in place of the tokenizer's. The export has it too.",
        effect=Effect("blocks", "prompts are written in another form"),
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Arguments of the chat template, such as `enable_thinking: false`, in every prompt of the run.",
        effect=Effect("blocks", "prompts are written in another form"),
    )
    prompt_format: str | None = Field(
        None,
        description="The text around a prompt, in which `{}` stands for it; with a chat template inside the user's "
        "message.",
        effect=Effect("blocks", "prompts are written in another form"),
    )
    require_end: bool = Field(
        True,
        description="Refuse rows whose last trained token is not an end token: the model would not learn to stop.",
        effect=Effect("harmless", "rows are refused or not; what is trained is the same"),
    )
    max_tokens: int | None = Field(
        None,
        ge=2,
        description="Longest row in tokens. Default: the model's context, or `batch.tokens` (times "
        "`parallel.context`) if smaller.",
        effect=LIMIT,
    )
    max_prompt_tokens: int | None = Field(
        None,
        ge=1,
        description="Online: longest prompt in tokens. Default: what `rollout.max_tokens` leaves of the context.",
        effect=LIMIT,
    )
    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = Field(
        "error",
        description="What happens to a row over `max_tokens` (online: a prompt over `max_prompt_tokens`). "
        "Dropped and truncated rows are counted.",
        effect=LIMIT,
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error",
        description="What happens to a row that cannot be trained as it is: an empty answer, a chat that starts with "
        "the assistant, a part that the template drops. Dropped rows are counted, and the first are named.",
        effect=LIMIT,
    )
    drop_last: bool = Field(
        False,
        description="An epoch ends with its last whole update; the rows left over are not trained in it. Without, "
        "updates run on over the end of an epoch.",
        effect=GROUPS,
    )
    max_rows: int | None = Field(
        None,
        ge=1,
        description="Read only the first so many rows of each source of `train` that says no `rows` of its own.",
        effect=Effect("blocks", "other rows are read"),
    )
    cache: Annotated[str, BeforeValidator(_as_switch)] = Field(
        "on",
        description="Encoded rows are kept on disk, by content, and found again by later runs: `on` in the user's "
        "cache (`LOCKSTEP_CACHE`), `off` nowhere, else a folder.",
        effect=Effect("harmless", "only how long a start takes"),
        resumable=True,
    )
    cache_gb: float = Field(
        20.0,
        gt=0,
        description="Bound of that folder in GiB: what was not used for longest is deleted first.",
        effect=Effect("harmless", "only how long a start takes"),
        resumable=True,
    )
    shuffle: bool = Field(
        True,
        description="Visit the rows in a new seeded order each epoch.",
        effect=Effect("matters", "rows come in another order: curves agree in distribution only"),
    )

    @property
    def taken(self) -> list[Source]:
        """The sources of `train`, each with the rows that are read of it."""
        if self.max_rows is None:
            return self.train
        return [one if one.rows else one.model_copy(update={"rows": self.max_rows}) for one in self.train]
