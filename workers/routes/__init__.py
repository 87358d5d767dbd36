"""The worker's HTTP surface. Turns calls of the contract into work of `workers.serving` and back; decides nothing."""
