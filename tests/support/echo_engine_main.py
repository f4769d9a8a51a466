"""The real engine process around an EchoEngine. Argument: seconds per step."""

import os
import sys

from radixserve.engine.process import main
from tests.support.echo_engine import EchoEngine

if __name__ == "__main__":
    status = main(lambda config: EchoEngine(config, float(sys.argv[1])))
    sys.stderr.flush()
    os._exit(status)
