#!/usr/bin/env python3
"""The build command line: `python build_cutedsl.py --help`."""

from qsa_cute.aot.cli import main

if __name__ == "__main__":
    main()
