"""The radixserve command and python -m radixserve. Imports are part of the run: Ctrl-C during them is no traceback."""

import sys


def main() -> int:
    try:
        from radixserve.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
