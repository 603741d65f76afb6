#!/usr/bin/env bash
# The tests with a real Slurm on this machine: `tools/ci/slurm.sh [pytest]`. They need root, Debian's Slurm and iproute2,
# which are installed where they can be; without them nothing is tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PATH:/usr/sbin:/sbin"

skipped() {
    echo "================================================================================" >&2
    echo "NOT TESTED: Slurm ($1)" >&2
    echo "================================================================================" >&2
    exit 0
}

[ "$(id -u)" = 0 ] || skipped "this user is not root"
for tool in slurmctld slurmd munged srun sbatch ip; do
    command -v $tool >/dev/null && continue
    tools/ci/packages.sh slurm-wlm munge iproute2 >/dev/null 2>&1 || skipped "Slurm is missing and cannot be installed"
    break
done
probe=$(unshare --net --uts --mount --pid --fork --mount-proc ip link add name left type veth 2>&1) ||
    skipped "no namespaces with a link between them: $probe"
exec ${1:-pytest} -q -m "slurm ${CASES-and not slow}" $(grep -rl --include="test_*.py" "mark.slurm" tests)
