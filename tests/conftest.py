"""Before torch is loaded: OpenMP threads must not spin while they wait, or tests on a busy machine take many times as long."""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
