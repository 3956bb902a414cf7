"""`python -m wdsfs`."""

from wdsfs.cli import main

main()
