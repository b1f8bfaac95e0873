#!/bin/sh
# The first hour of a new user: rows in the usual formats, SFT, DPO, GRPO with a reward function, the server, the page, a
# comparison and the export. It runs offline on the CPU, with the tiny model. The first step that fails ends it.
#
#   sh tools/first_hour.sh [FOLDER]       a new folder; default: a temporary one, which is removed
#   sh tools/first_hour.sh migration      scripts of verl and OpenRLHF, until their recipes train
#   sh tools/first_hour.sh agents         an own environment, tool and agent, with the usual mistakes
#   sh tools/first_hour.sh ascend         a first run on an NPU, and the proof that it trains like the CPU. On the
#                                         emulator: sh tools/test_ascend.sh tests/ascend/test_first_hour.py
set -eu
hour=first
case ${1-} in migration | agents | ascend) hour=$1; shift ;; esac
here=$(cd "$(dirname "$0")" && pwd)
if [ $# -gt 0 ]; then folder=$1; else folder=$(mktemp -d); kept=; fi
mkdir -p "$folder"
cd "$folder"
server=
end() { [ -z "$server" ] || kill "$server" 2>/dev/null || true; [ -n "${kept-x}" ] || rm -rf "$folder"; }
trap end EXIT
say() { printf '\n== %s\n' "$*"; }
parts() { python "$here/first_hour.py" "$@"; }
# A server in the background, and the link in what it prints.
start() { "$@" >server.log 2>&1 & server=$!; link=$(parts link server.log "$server") || { cat server.log; exit 1; }; }
# TERM and not INT, which a shell has its background commands ignore.
stop() { kill "$server"; wait "$server" || true; server=; }

# A command that must fail, and say this.
refused() {
    wanted=$1; shift
    if "$@" >refused.txt 2>&1; then cat refused.txt; echo "not refused: $*"; exit 1; fi
    tr -s ' \n' ' ' <refused.txt | grep -qF -e "$wanted" || { cat refused.txt; echo "does not say: $wanted"; exit 1; }
    echo "refused: $wanted"
}
# What a terminal of 80 columns shows. A command and a word, such as a path, cannot be folded.
fits() { awk 'length > 80 && / [^ ]+ / && !/-m lockstep/ { print; bad = 1 } END { exit bad }' "$1"; }

migration() {
    lockstep tiny model
    lockstep data arithmetic data --train-rows 32 --val-rows 8
    lockstep data preferences pairs --train-rows 16 --val-rows 8

    say "1. GRPO of verl: a script with variables of the caller"
    cat >grpo.sh <<'END'
set -x
prompt_length=$((64 * 2))
train_files=${TRAIN_FILES:-"$DATA/train.parquet"}
python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo \
    data.train_files="$train_files" data.val_files=$DATA/val.parquet \
    data.train_batch_size=8 data.max_prompt_length=$prompt_length data.max_response_length=16 \
    actor_rollout_ref.model.path=$HOME/models/Qwen2.5-0.5B-Instruct \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.n=4 \
    trainer.logger='["console"]' trainer.n_gpus_per_node=8 trainer.default_local_dir=$2 \
    trainer.total_training_steps=2 "${@:3}"
END
    refused "lockstep migrate grpo.sh DATA=VALUE" lockstep migrate grpo.sh
    lockstep migrate grpo.sh DATA=data 8 runs -o grpo.yaml 2>report.txt
    tail -n 3 report.txt
    fits report.txt
    lockstep migrate --verify grpo.sh DATA=data 8 runs >table.txt
    fits table.txt
    lockstep train grpo.yaml device=cpu --smoke
    refused "no such folder" lockstep train grpo.yaml device=cpu
    lockstep train grpo.yaml device=cpu model.path=model model.dtype=fp32

    say "2. SFT of verl: a script with arguments"
    cat >sft.sh <<'END'
nproc_per_node=$1
save_path=$2
shift 2
torchrun --standalone --nnodes=1 --nproc_per_node=$nproc_per_node -m verl.trainer.fsdp_sft_trainer \
    data.train_files=data/train.parquet data.val_files=data/val.parquet data.train_batch_size=8 \
    data.prompt_key=extra_info data.response_key=extra_info \
    data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] \
    data.micro_batch_size_per_gpu=4 model.partial_pretrain=${MODEL:-model} trainer.total_epochs=1 trainer.logger=console \
    trainer.default_local_dir=$save_path trainer.experiment_name=sft model.lora_rank=4 $@
END
    lockstep migrate sft.sh -o sft.yaml 2>&1 | grep -F "lockstep migrate sft.sh ARGUMENT1 ARGUMENT2"
    lockstep migrate sft.sh 1 runs -o sft.yaml 2>&1 | tail -n 3
    lockstep train sft.yaml device=cpu model.dtype=fp32

    say "3. DPO of OpenRLHF: a here-document"
    cat >dpo.sh <<'END'
read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo --model.model_name_or_path model --data.dataset ${DATASET} --ckpt.output_dir runs/dpo \
   --data.apply_chat_template --data.prompt_key prompt --data.chosen_key chosen --data.rejected_key rejected \
   --train.max_epochs 1 --train.batch_size 8 --train.micro_batch_size 4 --data.max_len 256 --adam.lr 1e-4 --model.beta 0.1
EOF
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
END
    refused "lockstep migrate dpo.sh DATASET=VALUE" lockstep migrate dpo.sh
    lockstep migrate dpo.sh DATASET=pairs/pairs_train.parquet -o dpo.yaml 2>&1 | tail -n 3
    lockstep train dpo.yaml device=cpu model.dtype=fp32
}

