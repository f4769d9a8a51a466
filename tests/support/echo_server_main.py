"""The real server (uvicorn, signals, drain) over real engine processes that hold an EchoEngine.

At its end it says how its collector of cycles was set. Arguments: model directory, seconds per step, drain timeout in seconds.
"""

import gc
import sys
from functools import partial

from radixserve.config import EngineConfig, ServerConfig
from radixserve.engine.link import ProcessLink
from radixserve.server.serve import run_server

if __name__ == "__main__":
    model_dir, step_s, drain_timeout_s = sys.argv[1:]
    make_link = partial(ProcessLink, (sys.executable, "-m", "tests.support.echo_engine_main", step_s))
    server_config = ServerConfig(port=0, drain_timeout_s=float(drain_timeout_s))
    status = run_server(EngineConfig(model_path=model_dir), server_config, make_link=make_link)
    print(f"collector of the server: frozen {gc.get_freeze_count() > 10_000}, {gc.get_threshold()[2]}", file=sys.stderr)
    sys.exit(status)
