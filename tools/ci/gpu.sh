#!/usr/bin/env bash
# What needs a CUDA device: `tools/ci/gpu.sh [python]`. The doctor's rows, the tests that are marked gpu, and the table of
# docs/dev/gpu.md as it is after this run. Where there is no device nothing is tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "================================================================================" >&2
    echo "NOT TESTED: CUDA (torch sees no device)" >&2
    echo "================================================================================" >&2
    exit 0
fi
device=$("$python" -c 'import torch; print(torch.cuda.device_count(), "x", torch.cuda.get_device_name(0))')
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
failed=0
"$python" -m disttensor.doctor --gpu | tee "$out/doctor" || failed=1
"$python" -m pytest -q -m gpu --junitxml="$out/tests" || failed=1
"$python" tools/ci/gpu_table.py "$device" "$out/doctor" "$out/tests"
exit $failed
