"""`python -m fedvit` is the command line."""

from fedvit.cli import main

main()
