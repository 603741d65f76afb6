#!/usr/bin/env bash
# Installs Debian's packages, for a suite that needs them: `tools/ci/packages.sh NAME...`. One call at a time: suites start
# side by side, and apt refuses a second one.
set -euo pipefail
exec 9<"$0"
flock 9
apt-get update -qq
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@"
