"""`python -m qsa_cute doctor`: what this installation has, and what each GPU here can use of it."""

import os
import sys

from qsa_cute.doctor import main

if __name__ == "__main__":
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    raise SystemExit(status)
