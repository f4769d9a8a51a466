"""Replicas without a model: real trees, pools and schedulers under a virtual clock. docs/simulator.md says what is not modelled."""
