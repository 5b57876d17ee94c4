"""`python -m gradquorum` is the `gradquorum` command."""

from gradquorum.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
