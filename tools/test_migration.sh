#!/bin/sh
# Updates of migrated commands against verl, OpenRLHF and TRL themselves, in the versions whose commands are understood.
# Arguments go to pytest: sh tools/test_migration.sh tests/migration/test_verl.py -k GSPO
#
# They have an environment of their own, and no dependency of theirs but the few that their losses import: neither a
# device nor a cluster is needed. All else is found in the other environment (VENV, made by `make test-migration`).
set -eu
venv=${PEERS_VENV:-.venv-peers}
shared=${VENV:-.venv}
verl="0.4.1 0.9.1"
# Further versions, whose reward rules differ.
rewards="0.3.0.post1 0.6.0 0.9.0"
openrlhf="0.7.5 0.11.2"
needed="omegaconf==2.3.0 antlr4-python3-runtime==4.9.3 tensordict==0.15.3 pyvers==0.2.3 cloudpickle==3.1.2 codetiming==1.4.0"
needed="$needed torchdata==0.11.0 mathruler==0.1.0"
reason() { { grep -m 1 ERROR "$1" || tail -n 1 "$1"; } | sed 's/^ *//'; }
skip() { printf 'SKIPPED test-migration: %s\n' "$*"; exit 0; }

[ -e "$shared/.test" ] || { echo "there is no environment in $shared: run \`make test-migration\`"; exit 1; }
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
stamp=$venv/.installed
wanted=$({ cat pyproject.toml constraints.txt constraints-common.txt tools/test_migration.sh; packages "$shared"; } | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    "$shared/bin/python" -m venv --clear "$venv" || skip "no virtual environment could be made in $venv"
    printf 'import site; site.addsitedir(r"%s")\n' "$(packages "$shared")" >"$(packages "$venv")/shared.pth"
    log=$venv/install.log
    install() {
        "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps "$@" >"$log" 2>&1 ||
            skip "$* could not be installed: $(reason "$log") (all of it in $log)"
    }
    # shellcheck disable=SC2086
    install $needed
    for version in $verl $rewards; do install --target "$venv/verl-$version" "verl==$version"; done
    # Python files alone, in a wheel that says it is for one platform.
    for version in $openrlhf; do
        install --target "$venv/openrlhf-$version" --only-binary :all: --platform manylinux1_x86_64 \
            --python-version 3.11 "openrlhf==$version"
    done
    # verl uses TRL where it finds it, so TRL is apart.
    install --target "$venv/trl" -c constraints.txt trl datasets dill multiprocess pandas xxhash python-dateutil six
    printf '%s' "$wanted" >"$stamp"
fi

[ $# -gt 0 ] || set -- tests/migration
LOCKSTEP_PEERS=$(cd "$venv" && pwd) OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -p no:cacheprovider -m peers "$@"
