"""Training of the embedded families: healing a pruned sibling, and two tiny models from scratch."""
