#!/bin/sh
# Trains SFT, DPO and GRPO twice from one start, holds the two runs of each against each other, replays the tape of the
# first on the second's setting, and puts the verdicts into docs/support-appendix.md (rows that fail too).
#
#   sh tools/record_parity.sh A "KEY=VALUE ..." B "KEY=VALUE ..."
#   sh tools/record_parity.sh cpu device=cpu bf16 "device=cpu model.dtype=bf16"
#
# LOCKSTEP_B is the command for the second side where it is not `lockstep`: "PYTHON tools/ascend_emulator run -m lockstep"
# runs it on the emulated NPU. METHODS, STEPS and SUPPORT choose less, or another table; MODEL another model for every
# method, and MORE further keys of both sides.
# Variables with several words are several arguments.
# shellcheck disable=SC2086
set -eu
name_a=$1 keys_a=$2 name_b=$3 keys_b=$4
LOCKSTEP=${LOCKSTEP:-lockstep}
LOCKSTEP_B=${LOCKSTEP_B:-$LOCKSTEP}
METHODS=${METHODS:-sft dpo grpo}
SUPPORT=${SUPPORT:-docs/support-appendix.md}
MORE="${MODEL:+model.path=$MODEL} ${MORE:-}"
quiet="run.folder=runs/parity run.resume=never run.export=false val.every=null val.at_start=false data.val=[] checkpoint.keep_best=0 log.every=20"

say() { printf '\n%s\n' "$*"; }

say "one start for both sides"
[ -f quickstart/model/config.json ] || $LOCKSTEP tiny quickstart/model
[ -f quickstart/carry/train.parquet ] || $LOCKSTEP data arithmetic quickstart/carry --difficulty 2
[ -f quickstart/preferences/pairs_train.parquet ] || $LOCKSTEP data preferences quickstart/preferences
[ -n "${MODEL:-}" ] || for start in warmup-arithmetic warmup-brevity; do
    [ -f runs/$start/export/config.json ] || $LOCKSTEP train $start log.every=50
done

keys_of() {
    case $1 in
        # From random weights: a curve that moves.
        sft) echo "sft-arithmetic data.train=quickstart/carry/sft_train.parquet val.questions=null run.steps=${STEPS:-100}" ;;
        dpo) echo "dpo-brevity run.steps=${STEPS:-60}" ;;
        # 512 responses a step: the mean reward of fewer is too noisy for a bar of 4 %.
        grpo) echo "grpo-arithmetic batch.prompts=64 batch.tokens=8192 val.questions=null run.steps=${STEPS:-40}" ;;
    esac
}

for method in $METHODS; do
    keys=$(keys_of "$method")
    say "$method: $name_a ($keys_a) against $name_b ($keys_b)"
    a=$method-$name_a${MODEL:+-${MODEL##*/}} b=$method-$name_b${MODEL:+-${MODEL##*/}}
    rm -rf "runs/parity/$b"
    if [ ! -f "runs/parity/$a/env.json" ]; then
        $LOCKSTEP train $keys $quiet $MORE run.name="$a" tape=true tape.every=20 $keys_a
    fi
    $LOCKSTEP_B train $keys $quiet $MORE run.name="$b" $keys_b
    $LOCKSTEP compare "runs/parity/$a" "runs/parity/$b" --record --support "$SUPPORT" || true
    $LOCKSTEP_B replay "runs/parity/$a" $keys_b || true
done
