"""`python -m moefuse` is the `moefuse` command."""

from moefuse.cli import main

if __name__ == "__main__":
    main()
