"""The worker's HTTP routes: turn calls of the contract into work of `workers.serving`. They decide nothing."""
