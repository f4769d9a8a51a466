"""Python's collector of cycles in a process that serves. The process stands still while it looks: let it look at little, and seldom."""

import gc

# Collections of the middle generation between two of all that is not frozen: at 700 objects more and 10 young collections each, a full one
# comes with every 700,000 objects, which is tens of thousands of waiting requests. Requests and pages come and go without cycles.
FULL_COLLECTION_INTERVAL = 100


def spare_pauses() -> None:
    """Call once, when all is loaded: what there is then lives as long as the process, and is not looked at again.

    Takes one full collection, so that nothing dead is kept for ever.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION_INTERVAL)
