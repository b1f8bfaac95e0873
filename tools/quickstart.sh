# The main job on the embedded default: a tiny model gets a short supervised start on sums with carry, then GRPO lets it
# learn from its own answers. On the CPU, offline, under four minutes.
set -eu
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

say "1. lockstep tiny quickstart/model"
[ -f quickstart/model/config.json ] || lockstep tiny quickstart/model
say "2. lockstep data arithmetic quickstart/carry --difficulty 2"
lockstep data arithmetic quickstart/carry --difficulty 2
say "3. lockstep train warmup-arithmetic"
lockstep train warmup-arithmetic
say "4. lockstep train grpo-arithmetic"
lockstep train grpo-arithmetic
say "5. lockstep generate runs/grpo-arithmetic \"What is 42 + 37?\""
lockstep generate runs/grpo-arithmetic "What is 42 + 37?"
cat <<'TEXT'

Next:
  lockstep generate runs/grpo-arithmetic --chat   talk to it
  lockstep view                                   its curves and samples, in a browser
  head -n 1 runs/grpo-arithmetic/samples.jsonl    what it said and earned
  lockstep recipes ppo                            what a method sets
  lockstep train grpo-arithmetic method=dapo run.name=dapo
  lockstep plan grpo-arithmetic batch.prompts=64  batches and memory of a run
  lockstep export runs/grpo-arithmetic my-model   a Hugging Face folder
  docs/recipe.md                                  every key of a recipe

Before and after GRPO (reward of sampled answers in training, greedy accuracy on
sums that the model was not trained on):
TEXT
python tools/before_and_after.py runs/grpo-arithmetic
