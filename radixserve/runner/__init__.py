"""The runner computes: it turns a ScheduledBatch of integers into tensors, runs the decoder, and draws the next tokens."""

from radixserve.runner.model_runner import ModelRunner

__all__ = ["ModelRunner"]
