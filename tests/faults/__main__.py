"""``python -m faults``, with the folder ``tests`` on the path."""

import sys

from faults.run import main

if __name__ == "__main__":
    sys.exit(main())
