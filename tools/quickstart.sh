# The main job on the embedded default: a tiny model learns one-digit sums on the CPU. Offline, under three minutes.
set -eu
say() { printf '\n\033[1m%s\033[0m\n' "$*"; }
[ -t 1 ] || say() { printf '\n%s\n' "$*"; }

say "1. lockstep tiny quickstart/model"
[ -f quickstart/model/config.json ] || lockstep tiny quickstart/model
say "2. lockstep data arithmetic quickstart/data"
lockstep data arithmetic quickstart/data
say "3. lockstep train sft-arithmetic"
lockstep train sft-arithmetic
say "4. lockstep generate runs/sft-arithmetic \"What is 7 + 6?\""
lockstep generate runs/sft-arithmetic "What is 7 + 6?"
cat <<'TEXT'

Next:
  lockstep generate runs/sft-arithmetic --chat    talk to it
  lockstep data show sft-arithmetic               see which tokens are trained
  lockstep plan sft-arithmetic batch.tokens=512   batches and memory of a run
  lockstep train sft-arithmetic run.name=lora model.lora.rank=8
  lockstep export runs/sft-arithmetic my-model    a Hugging Face folder
  docs/recipe.md                                  every key of a recipe
TEXT
