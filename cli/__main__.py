"""`python -m specgen.cli`: the `specgen` command where no script of that name is installed."""

import sys

from specgen.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
