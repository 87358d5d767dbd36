"""The worker's published contract: messages, errors, client. Imports no torch and nothing else of `workers`."""
