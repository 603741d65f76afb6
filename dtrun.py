"""The command ``dtrun``, also as ``python -m dtrun``. Its code is in disttensor/cli/."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Runs dtrun with these arguments (default: the process's) and returns its exit code."""
    from disttensor.cli.command import main as run

    return run(argv)


if __name__ == "__main__":
    sys.exit(main())
