"""What a policy does to those who share a cluster, measured: who gains, who envies whom, whom lies help, who starves."""
