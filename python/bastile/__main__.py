"""`python -m bastile` is the `bastile` command."""

import sys

from bastile.cli import main

if __name__ == "__main__":
    sys.exit(main())
