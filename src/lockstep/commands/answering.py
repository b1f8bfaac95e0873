"""The verbs that let a model answer, and judge or use what it said: generate, serve, eval, sample, pairs.

Each imports what it needs when it is called, so that `--help` answers at once.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from lockstep.commands.arguments import LabelKey, ModelArgument, PromptKey, named_value
from lockstep.run.output import write


def generate(
    model: ModelArgument,
    prompt: Annotated[str | None, typer.Argument(help="What to say to it [what is piped in].")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Talk to it, turn by turn.")] = False,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompt as it is, without the chat template.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many tokens; 0 is all.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Leave out tokens below this share of the best.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(min=0.01, help="Over 1, tokens seen before lose.")] = 1.0,
    seed: int = 0,
    adapter: Annotated[
        str | None, typer.Option(metavar="DIR", help="PEFT folder of a LoRA adapter to put on it.")
    ] = None,
    device: str = "auto",
) -> None:
    """Let MODEL answer a prompt, word by word; --chat has commands, /help tells them."""
    if raw and (chat or system):
        raise typer.BadParameter(f"--raw has no template, and so no {'--chat' if chat else '--system'}")
    if prompt is None and not chat:
        prompt = None if sys.stdin.isatty() else sys.stdin.read().rstrip("\n")
    if not prompt and not chat:
        raise typer.BadParameter("give a prompt, or --chat")

    from lockstep.commands.generate import Conversation

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
        speak = conversation.continue_text if raw else conversation.answer
        speak(prompt, lambda piece: write(piece, end=""))
        write()


def serve(
    model: ModelArgument,
    host: Annotated[str, typer.Option(help="Where to listen; beyond this machine only with --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 is any free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOCKSTEP_API_KEY", help="What requests must bring: Authorization: Bearer KEY.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What requests call the model [its folder's name].")] = None,
    max_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a prompt and its answer together [the model's context].")
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences that are decoded at once.")] = 64,
    cache_gb: Annotated[
        float | None, typer.Option(min=1e-6, help="Memory of the key/value cache [at most half of what is free].")
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Sequences that may wait or run; more are answered 429.")] = 256,
    max_body: Annotated[float, typer.Option(min=0, help="MiB of a request; a longer one is answered 413.")] = 16.0,
    request_seconds: Annotated[
        float, typer.Option(min=0, help="Time of a request; a longer one is answered 504.")
    ] = 600.0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16, fp16, or auto: as the weights are stored.")] = "auto",
    device: str = "auto",
) -> None:
    """Serve MODEL over HTTP, as OpenAI's interface: chats, completions, models. A reward model gives rewards."""
    from lockstep.serve.http_api import ListenAddress, ServeLimits

    address = ListenAddress(host, port, api_key)
    limits = ServeLimits(body_bytes=int(max_body * 2**20), queue=queue, seconds=request_seconds)

    from lockstep.serve.model_server import ServeSettings
    from lockstep.serve.model_server import serve as run

    run(ServeSettings(model, name, dtype, device, max_length, max_sequences, cache_gb), address, limits)


