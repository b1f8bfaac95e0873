# shellcheck shell=sh
# What a machine with a real Ascend device shows of lockstep, in one archive: sh tools/ascend_evidence.sh
#
# Run it in a checkout, with CANN's set_env.sh sourced. It writes ./ascend-evidence/ and ascend-evidence.tar.gz and needs
# no network. PYTHON names an interpreter outside the active virtual environment and .venv; TESTS is an expression of
# pytest's -k for those who want some of the tests only. With MODEL (the folder of SmolLM2-135M) and GSM8K (the folder of
# train.jsonl and test.jsonl) it also runs both sides of the rows of docs/support.md and writes table.md, whose Ascend
# column they fill; ROWS chooses some of them, STEPS another number of steps. --rows runs nothing else.
# --trial tries the script itself on the emulator:
#   .venv-ascend/bin/python tools/ascend_emulator run -c 'import os; os.execvp("sh", ["sh", "tools/ascend_evidence.sh", "--trial"])'
set -eu
say() { printf '%s\n' "$*"; }
stop() { say "ascend-evidence: $*" >&2; exit 1; }

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
out=$PWD/ascend-evidence
python=${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}
steps=20
repeat=20
trial=
only_rows=
for word in "$@"; do
    case $word in
        --trial) trial=yes steps=4 repeat=1 ;;
        --rows) only_rows=yes ;;
        *) stop "unknown words: $*" ;;
    esac
done
model=
if [ -n "${MODEL:-}${GSM8K:-}$only_rows" ]; then
    [ -f "${MODEL:-}/config.json" ] || stop "the rows need MODEL, the folder of a model: see docs/support.md"
    [ -f "${GSM8K:-}/train.jsonl" ] || stop "the rows need GSM8K, the folder of train.jsonl and test.jsonl: see docs/support.md"
    model=$(CDPATH='' cd -- "$MODEL" && pwd)
    gsm8k=$(CDPATH='' cd -- "$GSM8K" && pwd)
fi

# Asked of the driver first: an emulated CANN answers everything else like a real one.
if [ -n "$trial" ]; then
    [ "${LOCKSTEP_EMULATED:-}" = npu ] || stop "--trial needs the emulator around it, see the first lines of this script"
    export LOCKSTEP_EVIDENCE_TRIAL=1
elif [ ! -e /dev/davinci_manager ] || [ -n "${LOCKSTEP_EMULATED:-}" ]; then
    stop "no Ascend device here: /dev/davinci_manager is missing (no driver, or not passed into this container)"
fi
case $python in */*) python=$(CDPATH='' cd -- "$(dirname -- "$python")" 2>/dev/null && pwd)/${python##*/} ;; esac
command -v "$python" >/dev/null ||
    stop "no interpreter at $python: install lockstep with the extra [npu,test], or set PYTHON"
reason=$("$python" -c 'from lockstep.device.npu import Npu; print(Npu().unavailable() or "")') ||
    stop "lockstep does not start: install it with the extra [npu,test]"
[ -z "$reason" ] || stop "no Ascend device can be used here: $reason"
mkdir "$out" 2>/dev/null || stop "$out is there already: move it away first"

say "lockstep on Ascend: what this machine shows, for one archive to send back."
say "It takes about an hour, most of it in part 2; nobody has timed it on a device yet. Part by part:"
say "  1. the machine: doctor, npu-smi, packages                      less than a minute"
say "  2. the tests marked ascend_hardware, 45 of them                20 to 45 minutes"
say "  3. the fused operators: errors and times                       1 to 3 minutes"
say "  4. SFT, DPO and GRPO of the tiny model, npu against cpu's tape 10 to 20 minutes"
say "  5. throughput of those runs                                    seconds"
say "  6. with MODEL and GSM8K: the rows of docs/support.md           hours, most of them on the CPU"
say "Interrupt it at any time: what is there by then lies in $out."
[ -z "$trial" ] || say "TRIAL on the emulator: nothing of this is a device's number."
say ""

say "1. the machine"
"$python" -m lockstep doctor --device npu --json >"$out/doctor.json" ||
    say "   the doctor found something broken: see doctor.json"
