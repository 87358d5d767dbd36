"""The gateway's HTTP surface: reads what a client sends, shapes what it gets. Decides nothing."""
