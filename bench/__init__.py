"""Speed against the peers: cases, providers, timing, results and plots. `python -m bench.run --help`."""
