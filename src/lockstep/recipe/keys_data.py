"""Recipe keys of the data: sources, columns, templates and limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lockstep.recipe.section import COLUMN, GROUPS, LIMIT, Effect, Field, Section


def _as_sources(value: Any) -> Any:
    """Expands the short forms `train: rows.parquet` and `train: [a.jsonl, b.jsonl]` to a list of data sources."""
    items = value if isinstance(value, list) else [value]
    return [{"path": item} if isinstance(item, str) else item for item in items]


class Source(Section):
    path: str = Field(
        description="A parquet, arrow, jsonl, json, csv, tsv or txt file, a folder or glob of such files, or "
        "`hub:name[:config[:split]]`.",
        resumable=True,
    )
    weight: float | None = Field(
        None,
        gt=0,
        description="Weight of this source in the mixture of sources. Set weights for all sources or for none.",
        effect=Effect("blocks", "the mixture of sources differs"),
    )
    rows: int | None = Field(
        None,
        ge=1,
        description="Number of rows to read from the start of this source. Default: all.",
        effect=Effect("blocks", "different rows are read"),
    )
    shape: Literal["messages", "prompt_response", "text"] | None = Field(
        None, description="Replaces `data.shape` for this source."
    )
    messages_key: str | None = Field(None, description="Replaces `data.messages_key` for this source.")
    prompt_key: str | None = Field(None, description="Replaces `data.prompt_key` for this source.")
    response_key: str | None = Field(None, description="Replaces `data.response_key` for this source.")
    text_key: str | None = Field(None, description="Replaces `data.text_key` for this source.")
    chosen_key: str | None = Field(None, description="Replaces `data.chosen_key` for this source.")
    rejected_key: str | None = Field(None, description="Replaces `data.rejected_key` for this source.")
    margin_key: str | None = Field(None, description="Replaces `data.margin_key` for this source.")
    responses_key: str | None = Field(None, description="Replaces `data.responses_key` for this source.")
    scores_key: str | None = Field(None, description="Replaces `data.scores_key` for this source.")
    label_key: str | None = Field(None, description="Replaces `data.label_key` for this source.")
    steps_key: str | None = Field(None, description="Replaces `data.steps_key` for this source.")


def _as_switch(value: object) -> object:
    """Converts booleans back to the words on and off, because YAML reads these words as booleans."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else value


Sources = Annotated[list[Source], BeforeValidator(_as_sources)]


