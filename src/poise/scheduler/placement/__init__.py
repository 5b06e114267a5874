"""Claims onto GPUs. Three ways to choose among the free ones; a job that goes on keeps what it has."""
