#!/bin/sh
# Installs the wheel of `make dist` in a fresh environment of each Python, and runs it in an empty folder. The sdist is
# installed over the wheel and must give the same version.
# PYTHONS="3.12" selects the interpreters, QUICKSTART="" runs the complete quickstart instead of two steps.
set -eu
uv="$PWD/${VENV:-.venv}/bin/uv"
root=$PWD
wheel=$(ls "$PWD"/dist/*.whl)
sources=$(ls "$PWD"/dist/*.tar.gz)
constraints="$PWD/constraints.txt"
short=${QUICKSTART-"run.steps=2 optim.warmup=1"}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "the wheel has every file of src/"
git ls-files src | sed 's|^src/||' | sort >"$work/tracked"
"$uv" run --no-project python -m zipfile -l "$wheel" | awk 'NR > 1 {print $1}' | sort >"$work/packed"
if comm -23 "$work/tracked" "$work/packed" | grep .; then echo "test-dist: these files are not in $wheel"; exit 1; fi

tried='' missing=''
for python in ${PYTHONS:-3.10 3.11 3.12 3.13}; do
    "$uv" venv --quiet --python "$python" "$work/$python" || { missing="$missing $python"; continue; }
    "$uv" pip install --quiet --python "$work/$python" -c "$constraints" "${wheel}[serve]"
    mkdir "$work/empty-$python"
    (
        cd "$work/empty-$python"
        PATH="$work/$python/bin:$PATH"
        python -c 'import sys, platform; print("python", sys.version.split()[0], platform.machine())'
        lockstep --version | grep commit
        lockstep doctor --device cpu >doctor.txt || { cat doctor.txt; exit 1; }
        lockstep doctor --pins cpu >pins.txt
        lockstep recipes grpo-arithmetic >/dev/null
        lockstep help >topics.txt
        for page in "$root"/docs/*.md; do
            topic=$(basename "$page" .md)
            case $topic in *.zh) continue ;; esac
            grep -q "^  $topic " topics.txt || { echo "lockstep help does not list $topic"; exit 1; }
            # The pages are the same files for every Python, so they are printed once.
            test -n "$tried" || lockstep help "$topic" --lang zh | grep -q . || { echo "lockstep help $topic fails"; exit 1; }
        done
        python -c 'import lockstep_record'
        # shellcheck disable=SC2086
        lockstep quickstart $short >quickstart.txt 2>&1 || { cat quickstart.txt; exit 1; }
        tail -n 3 quickstart.txt
        lockstep compare runs/grpo-arithmetic runs/grpo-arithmetic --report same.html | tail -n 1
        test -s same.html
        lockstep --version >wheel.txt
        "$uv" pip install --quiet --python "$work/$python" --no-deps --reinstall-package lockstep-rl "$sources"
        lockstep --version | diff wheel.txt -
        lockstep recipes grpo-arithmetic | grep -q "^method: grpo"
    ) || { echo "test-dist: FAILED with Python $python"; exit 1; }
    tried="$tried $python"
    rm -rf "${work:?}/$python"
done
"$uv" tool run --quiet -c "$constraints" --from "$wheel" lockstep --version
echo "test-dist: passed with Python$tried${missing:+; not found:$missing}"
