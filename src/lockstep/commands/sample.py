"""`lockstep sample`: samples and scores several responses per question, for rejection sampling and preference pairs."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from lockstep.commands.without_recipe import (
    BY_NAME,
    NO_CONVERSATIONS,
    ConversationOptions,
    NamedColumns,
    identity_of,
    load_generator,
    opened_scorer,
    option_images,
    over_context,
    read_option_questions,
    refuse_failures,
    refuse_judge,
    refuse_long_answers,
    refuse_options,
)
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.prompt_rows import COLUMNS
from lockstep.data.sources.read import read_rows
from lockstep.device.select import explain
from lockstep.errors import Interrupted, Problem, Refusal, refuse_all, unwritten
from lockstep.model.fingerprint import model_files
from lockstep.model.load import load_config, load_tokenizer
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_reward import Reward
from lockstep.reward.row_rewards import read_by_rewards
from lockstep.reward.scorer import Scorer
from lockstep.rollout.collect import encode_questions
from lockstep.rollout.generator import Generator
from lockstep.run.console import Console
from lockstep.run.files import atomic_write_text, written_aside
from lockstep.run.folder import RunFolder, read_object, worker_output
from lockstep.run.sample_log import conversation
from lockstep.train.resume import flatten
from lockstep.trajectory import Trajectory
from lockstep.types import Failure, Prompt, Rollout, Sampling
from lockstep.vision.images import MARK, image_bytes

# Responses on disk: one file per finished chunk; the files are merged at the end.

# The schema is explicit, because all chunks need the same schema, even one in which every `failure` is null.
SCHEMA = pa.schema(
    [
        ("data_source", pa.string()),
        ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
        ("ground_truth", pa.string()),
        ("extra_info", pa.string()),
        ("response", pa.string()),
        ("reward", pa.float64()),
        ("rewards", pa.string()),
        ("failure", pa.string()),
        ("stop", pa.string()),
        ("tokens", pa.int64()),
        ("question", pa.int64()),
        ("sample", pa.int64()),
    ]
)
# The messages of a conversation with an environment, as JSON.
CONVERSATION = pa.field("conversation", pa.string())
# The images of a prompt, as in a Hugging Face `Image` column.
IMAGES = pa.field("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())])))


def sample_row(rollout: Rollout, question: int, images: RowImages | None = None) -> dict[str, Any]:
    """Returns a response as a row; `question` is the index of the response's question in the data. With `images`, the
    prompt has a mark at the place of each image, as in verl's rows."""
    question_row, score = rollout.prompt.question, rollout.score
    prompt = question_row.prompt if images is None else images.without_placeholders(question_row.prompt, MARK)
    if isinstance(score, Failure):
        scores: dict[str, Any] = {"reward": None, "rewards": None, "failure": f"{score.part}: {score.why}"}
    else:
        scores = {"reward": score.total, "rewards": json.dumps(score.parts), "failure": None}
    return {
        "data_source": question_row.data_source,
        "prompt": [{"role": message["role"], "content": message["content"]} for message in prompt],
        "ground_truth": question_row.ground_truth,
        "extra_info": json.dumps(question_row.extra_info, ensure_ascii=False, default=str),
        "response": rollout.text,
        **scores,
        "stop": rollout.stop,
        "tokens": len(rollout.ids),
        "question": question,
        "sample": rollout.sample,
        "conversation": None if rollout.trajectory is None else _messages(rollout.trajectory),
        "images": [{"bytes": image_bytes(ref, question_row.origin), "path": None} for ref in question_row.images],
    }


def _messages(trajectory: Trajectory) -> str:
    return json.dumps(conversation(trajectory), ensure_ascii=False, default=str)