npu-smi info >"$out/npu-smi.txt" 2>&1 || say "   npu-smi gives no answer: see npu-smi.txt"
"$python" -m pip freeze >"$out/packages.txt" 2>&1 || say "   pip gives no answer: see packages.txt"

# rows: both sides of every row of docs/support.md, and the table with the Ascend column
rows="not run (set MODEL and GSM8K)"
run_rows() {
    say "6. the rows of docs/support.md"
    [ -n "$model" ] || return 0
    rows=pass
    mkdir "$out/rows"
    for row in ${ROWS:-sft dpo kto rm prm ppo reinforce_pp reinforce_pp-vllm reinforce_pp-ring grpo grpo-vllm}; do
        case $row in *vllm) "$python" -c 'import vllm' 2>/dev/null || {
            say "   $row: not measured, because vLLM is not installed"
            continue
        } ;; esac
        # shellcheck disable=SC2086  # words of the command
        "$python" "$root/bench/evidence.py" "$row" --pair npu --model "$model" --data "$gsm8k" --out "$out/rows" \
            ${STEPS:+--steps $STEPS} ${trial:+--part} >"$out/rows/$row.log" 2>&1 || rows=FAIL
        say "   $(tail -n 1 "$out/rows/$row.log")"
    done
    set --
    for file in "$out"/rows/*/result.json; do [ ! -f "$file" ] || set -- "$@" "$(dirname -- "$file")"; done
    if [ $# -gt 0 ]; then
        "$python" "$root/bench/evidence.py" table "$@" --results "$out/results" >"$out/table.md" || rows=FAIL
    else
        rows=FAIL
    fi
}

pack() {
    printf '%s\n' "$@" >"$out/verdict.txt"
    [ -z "$trial" ] || say "emulated: a trial of the script, not evidence" >>"$out/verdict.txt"
    tar -czf ascend-evidence.tar.gz ascend-evidence
    say "Look through $out (it names your packages, paths and devices), then send ascend-evidence.tar.gz back."
    case "$*" in *FAIL*) exit 1 ;; esac
}

if [ -n "$only_rows" ]; then
    run_rows
    cd "$out/.."
    say "rows: $rows"
    pack "rows $rows"
    exit 0
fi

say "2. the tests marked ascend_hardware"
tests=pass
(cd "$root" && "$python" -m pytest -m ascend_hardware -p no:cacheprovider --junitxml "$out/tests.xml" \
    ${TESTS:+-k "$TESTS"} tests/ascend/test_hardware.py) >"$out/tests.log" 2>&1 || tests=FAIL
# Skipped tests show nothing, and pytest calls them a success.
tail -n 1 "$out/tests.log" | grep -q passed || tests=FAIL
[ -z "${TESTS:-}" ] || tests="$tests (some only: $TESTS)"
say "   $(tail -n 1 "$out/tests.log")"

say "3. the fused operators"
kernels=pass
"$python" "$root/tools/ascend_kernels.py" --repeat "$repeat" >"$out/kernels.txt" 2>"$out/kernels.log" || kernels=FAIL
sed 's/^/   /' "$out/kernels.txt"

say "4. the tiny model, $steps steps a method: recorded on cpu, replayed and trained on npu"
mkdir "$out/work" "$out/runs" "$out/parity"
cd "$out/work"
cat >reward.py <<'PYTHON'
"""Rewards different letters: an untrained model earns something."""


def letters(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 20
PYTHON
for words in "tiny model" "data arithmetic sums" "data preferences pairs"; do
    # shellcheck disable=SC2086  # the words of one command
    "$python" -m lockstep $words >prepare.log 2>&1 || { cat prepare.log >&2; stop "lockstep $words failed"; }
done

# run RECIPE METHOD DEVICE key=value ...
run() {
    recipe=$1
    name=$2-$3
    device=$3
    shift 3
    mkdir "$out/runs/$name"
    state="done"
    "$python" -m lockstep train "$recipe" "run.name=$name" "device=$device" "run.steps=$steps" run.export=false \
        model.path=model val.at_start=false optim.warmup=2 optim.eps=1e-4 "$@" >"$out/runs/$name/run.log" 2>&1 ||
        state="FAILED, see runs/$name/run.log"
    for file in metrics.jsonl env.json recipe.yaml samples.jsonl; do
        [ ! -f "runs/$name/$file" ] || cp "runs/$name/$file" "$out/runs/$name/"
    done
    say "   $name: $state"
}

# replay METHOD: every stage of the recorded steps, on npu from cpu's own weights
parity=pass
replay() {
    state="in step"
    # A replay validates nothing, and a recipe that asks for it would be refused.
    "$python" -m lockstep replay "runs/$1-cpu" --device npu val.every=null >"$out/parity/$1.txt" 2>&1 || {
        state="NOT in step"
        parity=FAIL
    }
    for file in runs/"$1"-cpu/replays/*/replay.json; do
        [ ! -f "$file" ] || cp "$file" "$out/parity/$1.json"
    done
    say "   $1 replayed on npu: $state, see parity/$1.txt"
}

