"""Pure functions over a journal: completion times, fairness, utilisation, causes of delay."""
