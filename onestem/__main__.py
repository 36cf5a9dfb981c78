"""`python -m onestem` is `onestem`."""

from onestem.cli import main

if __name__ == "__main__":
    main()
