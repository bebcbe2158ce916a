"""`python -m partsong`."""

from partsong.cli.main import main

if __name__ == "__main__":
    main()
