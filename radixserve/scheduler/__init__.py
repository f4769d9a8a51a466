"""PURE: who runs in this step. Plans in integers; no torch, no asyncio; the clock is an argument."""
