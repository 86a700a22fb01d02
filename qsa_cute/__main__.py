"""`python -m qsa_cute doctor`: what this installation has, and what each GPU here can use of it."""

from qsa_cute.doctor import main

if __name__ == "__main__":
    raise SystemExit(main())
