"""Exit codes of the command line, as documented in the README."""

OK = 0
BUG = 1
WRONG = 2
FAILED_ROWS = 3
NEAR_TIES = 3  # of verify: rows differ, by rounding only
DIFFERENT = 4  # of verify: a row differs in earnest
INTERRUPTED = 130
TERMINATED = 143  # by SIGTERM
