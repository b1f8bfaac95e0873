#!/bin/sh
# A newcomer's first hour, from the first word to a model that other programs load: own rows in the forms in which people
# have them, SFT, DPO, GRPO with an own reward, the endpoint, the page, a comparison and the export. Offline, on the CPU,
# with the tiny model. Every step is checked; the first that is not as it should be ends it.
#
#   sh tools/first_hour.sh [FOLDER]       a new folder; default: a temporary one, which is removed
set -eu
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
