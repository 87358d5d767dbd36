"""The gateway: OpenAI-compatible, routes between tiers of models, hands a prompt's KV cache from small to large.

Of a worker it knows `workers.api` only; it imports neither torch nor transformers.
"""