class Data(Section):
    train: Sources = Field(
        min_length=1,
        description="Training rows: a path, a list of paths, or a list of sources with their own keys.",
        effect=COLUMN,
    )
    val: Sources = Field(
        default_factory=list,
        description="Validation rows, in the same forms as `train`.",
        effect=Effect("harmless", "changes only the val/ metrics"),
    )
    reader: str | None = Field(
        None,
        description="Your function (`path/to/file.py:name`) that yields the rows of each path in `train`, `val` and "
        "`val.questions`.",
        effect=Effect(
            "matters", "a different function, or the same function at another path; compare the checksums of the rows"
        ),
    )
    reader_timeout: float = Field(
        600.0,
        gt=0,
        description="Timeout in seconds for `reader` to yield all rows of a path. After the timeout, the run stops "
        "with an error.",
        effect=Effect("harmless", "affects only whether the run stops with an error"),
        resumable=True,
    )
    reader_memory_gb: float = Field(
        16.0,
        gt=0,
        description="Memory limit in GB of the process that runs `reader`.",
        effect=Effect("harmless", "affects only whether the run stops with an error"),
        resumable=True,
    )
    shape: Literal["auto", "messages", "prompt_response", "text"] = Field(
        "auto",
        description="Form of the training rows. `messages`: each row is a chat, and its assistant turns are trained "
        "(`turns`). `prompt_response`: the response is trained, and earlier answers if the prompt is a chat. "
        "`text`: every token is trained. `auto`: the shape is detected from the columns and reported.",
    )
    sample_by: Literal["line", "paragraph", "document"] = Field(
        "line",
        description="Which part of a `.txt` file is one row with the column `text`: a line, a paragraph (lines between "
        "blank lines) or the full file. Blank lines give no row.",
        effect=Effect("blocks", "different rows are read"),
    )
    messages_key: str | None = Field(
        None, description="Column of the chat. Default: `messages`, `conversations` or `conversation`."
    )
    prompt_key: str | None = Field(
        None,
        description="Column of the prompt, which is a text or a chat. Dots address nested columns "
        "(`extra_info.question`). By default the column is found by names that other projects use, and `lockstep "
        "data show` prints the column that it found.",
    )
    response_key: str | None = Field(
        None, description="Column of the response. Dots address nested columns, as in `prompt_key`."
    )
    text_key: str | None = Field(None, description="Column of plain text. Default: `text`.")
    chosen_key: str | None = Field(
        None, description="Column of the better response of a preference pair. Default: `chosen`."
    )
    rejected_key: str | None = Field(
        None, description="Column of the worse response of a preference pair. Default: `rejected`."
    )
    margin_key: str | None = Field(
        None,
        description="Column of the margin by which the chosen response should score higher than the rejected one "
        "(method `rm`). The default is `margin`, or `score_chosen` minus `score_rejected`.",
    )
    responses_key: str | None = Field(
        None, description="Column of a list of responses to rank. Default: `responses` or `completions`."
    )
    scores_key: str | None = Field(
        None,
        description="Column of the scores of the responses in `responses_key`. Higher scores are better. By default "
        "the scores are in the column `scores`, or inside each response object (`overall_score`, `score`, "
        "`rating`, `reward`). Without scores, the responses must be ordered from best to worst.",
    )
    label_key: str | None = Field(
        None,
        description="Column of the label (method `kto`) or of the step labels (method `prm`). Default: `label`, "
        "`labels`. In online methods, column of the ground truth. For online methods, the default is "
        "`reward_model.ground_truth`, `ground_truth`, `answer` (the part after `####` or inside `\\boxed{}`) or "
        "`solution`; if `prompt_key` is set, there is no default.",
    )
    steps_key: str | None = Field(
        None, description="Column of a list of reasoning steps (method `prm`). Default: `completions`."
    )
    system: str | None = Field(
        None,
        description="System message that is added to rows without a system message.",
        effect=Effect("blocks", "prompts start with a different system message"),
    )
    template: str = Field(
        "auto",
        description="Chat template. `auto` uses the tokenizer's chat template if it has one. If that template would "
        "change earlier turns of a training row, the row is rendered with a built-in append-only version of the "
        "template. `none` concatenates prompt and response. "
        "A built-in name (`chatml`, `qwen`, `qwen2.5`, `qwen3`, `qwen3-thinking`, `qwen3.5`, `qwen3.5-nothink`, "
        "`qwen3.6`, `llama3`, `llama3.1`, `deepseek-r1`, `gemma`, `mistral`, `mistral-nemo`, `glm4.5`, "
        "`gpt-oss`, `kimi-k2`, `kimi-k2-thinking`, `smollm3`) or the path of a "
        "`.jinja` file replaces the tokenizer's template, also in the exported model.",
        effect=Effect("blocks", "prompts are formatted differently"),
    )
    template_arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Arguments that are passed to the chat template for every prompt of the run, such as "
        "`enable_thinking: false`. The columns `enable_thinking` and `chat_template_kwargs` of a row take precedence.",
        effect=Effect("blocks", "prompts are formatted differently"),
    )
    turns: Literal["all", "last", "each"] = Field(
        "all",
        description="Which assistant turns of a chat are trained. `all`: every turn, in one sequence. `last`: the last "
        "turn. `each`: every turn, each in a separate sequence that ends with this turn. `last` and `each` render a "
        "turn's context with the tokenizer's template exactly as for generation, also if the template changes earlier "
        "turns.",
        effect=Effect("blocks", "other turns are trained, or in another context"),
    )
    train_roles: list[Literal["system", "developer", "user", "assistant", "tool"]] = Field(
        ["assistant"],
        min_length=1,
        description="Roles whose messages are trained (`turns: all`). In messages of roles other than "
        "assistant, the content and the special token after the content are trained.",
        effect=Effect("blocks", "messages of other roles are trained"),
    )
    prompt_format: str | None = Field(
        None,
        description="Text around each prompt, in which `{}` is replaced by the prompt. With a chat template, the "
        "result becomes the user message.",
        effect=Effect("blocks", "prompts are formatted differently"),
    )
    require_end: bool = Field(
        True,
        description="Reject rows whose last trained token is not an end token: the model would not learn to stop.",
        effect=Effect("harmless", "changes only which rows are refused; the trained tokens are the same"),
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
        description="Maximum prompt length in tokens, for online methods. Default: the model's context length minus "
        "`rollout.max_tokens`.",
        effect=LIMIT,
    )
    overlong: Literal["error", "drop", "truncate_left", "truncate_right"] = Field(
        "error",
        description="What to do with a row longer than `max_tokens` (in online methods: a prompt longer than "
        "`max_prompt_tokens`). The numbers of dropped and truncated rows are reported.",
        effect=LIMIT,
    )
    long_text: Literal["overlong", "split"] = Field(
        "overlong",
        description="What to do with a row of shape `text` that is longer than `max_tokens`. `overlong`: the same as "
        "with other rows. `split`: the text becomes several rows of up to `max_tokens` tokens, and every token is "
        "trained exactly once. The numbers of split texts and of pieces are reported.",
        effect=LIMIT,
    )
    bad_rows: Literal["error", "drop"] = Field(
        "error",
        description="What to do with a row that cannot be trained: it has an empty answer, its chat starts with the "
        "assistant, or the template would drop a part of it. The number of dropped rows and the first dropped rows "
        "are reported.",
        effect=LIMIT,
    )
    drop_last: bool = Field(
        False,
        description="`true` ends each epoch with its last full update and skips the remaining rows. `false` lets an "
        "update continue with rows of the next epoch.",
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
        description="Where encoded rows are cached for later runs. `on` uses the user's cache directory "
        "(`LOCKSTEP_CACHE`), `off` disables the cache, and any other value is a folder. The cache key is the content "
        "of the rows.",
        effect=Effect("harmless", "changes only the start-up time"),
        resumable=True,
    )
    cache_gb: float = Field(
        20.0,
        gt=0,
        description="Size limit of the row cache in GiB. The least recently used cache entries are deleted first.",
        effect=Effect("harmless", "changes only the start-up time"),
        resumable=True,
    )
    shuffle: bool = Field(
        True,
        description="Shuffle the rows in each epoch, with a permutation that depends on `run.seed`.",
        effect=Effect("matters", "rows come in another order; metrics agree only in distribution"),
    )
    streaming: bool = Field(
        False,
        description="Read the files of `train` while training runs, for data sets larger than memory. Only the first "
        "rows are checked before training. Needs `run.steps`.",
        effect=Effect("matters", "rows come in another order; metrics agree only in distribution"),
    )
    shuffle_buffer: int = Field(
        4096,
        ge=1,
        description="With `streaming`: number of rows that are in memory and shuffled together. The order of the files "
        "is shuffled too.",
        effect=Effect("matters", "rows come in another order; metrics agree only in distribution"),
    )

    @property
    def taken(self) -> list[Source]:
        """The sources of `train`, with `max_rows` applied."""
        if self.max_rows is None:
            return self.train
        return [source if source.rows else source.model_copy(update={"rows": self.max_rows}) for source in self.train]
