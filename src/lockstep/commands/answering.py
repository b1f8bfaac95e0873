"""Commands that generate text with a model or use its responses: generate, serve, eval, sample, pairs.

Each command imports its modules when it runs, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.commands.arguments import (
    AgentOption,
    EnvironmentArguments,
    EnvironmentOption,
    LabelKey,
    MaxTurns,
    ModelArgument,
    PromptKey,
    ToolOption,
    named_value,
)
from lockstep.run.output import write

if TYPE_CHECKING:
    from lockstep.commands.without_recipe import ConversationOptions


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="The prompt [read from stdin].")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Chat turn by turn.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum answer length in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many most likely tokens; 0 means all.")] = 0,
    min_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Exclude tokens whose probability is below this fraction of the highest."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(min=0.01, help="A value above 1 lowers the probability of tokens that already occurred.")
    ] = 1.0,
    seed: int = 0,
    adapter: Annotated[str | None, typer.Option(metavar="DIR", help="PEFT folder of a LoRA adapter to apply.")] = None,
    image: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE", help="Image file, before the prompt or in place of its <image> marks; repeatable."
        ),
    ] = None,
    device: str = "auto",
) -> None:
    """Answer a prompt with MODEL, streaming the text. In a --chat, type /help to list the chat commands."""
    if raw and (chat or system):
        raise typer.BadParameter(
            f"--raw uses no chat template and cannot be combined with {'--chat' if chat else '--system'}"
        )
    if prompt is None and not chat:
        prompt = None if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not prompt and not chat:
        raise typer.BadParameter("give a prompt, or --chat")
    if image and (raw or chat or adapter):
        raise typer.BadParameter("--image cannot be combined with --raw, --chat and --adapter")

    from lockstep.commands.generate import Conversation, answer_about

    if image and prompt:
        from lockstep.types import Sampling

        sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, repetition_penalty, seed=seed)
        write(answer_about(image, prompt, model, device, sampling, system))
        return
    conversation = Conversation(
        model,
        device,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        system=system,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        adapter=adapter,
    )
    if chat:
        from lockstep.commands.generate import converse

        converse(conversation, prompt)
    elif prompt is not None:
        generate_text = conversation.continue_text if raw else conversation.answer
        generate_text(prompt, lambda piece: write(piece, end=""))
        write()


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Address to listen on; a non-local address needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 means any free port.")] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="LOCKSTEP_API_KEY", help="Key that requests must send: Authorization: Bearer KEY."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Model name in requests [name of its folder].")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Maximum tokens of prompt plus answer [the model's context].")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Maximum sequences decoded at once.")] = 64,
    cache_gb: Annotated[
        float | None, typer.Option(min=1e-6, help="Size of the KV cache in GB [at most half of the free memory].")
    ] = None,
    queue: Annotated[
        int, typer.Option(min=1, help="Maximum waiting or running sequences; further requests get status 429.")
    ] = 256,
    max_body: Annotated[
        float, typer.Option(min=0, help="Maximum request size in MiB; larger requests get status 413.")
    ] = 16.0,
    request_seconds: Annotated[
        float, typer.Option(min=0, help="Maximum request time; longer requests get status 504.")
    ] = 600.0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: the dtype of the stored weights.")] = "auto",
    device: str = "auto",
) -> None:
    """Serve MODEL over HTTP, with OpenAI-compatible chat, completions and models, or with the rewards of a reward
    model."""
    from lockstep.http_server.http_api import ListenAddress, ServeLimits

    address = ListenAddress(host, port, api_key)
    limits = ServeLimits(body_bytes=int(max_body * 2**20), queue=queue, seconds=request_seconds)

    from lockstep.serve.model_server import ServeSettings
    from lockstep.serve.model_server import serve as run

    run(ServeSettings(model, name, dtype, device, max_length, max_sequences, cache_gb), address, limits)


def evaluate(
    model: ModelArgument,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="Rows with RL prompts to answer, or pairs or labeled steps to score.")
    ],
    rows: Annotated[int | None, typer.Option(min=1, help="Use only this many rows from the start.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum answer length in tokens.")] = 256,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Answers per question, for pass@k and maj@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    seed: int = 0,
    reference: Annotated[
        str | None, typer.Option(help="For pairs: score by the log-ratio to this model, as in DPO.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(metavar="[SOURCE=]RULE", help="Rule that checks answers; may be repeated.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="Your function that scores answers.")
    ] = None,
    environment: EnvironmentOption = None,
    environment_arg: EnvironmentArguments = None,
    agent: AgentOption = None,
    tool: ToolOption = None,
    max_turns: MaxTurns = None,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    out: Annotated[Path | None, typer.Option(help="Write the results of every row to this jsonl file.")] = None,
    dtype: str = "fp32",
    device: str = "auto",
) -> None:
    """Measure the accuracy of MODEL on DATA. A language model answers questions, and the rule of each data source
    checks its answers. For labeled rows (preference pairs, labeled steps), MODEL scores the rows instead."""
    from lockstep.commands.eval import score_model
    from lockstep.commands.without_recipe import NamedColumns

    score_model(
        model,
        data,
        rows=rows,
        max_new_tokens=max_new_tokens,
        n=n,
        temperature=temperature,
        seed=seed,
        out=out,
        dtype=dtype,
        device_name=device,
        reference=reference,
        rules=rule or (),
        reward=reward,
        columns=NamedColumns(prompt_key, label_key),
        conversations=_conversations(environment, environment_arg, tool, max_turns, agent),
    )


def _conversations(
    environment: str | None,
    arguments: list[str] | None,
    tools: list[str] | None,
    max_turns: int | None,
    agent: str | None,
) -> ConversationOptions:
    import yaml

    from lockstep.commands.without_recipe import ConversationOptions

    pairs = [named_value(words, "--environment-arg", "NAME=VALUE") for words in arguments or []]
    values = {name: yaml.safe_load(text) for name, text in pairs}
    return ConversationOptions(environment, values, tools or (), max_turns, agent)


def sample(
    model: ModelArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Rows in the RL schema.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Output file, one response per row.")],
    # The short form is needed because torchrun would take `--n` as one of its own options.
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Responses per question.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 1.0,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this total probability.")
    ] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many most likely tokens; 0 means all.")] = 0,
    min_p: Annotated[
        float,
        typer.Option(min=0, max=1, help="Exclude tokens whose probability is below this fraction of the highest."),
    ] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum response length in tokens.")] = 256,
    rows: Annotated[int | None, typer.Option(min=1, help="Number of rows to use.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Number of rows to skip at the start.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the responses.")] = 0,
    reward_function: Annotated[str | None, typer.Option(metavar="FILE.py:NAME", help="Your reward function.")] = None,
    reward_model: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of a reward model.")] = None,
    reward_remote: Annotated[
        str | None, typer.Option(metavar="URL", help="HTTP endpoint that scores responses.")
    ] = None,
    format: Annotated[
        str | None, typer.Option(metavar="REGEX", help="Reward 1 if the full response matches REGEX, otherwise 0.")
    ] = None,
    rule: Annotated[
        list[str] | None,
        typer.Option(metavar="SOURCE=RULE", help="Rule that scores the rows of a data source; may be repeated."),
    ] = None,
    max_failures: Annotated[
        float, typer.Option(min=0, max=1, help="Stop if more than this fraction of a chunk's responses has no score.")
    ] = 0.1,
    environment: EnvironmentOption = None,
    environment_arg: EnvironmentArguments = None,
    agent: AgentOption = None,
    tool: ToolOption = None,
    max_turns: MaxTurns = None,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    system: Annotated[str | None, typer.Option(help="System message for prompts without a system message.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Questions per saved chunk.")] = 64,
    dtype: str = "fp32",
    device: str = "auto",
) -> None:
    """Sample and score responses of MODEL to DATA, or resume an interrupted run.

    Without a reward option, the rule of each data source scores the responses. If several rewards are set, their scores
    are added.
    """
    from lockstep.commands.sample import Job, sample_responses
    from lockstep.commands.without_recipe import NamedColumns
    from lockstep.recipe.keys_reward import Reward
    from lockstep.types import Sampling

    rules = dict(named_value(words, "--rule", "SOURCE=RULE") for words in rule or [])
    rewards = Reward(
        rules=rules,
        function=reward_function,
        model=reward_model,
        remote=reward_remote,
        format=format,
        max_failures=max_failures,
    )
    sampling = Sampling(max_new_tokens, temperature, top_p, top_k, min_p, seed=seed)
    columns = NamedColumns(prompt_key, label_key)
    conversations = _conversations(environment, environment_arg, tool, max_turns, agent)
    job = Job(model, data, out, n, sampling, rewards, rows, system, dtype, chunk, first, columns, conversations)
    sample_responses(job, device)


def pairs(
    samples: Annotated[str, typer.Argument(metavar="SAMPLES", help="Output of `lockstep sample`: a file or a glob.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .parquet or .jsonl file to write.")],
    kind: Annotated[
        str,
        typer.Option(
            metavar="pairs|sft|kto|conditional",
            help="pairs: best and worst response; sft: the best; kto: all, labelled; conditional: all, with rewards.",
        ),
    ],
    per_prompt: Annotated[int | None, typer.Option(min=1, help="pairs, sft: maximum rows per question [1].")] = None,
    min_margin: Annotated[float | None, typer.Option(min=0, help="pairs: minimum difference of rewards.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="pairs, sft: minimum reward of the better response.")] = None,
    threshold: Annotated[
        str | None, typer.Option(metavar="NUMBER|mean", help="kto: minimum reward of a desirable response [0.5].")
    ] = None,
    length_tie: Annotated[
        str | None,
        typer.Option(
            metavar="first|shortest", help="pairs, sft: which of the responses with equal rewards to use [first]."
        ),
    ] = None,
    keep_cut: Annotated[
        bool, typer.Option("--keep-cut", help="Also use responses that reached the length limit.")
    ] = False,
    reward_template: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="conditional: template of the prompt, with {input} and {reward}."),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="conditional: normalise rewards to mean 0 and standard deviation 1.")
    ] = False,
) -> None:
    """Convert scored responses to training rows for SFT, DPO or KTO."""
    from lockstep.data.prepare.sampled import choice_of, write_pairs
    from lockstep.run.console import Console

    options = (per_prompt, min_margin, min_reward, threshold, length_tie, keep_cut, reward_template, normalize)
    choice = choice_of(kind, *options)
    counts = write_pairs(samples, out, choice)
    console = Console.open()
    console.banner(f"{samples} as {kind}", counts.table())
    console.say(f"wrote {out}")
