"""PURE: which page holds which tokens. No torch, no asyncio; the clock is an argument."""