class Parts:
    """The finished chunks of the output file, in the folder `OUT.parts`. `manifest` describes the inputs."""

    def __init__(
        self, out: Path, manifest: dict[str, Any], images: RowImages | None = None, *, conversations: bool = False
    ):
        """`images` is the reader of the images, if rows have images."""
        self.out, self.manifest, self.images = out, manifest, images
        self.schema = SCHEMA.append(CONVERSATION) if conversations else SCHEMA
        self.schema = self.schema if images is None else self.schema.append(IMAGES)
        self.folder = out.with_name(f"{out.name}.parts")

    def check(self) -> None:
        """Rejects an OUT that cannot be written, or whose finished chunks were made from other inputs."""
        if self.out.suffix != ".parquet":
            raise Refusal.at(
                str(self.out),
                "is not a parquet file name",
                "use a name that ends with .parquet",
                code="unsupported-format",
            )
        if self.out.exists():
            raise Refusal.at(
                str(self.out), "already exists", "choose another OUT, or remove the file", code="already-exists"
            )
        if self._manifest.is_file():
            self._refuse_changes(read_object(self._manifest, f"remove the folder {self.folder}, or choose another OUT"))
        elif self.folder.exists() and (not self.folder.is_dir() or any(self.folder.glob("*.parquet"))):
            raise Refusal.at(
                str(self.folder),
                "has no manifest.json, so the inputs of its chunks are unknown",
                "remove the folder, or choose another OUT",
                code="damaged-file",
            )

    def reward_output(self, rank: int) -> Path:
        """Returns the path prefix of files with the last output of reward functions, which are kept after merging."""
        return worker_output(self.out.with_name(f"{self.out.name}.rewards"), rank)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Creates the folder of the chunks and locks it."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise Refusal.at(
                str(self.folder),
                f"cannot be created: {error.strerror}",
                "choose an OUT in a writable folder",
                code="unwritable",
            ) from error
        with RunFolder(self.folder).lock():
            # Another process may have changed the folder since the first check.
            self.check()
            if not self._manifest.is_file():
                atomic_write_text(self._manifest, json.dumps(self.manifest, indent=2, ensure_ascii=False) + "\n")
            yield

    def finished(self, chunks: int) -> set[int]:
        """Returns the finished chunks. A damaged chunk is reported before missing chunks are sampled."""
        numbers = {number for number in range(chunks) if self._part(number).is_file()}
        for number in sorted(numbers):
            try:
                pq.read_metadata(self._part(number))
            except (OSError, pa.ArrowException) as error:
                raise self._damaged(number, error) from error
        return numbers

    def write(self, number: int, rows: Sequence[dict[str, Any]]) -> None:
        with _replacing(self._part(number)) as aside:
            pq.write_table(pa.Table.from_pylist(list(rows), schema=self.schema), aside)

    def merge(self, chunks: int) -> None:
        """Merges all chunks, in row order, into the file OUT, and deletes the folder of the chunks."""
        with _replacing(self.out) as aside, pq.ParquetWriter(aside, self.schema) as writer:
            for number in range(chunks):
                try:
                    with pq.ParquetFile(self._part(number)) as part:
                        rows = part.read()
                except (OSError, pa.ArrowException) as error:
                    raise self._damaged(number, error) from error
                writer.write_table(rows)
        shutil.rmtree(self.folder)

    def _damaged(self, number: int, error: Exception) -> Refusal:
        remedy = "remove the file and run the same command again"
        return Refusal.at(str(self._part(number)), f"is damaged: {error}", remedy, code="damaged-file")

    @property
    def _manifest(self) -> Path:
        return self.folder / "manifest.json"

    def _part(self, number: int) -> Path:
        return self.folder / f"{number:05}.parquet"

    def _refuse_changes(self, before: dict[str, Any]) -> None:
        old, new = flatten(before), flatten(self.manifest)
        changed = [key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key)]
        if changed:
            raise Refusal(
                [
                    Problem(
                        key.replace(".", " ", 1),
                        f"{self.folder} was started with {old.get(key)!r}, and the value is now {new.get(key)!r}",
                        f"restore the old value, remove the folder {self.folder}, or choose another OUT",
                        code="changed-setting",
                    )
                    for key in changed
                ]
            )


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file that replaces `path` when the temporary file is complete and on disk."""
    try:
        with written_aside(path) as aside:
            yield aside
    except OSError as error:
        raise unwritten(path, error, "run the same command to resume from the finished chunks") from error


@dataclass(frozen=True)
class Job:
    """The questions, the model and the rewards of a sampling job."""

    model: str
    data: str
    out: Path
    n: int
    sampling: Sampling
    reward: Reward
    rows: int | None = None
    system: str | None = None
    dtype: str = "fp32"
    chunk: int = 64
    """The number of questions per saved chunk."""
    first: int = 0
    """The index of the first row to use."""
    columns: NamedColumns = BY_NAME
    conversations: ConversationOptions = NO_CONVERSATIONS


@dataclass
class SamplingPace:
    """The number of tokens that all processes generated, and the seconds that generation took."""

    tokens: int = 0
    seconds: float = 0.0


def sample_responses(job: Job, device_name: str) -> None:
    """Samples, scores and stores responses. An interrupted job resumes if it is started again with the same options."""
    refuse_options(job.dtype, job.n, job.sampling.temperature)
    device, sentence = explain(device_name)
    with joined(device) as world:
        console = Console.open() if world.main else Console.silent()
        console.say(sentence)
        folder = model_folder(job.model)
        refuse_judge(folder, job.model)
        tokenizer = load_tokenizer(folder)
        rows = read_rows(job.data)
        if job.first >= len(rows):
            raise Refusal.at(
                "--first",
                f"{job.first} is beyond the last of {len(rows):,} rows",
                "use a smaller number",
                code="out-of-range",
            )
        settings = job.conversations.settings(free_cache=False)
        columns = read_by_rewards(job.reward, environment=job.conversations.gives_rewards)
        columns |= {COLUMNS} if job.conversations.any else frozenset()
        reader = option_images(rows, job.first, job.rows, folder, tokenizer, job.data)
        questions = read_option_questions(rows, job.rows, job.columns, first=job.first, required=columns, images=reader)
        prompts = encode_questions(tokenizer, questions, job.system, images=None if reader is None else folder)
        refuse_all(
            more_than_text(prompts) + over_context(prompts, job.sampling.max_tokens, load_config(folder)), "rows"
        )
        refuse_long_answers(prompts, job.sampling.max_tokens, folder)
        manifest = manifest_of(job, folder, rows.fingerprint)
        if reader is not None:
            digests = "".join(ref.digest for question in questions for ref in question.images)
            manifest["images"] = hashlib.sha256(digests.encode()).hexdigest()
        parts = Parts(job.out, manifest, reader, conversations=job.conversations.any)
        if world.main:
            parts.check()
        torch_device, output = device.torch_device(world.local_rank), parts.reward_output(world.rank)
        given = (job.reward, prompts, torch_device, console, output)
        with opened_scorer(*given, conversations=job.conversations) as scorer:
            # All chunks use the same weights, so the KV cache and the CUDA graphs are kept (free_cache).
            images = reader is not None
            generator = load_generator(folder, tokenizer, job.dtype, device, world, console, settings, images=images)
            with closing(generator), parts.locked() if world.main else nullcontext():
                pace = _sample(job, prompts, generator, scorer, parts, world, console)
                if world.main:
                    parts.merge(_chunks(job, prompts))
                    console.banner(f"{job.model} on {job.data}", summary(job.out, pace))
                    console.say(f"wrote {job.out}")


def manifest_of(job: Job, folder: str, data: str) -> dict[str, Any]:
    """Returns all options and files that responses and rewards depend on, but not the device and the number of
    processes."""
    sampling = job.sampling
    return {
        "MODEL": model_files(folder),
        "DATA": data,
        "--n": job.n,
        "--temperature": sampling.temperature,
        "--top-p": sampling.top_p,
        "--top-k": sampling.top_k,
        "--min-p": sampling.min_p,
        "--max-new-tokens": sampling.max_tokens,
        "--seed": sampling.seed,
        "--rows": job.rows,
        "--first": job.first,
        "--system": job.system,
        "--dtype": job.dtype,
        "--chunk": job.chunk,
        # These options are in the manifest only if they are set, so that jobs with manifests of earlier versions can
        # resume.
        **({"--prompt-key": job.columns.prompt} if job.columns.prompt else {}),
        **({"--label-key": job.columns.label} if job.columns.label else {}),
        **job.conversations.identity(),
        **identity_of(job.reward),
    }


def more_than_text(prompts: Sequence[Prompt]) -> list[Problem]:
    """Returns one problem per prompt with message keys other than role and content, which a stored row would lose."""
    problems: list[Problem] = []
    for prompt in prompts:
        keys = {key for message in prompt.question.prompt for key, value in message.items() if value is not None}
        if more := sorted(keys - {"role", "content"}):
            why = f"a message of the prompt has {', '.join(more)}; samples keep role and content only"
            problems.append(
                Problem(str(prompt.question.origin), why, "remove the key from the row", code="lost-content")
            )
    return problems


def _chunks(job: Job, prompts: Sequence[Prompt]) -> int:
    return -(-len(prompts) // job.chunk)


def _sample(
    job: Job,
    prompts: Sequence[Prompt],
    generator: Generator,
    scorer: Scorer,
    parts: Parts,
    world: World,
    console: Console,
) -> SamplingPace:
    """Samples the missing chunks. Random seeds depend on the row, so the chunk size does not change responses."""
    chunks = _chunks(job, prompts)
    # Only rank 0 reads and writes the chunks.
    done = world.gather(parts.finished(chunks) if world.main else set[int]())[0]
    if done:
        console.say(f"{parts.folder} has {len(done)} of {chunks} chunks; resuming")
    sampling = replace(job.sampling, stop_ids=generator.stop_ids)
    spans = {
        number: range(number * job.chunk, min((number + 1) * job.chunk, len(prompts)))
        for number in range(chunks)
        if number not in done
    }
    pace = SamplingPace()
    try:
        with console.task("Sampling", job.n * sum(map(len, spans.values()))) as task:
            for number, span in spans.items():
                start = time.perf_counter()
                made = generator.generate(
                    [prompts[row] for row in span],
                    [job.first + row for row in span],
                    job.n,
                    sampling,
                    scorer,
                    advance=lambda done: task.advance(done * world.size),
                )
                pace.seconds += time.perf_counter() - start
                pace.tokens += sum(len(rollout.ids) for rollout in made)
                refuse_failures(made, job.reward.max_failures, parts.folder)
                if world.main:
                    rows = [sample_row(one, job.first + span[one.prompt_index], parts.images) for one in made]
                    parts.write(number, rows)
    except KeyboardInterrupt:
        raise Interrupted(
            f"stopped; {parts.folder} keeps the finished chunks; run the same command to resume"
        ) from None
    return pace


def summary(out: Path, pace: SamplingPace) -> list[tuple[str, str]]:
    """Returns statistics of the output file. Reward statistics include only the scored responses."""
    table = pq.ParquetFile(out).read(["question", "reward", "stop", "tokens"])
    scored = table.filter(pc.is_valid(table["reward"]))
    rewards = scored["reward"].to_numpy()
    best = scored.group_by("question").aggregate([("reward", "max")])["reward_max"].to_numpy()
    cut = pc.sum(pc.equal(table["stop"], "length")).as_py()
    rows = [
        ("questions", f"{pc.count_distinct(table['question']).as_py():,}"),
        ("responses", f"{len(table):,}, {cut:,} truncated at the length limit"),
        ("tokens", f"{pc.sum(table['tokens']).as_py():,}"),
        ("failures", f"{len(table) - len(scored):,} could not be scored"),
    ]
    if len(scored):
        rows += [
            ("mean reward", f"{rewards.mean():.4f}"),
            ("scored 1", f"{(rewards >= 1).mean():.4f} of the responses have a reward of 1 or more"),
            ("best of n", f"{best.mean():.4f} is the mean of the best reward per question"),
        ]
    if pace.tokens:
        rows.append(("speed", f"{pace.tokens / pace.seconds:,.0f} tokens/s"))
    return rows
