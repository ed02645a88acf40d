"""`python -m fedvit` is the command line."""

from fedvit.cli.main import main

main()
