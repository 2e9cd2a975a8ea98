"""Exit codes of the command line, as documented in the README."""

OK = 0
BUG = 1
WRONG = 2
FAILED_ROWS = 3
INTERRUPTED = 130
