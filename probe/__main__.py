"""Run the command line as ``python -m probe``."""

from probe.cli.main import main

if __name__ == "__main__":
    main()