for device in cpu npu; do
    tape=tape=false
    [ "$device" = npu ] || tape="tape=true tape.every=$((steps / 4))"
    # shellcheck disable=SC2086  # words of the command
    run sft-arithmetic sft "$device" $tape data.train=sums/sft_train.parquet data.val=sums/sft_val.parquet val.questions=null
    # shellcheck disable=SC2086
    run dpo-brevity dpo "$device" $tape data.train=pairs/pairs_train.parquet data.val=pairs/pairs_val.parquet
    # shellcheck disable=SC2086
    run grpo-arithmetic grpo "$device" $tape data.train=sums/train.parquet val.questions=null val.every=null \
        reward.function=reward.py:letters
done
for method in sft dpo grpo; do replay "$method"; done

say "   mean relative errors of npu against cpu"
runs=pass
"$python" - "$out/runs" "$steps" >"$out/errors.txt" <<'PYTHON' || runs=FAIL
import sys
from pathlib import Path

from lockstep.run.metrics import read_metrics

BARS = {"sft": ("train/loss", 0.02), "dpo": ("train/loss", 0.02), "grpo": ("critic/score/mean", 0.04)}
folder, steps = Path(sys.argv[1]), int(sys.argv[2])
missed = 0
for method, (name, bar) in BARS.items():
    files = [folder / f"{method}-{device}" / "metrics.jsonl" for device in ("npu", "cpu")]
    npu, cpu = ([metrics[name] for _, metrics in read_metrics(file)] if file.exists() else [] for file in files)
    if len(npu) == len(cpu) == steps:
        error = sum(abs(a - b) / max(abs(b), 1e-8) for a, b in zip(npu, cpu)) / steps
        verdict = "pass" if error <= bar else "FAIL"
        print(f"{method:<6}{name:<20}{error:10.5%}  {verdict} (at most {bar:.0%})")
    else:
        verdict = "FAIL"
        print(f"{method:<6}{name:<20}{verdict} (npu has {len(npu)} steps and cpu {len(cpu)}, of {steps})")
    missed += verdict == "FAIL"
sys.exit(missed > 0)
PYTHON
sed 's/^/   /' "$out/errors.txt"

say "5. throughput, tokens a second (median of the second half of each run)"
"$python" - "$out/runs" >"$out/throughput.txt" <<'PYTHON' || say "   no throughput: see throughput.txt"
import statistics
import sys
from pathlib import Path

from lockstep.run.metrics import read_metrics

for folder in sorted(Path(sys.argv[1]).iterdir()):
    if (folder / "metrics.jsonl").exists():
        found = [metrics for _, metrics in read_metrics(folder / "metrics.jsonl")]
        late = [metrics["perf/throughput"] for metrics in found[len(found) // 2 :] if "perf/throughput" in metrics]
        print(f"{folder.name:<12}{statistics.median(late):12.1f}" if late else f"{folder.name:<12}no figure")
PYTHON
sed 's/^/   /' "$out/throughput.txt"

run_rows

cd "$out/.."
rm -r "$out/work"
say "tests: $tests, kernels: $kernels, parity: $parity, runs: $runs, rows: $rows"
pack "tests $tests" "kernels $kernels" "parity $parity" "runs $runs" "rows $rows"
