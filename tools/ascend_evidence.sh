# shellcheck shell=sh
# What a machine with a real Ascend device shows of lockstep, in one folder: sh tools/ascend_evidence.sh
#
# Run it in a checkout, with CANN's set_env.sh sourced. It writes ./ascend-evidence/ and ascend-evidence.tar.gz, takes a
# few minutes and needs no network. PYTHON names an interpreter outside the active virtual environment and .venv.
set -eu
say() { printf '%s\n' "$*"; }
stop() { say "ascend-evidence: $*" >&2; exit 1; }

root=$(CDPATH='' cd -- "$(dirname -- "$0")/.." && pwd)
out=$PWD/ascend-evidence
python=${PYTHON:-${VIRTUAL_ENV:-$root/.venv}/bin/python}
steps=20

# Asked of the driver first: an emulated CANN answers everything else like a real one.
[ -e /dev/davinci_manager ] ||
    stop "no Ascend device here: /dev/davinci_manager is missing (no driver, or not passed into this container)"
case $python in */*) python=$(CDPATH='' cd -- "$(dirname -- "$python")" 2>/dev/null && pwd)/${python##*/} ;; esac
command -v "$python" >/dev/null ||
    stop "no interpreter at $python: install lockstep with the extra [npu,test], or set PYTHON"
reason=$("$python" -c 'from lockstep.device.npu import Npu; print(Npu().unavailable() or "")') ||
    stop "lockstep does not start: install it with the extra [npu,test]"
[ -z "$reason" ] || stop "no Ascend device can be used here: $reason"
mkdir "$out" 2>/dev/null || stop "$out is there already: move it away first"

say "1. the machine"
"$python" -m lockstep doctor --device npu --json >"$out/doctor.json" ||
    say "   the doctor found something broken: see doctor.json"
npu-smi info >"$out/npu-smi.txt" 2>&1 || say "   npu-smi gives no answer: see npu-smi.txt"
"$python" -m pip freeze >"$out/packages.txt" 2>&1 || say "   pip gives no answer: see packages.txt"

say "2. the tests marked ascend_hardware"
tests=pass
(cd "$root" && "$python" -m pytest -m ascend_hardware -p no:cacheprovider --junitxml "$out/tests.xml" \
    tests/ascend/test_hardware.py) >"$out/tests.log" 2>&1 || tests=FAIL
# Skipped tests show nothing, and pytest calls them a success.
tail -n 1 "$out/tests.log" | grep -q passed || tests=FAIL
tail -n 1 "$out/tests.log"

say "3. the tiny model on npu and on cpu, $steps steps a method"
mkdir "$out/work" "$out/runs"
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

for device in cpu npu; do
    run sft-arithmetic sft "$device" data.train=sums/sft_train.parquet data.val=sums/sft_val.parquet val.questions=null
    run dpo-brevity dpo "$device" data.train=pairs/pairs_train.parquet data.val=pairs/pairs_val.parquet
    run grpo-arithmetic grpo "$device" data.train=sums/train.parquet val.questions=null val.every=null \
        reward.function=reward.py:letters
done

say "4. mean relative errors of npu against cpu"
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
cat "$out/errors.txt"

cd "$out/.."
rm -r "$out/work"
printf 'tests %s\nruns %s\n' "$tests" "$runs" >"$out/verdict.txt"
tar -czf ascend-evidence.tar.gz ascend-evidence
say "tests: $tests, runs: $runs"
say "Look through $out (it names your packages, paths and devices), then send ascend-evidence.tar.gz back."
[ "$tests $runs" = "pass pass" ]
