"""The real engine process around an EchoEngine. Argument: seconds per step. At its end it says how its collector of cycles was set."""

import gc
import os
import sys

from radixserve.engine.process import main
from tests.support.echo_engine import EchoEngine

if __name__ == "__main__":
    status = main(lambda config: EchoEngine(config, float(sys.argv[1])))
    print(f"collector of the engine: frozen {gc.get_freeze_count() > 10_000}, {gc.get_threshold()[2]}", file=sys.stderr)
    sys.stderr.flush()
    os._exit(status)
