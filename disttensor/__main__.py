"""``python -m disttensor``: the versions of disttensor and of what it is made of."""

import sys

from .cli.versions import main

if __name__ == "__main__":
    sys.exit(main())
