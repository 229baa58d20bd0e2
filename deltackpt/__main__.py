"""`python -m deltackpt` is the command line."""

from deltackpt.cli import main

main()
