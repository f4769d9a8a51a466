"""For all tests: OpenMP threads that do not spin, Triton interpreted, every page of every engine recounted after each step."""

import os

# before torch is loaded: spinning threads on a busy machine make tests take many times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# before triton is loaded: its kernels then run on the CPU, in its interpreter
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from radixserve.core import RequestOutput
from radixserve.engine.engine import Engine


@pytest.fixture(autouse=True)
def account_after_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """DESIGN's rule, for engines in this process; servers that tests start are given --check-account-every-step."""
    plain_step = Engine.step

    def step(self: Engine) -> list[RequestOutput]:
        outputs = plain_step(self)
        self._scheduler.check_account()
        return outputs

    monkeypatch.setattr(Engine, "step", step)
