#!/bin/sh
# The recorder in the trainers of an old stack: torch 2.5.1, verl 0.4.1 and TRL 0.17.0, and in TRL as constraints.txt has
# it. Their loops run on the CPU, and lockstep judges what they recorded. Arguments go to pytest.
#
# The old stack has an environment of its own (about 6 GB: torch 2.5.1 brings CUDA on x86_64).
# Variables with several words are several arguments.
# shellcheck disable=SC2086
set -eu
old=${RECORDER_VENV:-.venv-recorder}
shared=${VENV:-.venv}
needed="torch==2.5.1 numpy<2.3 transformers==4.51.3 accelerate==1.6.0 trl==0.17.0 datasets==3.5.0 peft==0.15.2
tensordict==0.6.2 omegaconf==2.3.0 hydra-core==1.3.2 codetiming ray==2.46.0 torchdata pandas pyarrow pylatexenc"
skip() { printf 'SKIPPED test-recorder: %s\n' "$*"; exit 0; }

[ -e "$shared/.test" ] || { echo "there is no environment in $shared: run \`make test-recorder\`"; exit 1; }
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
wanted=$({ cat constraints.txt tools/test_recorder.sh; packages "$shared"; } | cksum)
if [ "$(cat "$old/.installed" 2>/dev/null)" != "$wanted" ]; then
    for venv in "$old" "$old-trl"; do
        "$shared/bin/python" -m venv --clear "$venv" || skip "no virtual environment could be made in $venv"
    done
    install() {
        "$1/bin/pip" install --quiet --disable-pip-version-check --no-compile $2 >"$old/install.log" 2>&1 ||
            skip "$2 could not be installed (see $old/install.log)"
    }
    install "$old" "$needed"
    install "$old" "--no-deps verl==0.4.1"
    # The newest TRL beside the torch and transformers of the other environment.
    printf 'import site; site.addsitedir(r"%s")\n' "$(packages "$shared")" >"$(packages "$old-trl")/shared.pth"
    install "$old-trl" "-c constraints.txt trl datasets"
    printf '%s' "$wanted" >"$old/.installed"
fi

[ $# -gt 0 ] || set -- tests/recorder
LOCKSTEP_OLD_STACK=$(cd "$old" && pwd)/bin/python LOCKSTEP_NEW_TRL=$(cd "$old-trl" && pwd)/bin/python OMP_NUM_THREADS=1 \
    exec "$shared/bin/python" -m pytest -p no:cacheprovider -m recorder "$@"
