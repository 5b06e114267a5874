"""The loop, the journal, replay."""
