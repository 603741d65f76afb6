#!/usr/bin/env bash
# Kills of saves at system calls that chance picks: `tools/ci/kills.sh [python] [--kills 60] [--seed 7]`. It needs strace,
# which is installed where it can be; without it nothing is tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."

skipped() {
    echo "================================================================================" >&2
    echo "NOT TESTED: kills of saves at system calls ($1)" >&2
    echo "================================================================================" >&2
    exit 0
}

if ! command -v strace >/dev/null; then
    tools/ci/packages.sh strace >/dev/null 2>&1 || skipped "strace is missing and cannot be installed"
fi
probe=$(strace -qq -o /dev/null -e trace=none -e inject=close:signal=CONT:when=1 true 2>&1) ||
    skipped "strace cannot trace here: $probe"
exec "${1:-python}" tools/ci/checkpoint_kills.py "${@:2}"
