"""The command line: one file per verb. Data on stdout, everything else on stderr."""

import sys


def main() -> None:
    """Run the command (`app.main`). Ctrl-C while it is imported is exit code 130 too."""
    try:
        from onestem.cli.app import main as run
    except KeyboardInterrupt:
        sys.exit(130)
    run()
