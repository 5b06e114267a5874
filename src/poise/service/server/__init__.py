"""The live service: HTTP API, accounts, the engine's loop over a store, and metrics."""
