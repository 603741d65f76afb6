"""``python -m disttensor.doctor``: whether all is well on this machine, and what to do where it is not."""

import sys

from .cli.doctor import main

if __name__ == "__main__":
    sys.exit(main())