agents() {
    lockstep tiny model
    lockstep data calculator calculator --train-rows 4 --val-rows 2
    cat >games.py <<'END'
from lockstep.environments import Start, Turn


class Guess:
    def reset(self, row, seed):
        self.number = int(row["ground_truth"])
        return Start(row["prompt"])

    def step(self, reply):
        right = str(self.number) in reply.content
        return Turn([] if right else [{"role": "user", "content": "no"}], reward=float(right), done=right)


class Raises(Guess):
    def step(self, reply):
        return Turn([], reward=1 / 0, done=True)


class Number(Guess):
    def step(self, reply):
        return 1.0


class Signature(Guess):
    def reset(self, row):
        return Start(row["prompt"])


class Arguments(Guess):
    def __init__(self, low):
        self.low = low


class Endless(Guess):
    async def step(self, reply):
        print("the reply was", reply.content)
        return Turn([{"role": "user", "content": "go on"}])


def product(a: int, b: int) -> str:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a * b)


def untyped(a, b):
    """Multiplies two numbers."""
    return str(a * b)


def agent(row, base_url):
    from openai import OpenAI

    messages = list(row["prompt"])
    for _ in range(2):
        reply = OpenAI(base_url=base_url).chat.completions.create(model="policy", messages=messages).choices[0].message
        messages += [reply.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
    return float(row["ground_truth"] in (reply.content or ""))


def without_reward(row, base_url):
    agent(row, base_url)
END
    cat >rows.jsonl <<'END'
{"data_source": "guess", "prompt": [{"role": "user", "content": "Guess my digit."}], "reward_model": {"ground_truth": "3"}}
END
    cat >guess.yaml <<'END'
method: grpo
device: cpu
run: {name: guess, steps: 2, export: false}
model: {path: model}
data: {train: rows.jsonl}
batch: {prompts: 1}
rollout: {n: 2, max_tokens: 160, turn_tokens: 8, max_turns: 3, environment: "games.py:Guess"}
END
    with="lockstep train guess.yaml run.name=mistake rollout.environment"
    tools="data.train=calculator/train.parquet data.template=calculator/template.jinja rollout.environment=null"

    say "1. an environment, a tool, an agent"
    lockstep train guess.yaml
    # shellcheck disable=SC2086
    lockstep train guess.yaml run.name=tool $tools 'rollout.tools=[games.py:product]'
    lockstep train guess.yaml run.name=agent rollout.environment=null rollout.agent=games.py:agent

    say "2. the usual mistakes, and what is said"
    # shellcheck disable=SC2086
    refused "step raised ZeroDivisionError: division by zero (games.py line 16)" $with=games.py:Raises
    # shellcheck disable=SC2086
    refused "step returned 1.0, expected Turn(...)" $with=games.py:Number
    # shellcheck disable=SC2086
    refused "write: def reset(self, row, seed)" $with=games.py:Signature
    # shellcheck disable=SC2086
    refused "rollout.environment_args" $with=games.py:Arguments
    # shellcheck disable=SC2086
    refused "those of the file are: Guess" $with=games.py:guess
    # shellcheck disable=SC2086
    refused "write games.py:NAME" $with=games.py
    # shellcheck disable=SC2086
    refused "file game.py does not exist" $with=game.py:Guess
    refused "did you mean rollout.environment?" lockstep train guess.yaml rollout.enviroment=games.py:Guess
    # shellcheck disable=SC2086
    refused "missing a type hint" lockstep train guess.yaml $tools 'rollout.tools=[games.py:untyped]'
    # shellcheck disable=SC2086
    refused "run returned no reward" $with=null rollout.agent=games.py:without_reward
    lockstep train guess.yaml run.name=endless rollout.environment=games.py:Endless 2>&1 | tee said.txt
    grep -q "a limit ends over half of the trajectories" said.txt
    grep -q "the reply was" runs/endless/rollout/*.log
}

ascend() {
    # The environment of the emulator has no scripts.
    lockstep() { python -m lockstep "$@"; }
    lockstep tiny model
    lockstep data arithmetic data --train-rows 64 --val-rows 8
    cat >reward.py <<'END'
def letters(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 20
END
    cat >my.yaml <<'END'
method: grpo
run: {name: my, steps: 8}
model: {path: model}
data: {train: data/train.parquet}
batch: {prompts: 4}
rollout: {n: 4, max_tokens: 16}
reward: {function: "reward.py:letters"}
optim: {lr: 1e-3}
END
    rows="model.path=model data.train=data/sft_train.parquet data.val=data/sft_val.parquet val.questions=null"
    small="run.steps=8 optim.warmup=1"

    say "1. the machine"
    if [ -n "${LOCKSTEP_EMULATED:-}" ]; then
        refused "CANN: not found -> install the CANN toolkit" python -m lockstep doctor --device npu
    else
        lockstep doctor --device npu
    fi

    say "2. a first run"
    # shellcheck disable=SC2086
    lockstep train sft-arithmetic device=npu $rows $small 2>&1 | tee said.txt
    grep -q "device npu, as requested" said.txt
    grep -q "npu_rms_norm" said.txt
    lockstep generate runs/sft-arithmetic "What is 2 + 3?" --max-new-tokens 8

    say "3. two devices"
    # shellcheck disable=SC2086
    python -m torch.distributed.run --standalone --nproc-per-node 2 -m lockstep train sft-arithmetic device=npu \
        $rows $small run.name=two
    lockstep compare runs/sft-arithmetic runs/two

    say "4. the usual mistakes, and what is said"
    # shellcheck disable=SC2086
    refused "ASCEND_RT_VISIBLE_DEVICES='77' leaves no device visible" \
        env ASCEND_RT_VISIBLE_DEVICES=77 python -m lockstep train sft-arithmetic device=npu $rows $small
    refused "set the environment variable ASCEND_RT_VISIBLE_DEVICES=0" python -m lockstep train my.yaml device=npu:0
    refused "did you mean npu?" python -m lockstep train my.yaml device=npus
    refused "rollout.engine" python -m lockstep train my.yaml device=npu rollout.engine=vllm
    refused "model.attention" python -m lockstep train my.yaml device=npu model.attention=triton

    say "5. moving a recipe with proof: docs/to-ascend.md"
    lockstep train my.yaml device=cpu run.name=trusted tape=true tape.every=3
    for number in 1 2 3; do lockstep train my.yaml device=cpu run.name=again-$number; done
    lockstep train my.yaml device=npu --smoke
    lockstep replay runs/trusted --device npu --checklist
    lockstep replay runs/trusted --device npu
    lockstep train my.yaml device=npu run.name=on-npu
    lockstep compare runs/trusted runs/on-npu --repeat runs/again-1 --repeat runs/again-2 --repeat runs/again-3

    say "6. another reward function on the new machine is found"
    sed -i 's,/ 20,/ 21,' reward.py
    code=0
    lockstep replay runs/trusted --device npu >said.txt 2>&1 || code=$?
    cat said.txt
    [ "$code" = 1 ]
    grep -q "reward" said.txt
}

if [ "$hour" != first ]; then
    "$hour"
    say "the hour of $hour is over, and all of it worked"
    exit
fi

say "1. what is here: lockstep --version, doctor, recipes"
lockstep --version
lockstep doctor --device cpu
lockstep recipes >recipes.txt
grep -q '^grpo-arithmetic ' recipes.txt

say "2. a model to play with: lockstep tiny model"
lockstep tiny model

say "3. own rows, as people have them"
parts rows rows
lockstep init sft.yaml --method sft --model model --data rows/messages.jsonl --val rows/messages.jsonl
for form in messages openai alpaca sharegpt prompt_completion question_answer text; do
    say "   lockstep data show: rows/$form.jsonl"
    lockstep data show sft.yaml --rows 1 "data.train=rows/$form.jsonl" >shown.txt || { cat shown.txt; exit 1; }
    parts shown shown.txt "$form"
done

say "4. a recipe is tried before it is trained: --smoke, plan"
lockstep train sft.yaml --smoke
lockstep plan sft.yaml

say "5. SFT, on rows of all those forms"
every='[rows/messages.jsonl, rows/openai.jsonl, rows/alpaca.jsonl, rows/sharegpt.jsonl, rows/prompt_completion.jsonl]'
small="device=cpu batch.rows_per_update=8 val.every=10 log.every=5"
# shellcheck disable=SC2086
lockstep train sft.yaml $small run.epochs=null run.steps=20 optim.lr=1e-3 "data.train=$every"
lockstep generate runs/sft "What is 2 + 3?" --max-new-tokens 24

say "6. DPO from there, on pairs"
lockstep init dpo.yaml --method dpo --model runs/sft/export --data rows/pairs.jsonl
lockstep train dpo.yaml device=cpu run.epochs=null run.steps=10 batch.rows_per_update=8 optim.lr=1e-4 log.every=5

say "7. GRPO from there, with a reward of one's own"
parts reward reward.py
lockstep init grpo.yaml --method grpo --model runs/sft/export --data rows/prompts.jsonl --reward reward.py:score
lockstep train grpo.yaml device=cpu run.steps=4 batch.prompts=8 rollout.n=4 rollout.max_tokens=24 optim.lr=1e-4
parts rewarded runs/grpo

say "8. how good is it: lockstep eval"
lockstep eval runs/grpo rows/questions.jsonl --rows 8 --max-new-tokens 24

say "9. other programs talk to it: lockstep serve"
start lockstep serve runs/grpo --port "$(parts port)"
lockstep generate runs/grpo "What is 2 + 3?" --max-new-tokens 24 >said.txt
parts ask "$link" said.txt
stop

say "10. look at the runs: lockstep view"
start lockstep view runs
parts page "$link" sft dpo grpo
stop

say "11. the same run once more, and did the two train in step? lockstep compare"
# shellcheck disable=SC2086
lockstep train sft.yaml $small run.epochs=null run.steps=20 optim.lr=1e-3 "data.train=$every" run.name=again
lockstep compare runs/sft runs/again

say "12. a folder for others: lockstep export, and plain transformers"
lockstep export runs/grpo exported
parts load exported said.txt

say "the first hour is over, and all of it worked"
