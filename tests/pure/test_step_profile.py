"""StepProfile: the table adds up, kinds are apart, and only the steps asked for count."""

from array import array

from radixserve.core import ScheduledBatch, ScheduledRow, StepTimes
from radixserve.engine.step_profile import PARTS, StepProfile

TIMES = StepTimes(0.001, 0.010, 0.002, attention_s=0.003, products_s=0.004, row_ops_s=0.001, head_s=0.0005, wait_s=0.0015)


def batch_of(step: int, *rows: ScheduledRow) -> ScheduledBatch:
    return ScheduledBatch(step=step, rows=rows)


def add(profile: StepProfile, batch: ScheduledBatch, start: float, goes_on: bool = True) -> str:
    return profile.add(batch, TIMES, tree=0.001, schedule=0.002, start=start, end=start + 0.020, goes_on=goes_on)


def test_the_table_comes_with_the_last_step_and_adds_up() -> None:
    prompt = ScheduledRow(slot=0, start=0, count=5, token_ids=array("i", [1, 2, 3, 4, 5]))
    decode = ScheduledRow(slot=0, start=5, count=1, token_ids=array("i"))
    profile = StepProfile(3)
    assert add(profile, batch_of(1, prompt), 1.000) == ""
    assert add(profile, batch_of(2, decode), 1.025, goes_on=False) == ""  # 5 ms after the end of the step before
    table = add(profile, batch_of(3, decode), 9.000)  # idle in between, which is nobody's time
    assert add(profile, batch_of(4, decode), 9.100) == ""
    title, head, *lines, rule, subtotal = table.splitlines()[: len(PARTS) + 4]
    assert title == "where the time of the first 3 steps went, per step (--profile-steps 3)"
    assert set(rule.strip()) == {"-"}
    assert head == "2 decode steps of 1.0 rows, 1.0 tokens: 22.500 ms a step"
    assert "1 prefill steps of 1.0 rows, 5.0 tokens: 20.000 ms a step" in table
    ms = {line[:32].strip(): float(line[32:].split()[0]) for line in [*lines, subtotal]}
    assert list(ms)[:-1] == [name for name, _ in PARTS]
    assert abs(sum(ms[name] for name, _ in PARTS) - 22.5) < 0.02
    assert ms["between steps (send, receive)"] == 2.5
    assert ms["rest of forward"] == 1.5
    assert ms["wait for the device"] == 1.5 and ms["build batch, plan"] == 1.0
    assert ms["rest of step"] == 2.5
    assert abs(ms["of which outside of kernels"] - (22.5 - 8.5 - 1.5)) < 0.02


def test_a_run_that_ends_early_tells_what_there_was() -> None:
    profile = StepProfile(10, is_overlapped=True)
    add(profile, batch_of(1, ScheduledRow(slot=0, start=5, count=1, token_ids=array("i"))), 1.0)
    title, head, *_ = profile.end().splitlines()
    assert "; the run ended after 1 of 10 steps; these were taken one by one, without the overlap of later ones" in title
    assert head == "1 decode steps of 1.0 rows, 1.0 tokens: 20.000 ms a step"
    complete = StepProfile(1)
    assert add(complete, batch_of(1, ScheduledRow(slot=0, start=5, count=1, token_ids=array("i"))), 1.0)
    assert complete.end() == ""


def test_no_steps_no_table() -> None:
    assert add(StepProfile(0), batch_of(1, ScheduledRow(slot=0, start=5, count=1, token_ids=array("i"))), 1.0) == ""
