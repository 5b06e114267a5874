"""How shares become rounds: who runs now, given what every job should have in the long run."""