def evaluate(
    model: ModelArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="RL rows to answer, or pairs or steps to judge.")],
    rows: Annotated[int | None, typer.Option(min=1, help="Only the first so many rows.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 256,
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Answers to each question: pass@k and maj@k.")] = 1,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    seed: int = 0,
    reference: Annotated[
        str | None, typer.Option(help="Pairs: compare by the log-ratio to this model, as DPO does.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(metavar="[SOURCE=]RULE", help="The rule that checks answers; may be repeated.")
    ] = None,
    reward: Annotated[
        str | None, typer.Option(metavar="FILE.py:NAME", help="A function of yours that judges answers.")
    ] = None,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    out: Annotated[Path | None, typer.Option(help="Write what was found of every row to this jsonl file.")] = None,
    dtype: str = "fp32",
    device: str = "auto",
) -> None:
    """Accuracy of MODEL on DATA: of its answers by the rule of each row's data source; of a reward model, of a process
    reward model or of a language model's own preference on rows that say what is better."""
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
    )


def sample(
    model: ModelArgument,
    data: Annotated[str, typer.Argument(metavar="DATA", help="Rows in the RL schema.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.parquet", help="Where the responses go, one a row.")],
    # The short form besides: torchrun takes `--n` for one of its own options.
    n: Annotated[int, typer.Option("--n", "-n", min=1, help="Responses to each question.")] = 8,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Sample from tokens that hold this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from so many tokens; 0 is all.")] = 0,
    min_p: Annotated[float, typer.Option(min=0, max=1, help="Leave out tokens below this share of the best.")] = 0.0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest response in tokens.")] = 256,
    rows: Annotated[int | None, typer.Option(min=1, help="Only so many rows.")] = None,
    first: Annotated[int, typer.Option(min=0, help="Leave out so many rows before them: a slice.")] = 0,
    seed: Annotated[int, typer.Option(min=0, help="Another seed draws other responses.")] = 0,
    reward_function: Annotated[str | None, typer.Option(metavar="FILE.py:NAME", help="A function of yours.")] = None,
    reward_model: Annotated[str | None, typer.Option(metavar="DIR", help="Folder of a reward model.")] = None,
    reward_remote: Annotated[str | None, typer.Option(metavar="URL", help="An endpoint that scores.")] = None,
    format: Annotated[
        str | None, typer.Option(metavar="REGEX", help="1 when the whole response matches, else 0.")
    ] = None,
    rule: Annotated[
        list[str] | None, typer.Option(metavar="SOURCE=RULE", help="The rule of a data source; may be repeated.")
    ] = None,
    max_failures: Annotated[
        float, typer.Option(min=0, max=1, help="Stop when more than this share of a chunk has no score.")
    ] = 0.1,
    prompt_key: PromptKey = None,
    label_key: LabelKey = None,
    system: Annotated[str | None, typer.Option(help="System message for prompts that have none.")] = None,
    chunk: Annotated[int, typer.Option(min=1, help="Questions answered between two savings.")] = 64,
    dtype: str = "fp32",
    device: str = "auto",
) -> None:
    """Sample scored responses of MODEL to DATA, or go on where it stopped.

    Without a reward option the rule of each row's data source scores; several rewards are added up.
    """
    from lockstep.commands.sample import Job, sample_responses
    from lockstep.commands.without_recipe import NamedColumns
    from lockstep.recipe.keys_online import Reward
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
    sample_responses(Job(model, data, out, n, sampling, rewards, rows, system, dtype, chunk, first, columns), device)


def pairs(
    samples: Annotated[str, typer.Argument(metavar="SAMPLES", help="What `lockstep sample` wrote: a file or a glob.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A .parquet or .jsonl file to write.")],
    kind: Annotated[
        str,
        typer.Option(
            metavar="pairs|sft|kto|conditional",
            help="Best against worst, the best alone, each with a label, or each with its reward in the prompt.",
        ),
    ],
    per_prompt: Annotated[int | None, typer.Option(min=1, help="pairs, sft: rows of a question at most [1].")] = None,
    min_margin: Annotated[float | None, typer.Option(min=0, help="pairs: least difference of rewards.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="pairs, sft: least reward of the better response.")] = None,
    threshold: Annotated[
        str | None, typer.Option(metavar="NUMBER|mean", help="kto: least reward of a good response [0.5].")
    ] = None,
    length_tie: Annotated[
        str | None,
        typer.Option(metavar="first|shortest", help="pairs, sft: which of equal rewards is taken [first]."),
    ] = None,
    keep_cut: Annotated[bool, typer.Option("--keep-cut", help="Use responses that met the length limit too.")] = False,
    reward_template: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="conditional: the prompt with {input} and {reward}."),
    ] = None,
    normalize: Annotated[
        bool, typer.Option("--normalize", help="conditional: rewards of mean 0 and deviation 1.")
    ] = False,
) -> None:
    """Turn scored responses into rows that SFT, DPO or KTO train on."""
    from lockstep.data.prepare.sampled import choice_of, write_pairs
    from lockstep.run.console import Console

    options = (per_prompt, min_margin, min_reward, threshold, length_tie, keep_cut, reward_template, normalize)
    choice = choice_of(kind, *options)
    counts = write_pairs(samples, out, choice)
    console = Console.open()
    console.banner(f"{samples} as {kind}", counts.table())
    console.say(f"wrote {out}")
