"""`python -m offbeat` is the command `offbeat`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
