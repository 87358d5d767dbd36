"""What a log of one's own traffic tells before anything is switched on. Knows no gateway and no network."""
