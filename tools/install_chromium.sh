#!/bin/sh
# Chromium for the tests of report.html: installed where that can be done without asking, named where it cannot.
set -eu
for name in chromium chromium-browser google-chrome google-chrome-stable; do
    if command -v "$name" >/dev/null; then exit 0; fi
done

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "no Chromium found: tests/e2e/test_parity_report.py will be skipped (on Debian: sudo apt-get install chromium)"
    exit 0
fi

# From here on nothing is skipped: a machine that could have a browser and has none did not test the page.
log=$(mktemp)
install() {
    apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends \
        -o DPkg::Lock::Timeout=120 chromium fonts-dejavu-core
}
echo "installing Chromium with apt-get"
if ! install >"$log" 2>&1 && ! install >"$log" 2>&1; then
    tail -n 20 "$log"
    echo "Chromium could not be installed: the page of \`lockstep compare\` cannot be tested here"
    exit 1
fi
rm -f "$log"
