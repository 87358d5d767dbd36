"""vLLM as an engine, and its KV connector, which also works in a vLLM server without the rest of a worker.

    plan.py        what `kv_transfer_params` holds, and the checked plan of what is loaded; plain values and functions
    scheduler.py   the connector in vLLM's scheduler: offers loads, publishes saved KV
    worker.py      the connector in a vLLM worker: copies between pools and paged blocks
    paged.py       the layout of keys and values in paged blocks, on the CPU and on CUDA
    config.py      the connector's settings, and what it needs to know of vLLM's model
    connector.py   both sides behind `KVConnectorBase_V1`; vLLM loads this file by name
    engine.py      a worker's `Engine` over vLLM's asynchronous engine
    loading.py     starts that engine from a worker's settings

Nothing here is imported where another engine runs.
"""
