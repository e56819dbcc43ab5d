"""Serves a model over HTTP: the same as `jaxllm serve`, with the same flags."""

import sys

from jaxllm.cli import main

if __name__ == "__main__":
    main(["serve", *sys.argv[1:]])
