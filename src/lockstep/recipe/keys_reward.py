"""Recipe keys of rewards."""

from __future__ import annotations

from typing import Literal

from lockstep.recipe.section import FOLDER, REWARD, Effect, Field, Section


class Reward(Section):
    rules: dict[str, str] = Field(
        default_factory=dict,
        description="The reward rule of each data source (`gsm8k`, `gsm8k_flexible`, `math`, `exact`, `sandbox`, or a "
        "rule of verl such as `verl/gsm8k@0.9`, see `lockstep help rewards`). `sandbox` runs tests against the code in "
        "the response. An entry `aime*` is for all data sources that start with `aime`. Data sources "
        "with a built-in rule are `arithmetic` and `openai/gsm8k` (gsm8k), `lighteval/MATH`, "
        "`DigitalLearningGmbH/MATH-lighteval` and `HuggingFaceH4/MATH-500` (math).",
        effect=REWARD,
    )
    function: str | None = Field(
        None,
        description="Your reward function: `path/to/file.py:name`, with the signature of verl, OpenRLHF or TRL.",
        effect=Effect("matters", "the reward functions may differ, or only their paths; compare the rewards"),
    )
    arguments: dict[str, bool | int | float | str] = Field(
        default_factory=dict,
        description="Additional keyword arguments of `function`.",
        effect=REWARD,
    )
    model: str | list[str] | None = Field(
        None,
        description="Folder of a reward model (sequence classification, one label), or a list of folders whose "
        "scores are added.",
        effect=FOLDER,
    )
    model_weights: list[float] = Field(
        default_factory=list, description="The weight of each model, if `model` is a list. Default: 1.", effect=REWARD
    )
    process: str | None = Field(
        None,
        description="Folder of a process reward model (method `prm`). The reward of each reasoning step of a response "
        "is its probability of being good, divided by the number of steps. The last token of a step gets the reward of "
        "the step.",
        effect=FOLDER,
    )
    separator: str = Field(
        "\n",
        min_length=1,
        description="Text that separates the reasoning steps of a response, which the model in `process` scores.",
        effect=REWARD,
    )
    remote: str | list[str] | None = Field(
        None,
        description="Address of an HTTP endpoint that scores batches of responses, or a list of addresses over which "
        "the batches are distributed.",
        effect=Effect("matters", "a different endpoint may use a different model"),
    )
    remote_form: Literal["items", "openrlhf"] = Field(
        "items",
        description="Request and response format of the endpoint. `lockstep help rewards` describes `items`. "
        "`openrlhf` sends the lists `query`, `prompts` and `labels` and expects `rewards`.",
        effect=Effect("matters", "requests to the endpoint have another format"),
    )
    format: str | None = Field(
        None,
        description="Regular expression for the full response. The reward is 1 if the expression matches, otherwise 0.",
        effect=REWARD,
    )
    weights: dict[
        Literal["rule", "function", "model", "process", "remote", "format", "environment", "score", "group"], float
    ] = Field(
        default_factory=dict,
        description="Weight of each reward. Default: 1 for each reward that is set. The reward rule is used only if "
        "`weights` has an entry `rule` or if no other reward is set. An environment (`rollout.environment`) gives "
        "`environment` (the sum of its rewards per turn), `score` and `group` (the results of its methods `score` and "
        "`score_group`).",
        effect=REWARD,
    )
    clip: list[float] | None = Field(
        None,
        min_length=2,
        max_length=2,
        description="Lower and upper bound of the total score of a response. Scores outside the bounds are set to "
        "the nearest bound.",
        effect=REWARD,
    )
    workers: int = Field(
        2,
        ge=1,
        description="Number of processes that run the reward function.",
        effect=Effect("harmless", "this key changes only the number of processes that compute rewards"),
        resumable=True,
    )
    time_limit: float = Field(
        10.0,
        gt=0,
        description="Timeout in seconds for one call of the reward function.",
        effect=Effect("harmless", "this key matters only if a reward call fails; see the metric reward/failed"),
    )
    memory_limit_gb: float = Field(
        4.0,
        gt=0,
        description="Memory limit in GB of a process that runs the reward function.",
        effect=Effect("harmless", "this key matters only if a reward call fails; see the metric reward/failed"),
    )
    max_failures: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Stop the run if more than this fraction of a step's responses could not be generated "
        "(`rollout.function`, `rollout.environment`) or scored.",
        effect=Effect("harmless", "this key affects only whether the run stops with an error"),
        resumable=True,
    )
    remote_batch: int = Field(
        32,
        ge=1,
        description="Number of responses per request to the reward endpoint.",
        effect=Effect("harmless", "this key changes only the number of responses per request"),
    )
    remote_timeout: float = Field(
        30.0,
        gt=0,
        description="Timeout in seconds for a request to a reward endpoint, until its full response is received.",
        effect=Effect("harmless", "this key matters only if a reward call fails; see the metric reward/failed"),
    )
    remote_retries: int = Field(
        4,
        ge=0,
        description="Number of retries after a failed request to a reward endpoint, with increasing pauses.",
        effect=Effect("harmless", "this key matters only if a reward call fails; see the metric reward/failed"),
    )
