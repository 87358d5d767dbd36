"""vLLM as an engine, and its connector, which is of use without the rest of a worker.

    params.py      what travels in `kv_transfer_params`, there and back
    plan.py        from tickets to what is loaded, checked; plain functions
    steps.py       what one step of vLLM loads and saves
    scheduling.py  the connector's side in vLLM's scheduler: says how much is known, publishes what was saved
    moving.py      the connector's side in a vLLM worker: between pools and paged blocks
    paged.py       how keys and values lie in paged blocks, on the CPU and on CUDA
    exchange.py    the pool in which published KV stands while it is lent
    shards.py      which heads a worker of a tensor-parallel group holds
    config.py      the connector's settings, and what it learns of vLLM's model
    connector.py   both sides behind `KVConnectorBase_V1`; the only file that vLLM loads by name
    engine.py      a worker's `Engine` over vLLM's asynchronous one
    loading.py     starts that from a worker's settings

Nothing here is imported where another engine runs.
"""
