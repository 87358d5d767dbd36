"""kvrelay's gateway beside others, in front of one upstream: CPU, throughput, latency, dropped streams and memory.

    python -m benchmarks.gateways --venvs DIR --json gateways.json
    python -m benchmarks.gateways --only kvrelay
    python -m benchmarks.gateways --only kvrelay --before CHECKOUT        before and after a change
    python -m benchmarks.gateways --only kvrelay --soak --memory-requests 100000

All gateways require an API key, and take turns in every round. The others are installed from the package index into
virtual environments under DIR on first use. LiteLLM gets a fiftieth of the others' requests, so that a whole run takes
about six minutes on two idle cores.

    cpu ms    user and system time of the gateway's processes per answered request: the only figure that holds on a
              machine with other work
    req/s     throughput with every connection sending its next request at once
    added     latency added to the upstream's, at a constant rate without queueing; a dash if the gateway cannot hold
              the rate
    dropped   concurrent streams that did not deliver every word and the end
    RSS       resident memory before and after the given number of requests; with --soak nothing else is measured, and
              it is printed after each tenth of them

kvrelay always calls a worker with a stream. The others pass on what the client asks for.
"""
