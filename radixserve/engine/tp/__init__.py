"""Tensor parallelism (--tp-size): the engine is rank 0; the other ranks are processes of its own, which it starts and which end with it."""
