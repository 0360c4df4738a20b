"""`python -m heedful` is the command `heedful`."""

from heedful.cli.app import main

if __name__ == "__main__":
    main()
