#!/usr/bin/env bash
# The tests that need a CUDA device: `tools/ci/gpu.sh [python]`. Where there is none nothing is tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:-python3}
if ! "$python" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "================================================================================" >&2
    echo "NOT TESTED: CUDA (torch sees no device)" >&2
    echo "================================================================================" >&2
    exit 0
fi
exec "$python" -m pytest -q -m gpu
