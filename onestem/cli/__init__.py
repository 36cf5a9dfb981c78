"""The command line: one file per verb. Data on stdout, everything else on stderr."""

from onestem.cli.app import main
