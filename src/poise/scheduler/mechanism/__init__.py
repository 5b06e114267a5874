"""How shares become rounds: who runs now, given what everybody should have in the long run."""
