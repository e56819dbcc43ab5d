"""Lets `python -m jaxllm` be the command line."""

from jaxllm.cli import main

if __name__ == "__main__":
    main()
