"""`python -m heedful` is the command `heedful`."""

from heedful.cli import main

if __name__ == "__main__":
    main()
