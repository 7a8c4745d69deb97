"""`python -m carryover` is the `platform` command."""

import sys

from carryover.cli import main

if __name__ == "__main__":
    sys.argv[0] = "platform"  # what records of the run name
    main()
