"""The workers, as the gateway calls them: tiers, circuits, bounds, deadlines, answer streams."""
