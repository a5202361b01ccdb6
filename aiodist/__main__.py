"""``python -m aiodist``."""

from aiodist.cli import main

if __name__ == "__main__":
    main()
