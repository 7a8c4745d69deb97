"""`python -m carryover` is the `platform` command."""

from carryover.cli import main

if __name__ == "__main__":
    main()
